"""Packing against a plain reference: one long row of tokens, cut every seq_len."""

import random
from typing import Any

import datasets
import pytest

from tests.inprocess.data_tokenizer import WORDS, make_tokenizer
from zorse_ds.errors import DataError
from zorse_ds.integrations.data import packing, tokenise_and_pack


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return make_tokenizer(eos_token="<end>")


def reference(texts: list[str | None], tokenizer: Any, seq_len: int) -> list[list[int]]:
    row = [
        token
        for text in texts
        if text
        for token in [*tokenizer.encode(text), tokenizer.eos_token_id]
    ]
    return [row[at : at + seq_len] for at in range(0, len(row), seq_len)]


def random_texts(draw: random.Random) -> list[str | None]:
    lengths = [draw.choice([0, 1, 2, 3, 5, 8, 13, 70]) for _ in range(draw.randint(1, 90))]
    texts = [" ".join(draw.choices(WORDS, k=length)) for length in lengths]
    return [*texts, None, "w1"]


@pytest.mark.parametrize("seed", range(12))
def test_nothing_is_lost_between_batches(
    seed: int, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    draw = random.Random(seed)
    texts, seq_len = random_texts(draw), draw.choice([2, 3, 7, 16, 64, 4000])
    batch_size = draw.randint(1, 20)
    whole_map = datasets.Dataset.map
    monkeypatch.setattr(
        datasets.Dataset,
        "map",
        lambda self, *args, **kwargs: whole_map(self, *args, batch_size=batch_size, **kwargs),
    )
    packed = tokenise_and_pack(datasets.Dataset.from_dict({"text": texts}), tokenizer, seq_len)
    assert packed["input_ids"][:] == reference(texts, tokenizer, seq_len)
    assert packed["labels"][:] == packed["input_ids"][:]


def test_several_processes_give_the_same_samples(tokenizer: Any) -> None:
    texts = random_texts(random.Random(99))
    dataset = datasets.Dataset.from_dict({"story": texts})
    packed = tokenise_and_pack(dataset, tokenizer, 6, text_column="story", num_proc=2)
    assert packed["input_ids"][:] == reference(texts, tokenizer, 6)


def test_only_the_last_sample_is_short(tokenizer: Any) -> None:
    dataset = datasets.Dataset.from_dict({"text": ["w1 w2 w3 w4"] * 3})
    packed = tokenise_and_pack(dataset, tokenizer, 4)
    assert [len(ids) for ids in packed["input_ids"]] == [4, 4, 4, 3]


def test_document_that_ends_in_eos_gets_no_second(tokenizer: Any) -> None:
    dataset = datasets.Dataset.from_dict({"text": ["w1 <end>", "w2"]})
    packed = tokenise_and_pack(dataset, tokenizer, 8)
    assert packed["input_ids"][:] == [[3, 0, 4, 0]]


def test_selected_and_shuffled_documents(tokenizer: Any) -> None:
    dataset = datasets.Dataset.from_dict({"text": WORDS}).shuffle(seed=1).select(range(20))
    packed = tokenise_and_pack(dataset, tokenizer, 7)
    assert packed["input_ids"][:] == reference(dataset["text"][:], tokenizer, 7)


def test_tokenised_samples_are_taken_as_they_are(tokenizer: Any) -> None:
    columns = {"input_ids": [[1, 2, 3], [4]], "labels": [[-100, 2, 3], [4]]}
    dataset = datasets.Dataset.from_dict(columns)
    assert tokenise_and_pack(dataset, tokenizer, 2).to_dict() == columns


def test_labels_are_added_and_padding_is_no_target(tokenizer: Any) -> None:
    plain = datasets.Dataset.from_dict({"input_ids": [[1, 2], [3]]})
    assert tokenise_and_pack(plain, tokenizer, 2)["labels"][:] == [[1, 2], [3]]
    padded = datasets.Dataset.from_dict({"input_ids": [[1, 0]], "attention_mask": [[1, 0]]})
    assert tokenise_and_pack(padded, tokenizer, 2)["labels"][:] == [[1, packing.IGNORED_LABEL]]


def test_mistakes_are_named(tokenizer: Any) -> None:
    dataset = datasets.Dataset.from_dict({"content": ["w1"]})
    with pytest.raises(DataError, match=r"no column 'contnet'; .*did you mean 'content'\?"):
        tokenise_and_pack(dataset, tokenizer, 4, text_column="contnet")
    with pytest.raises(DataError, match="no eos_token"):
        tokenise_and_pack(dataset, make_tokenizer(), 4, text_column="content")
    with pytest.raises(DataError, match="seq_len is 1"):
        tokenise_and_pack(dataset, tokenizer, 1, text_column="content")
    empty = datasets.Dataset.from_dict({"text": ["", None]})
    with pytest.raises(DataError, match="holds no text"):
        tokenise_and_pack(empty, tokenizer, 4)
