"""Conversations: which tokens are targets, for templates of every kind, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import datasets
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from zorse_ds.errors import DataError
from zorse_ds.integrations.data import prepare_text, tokenise_chat

SPECIAL = ["<end>", "<s>", "<|im_start|>", "<|im_end|>"]
CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
MARKED = (
    "{% for m in messages %}{% if m.role == 'assistant' %}{{ 'A:' }}{% generation %}"
    "{{ m.content + '<end>' }}{% endgeneration %}{% else %}{{ 'U:' + m.content }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}{{ 'A:' }}{% endif %}"
)
THINKING = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}"
    "{% if m.role == 'assistant' and loop.last %}{{ '<think></think>' }}{% endif %}"
    "{{ m.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
STRICT = (
    "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system role') }}"
    "{% elif m.role != 'tool' %}{{ m.role + ':' + m.content + '<end>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant:' }}{% endif %}"
)


def tokenizer(template: str | None, **special: str) -> PreTrainedTokenizerFast:
    """Bytes and a few special tokens, so that text and tokens can be read off each other."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {word: i for i, word in enumerate([*SPECIAL, *alphabet])}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    made = PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token="<end>", extra_special_tokens=SPECIAL[1:], **special
    )
    made.chat_template = template
    return made


def turns(*contents: str, system: str | None = None) -> list[dict[str, str]]:
    messages = [] if system is None else [{"role": "system", "content": system}]
    for i, content in enumerate(contents):
        messages.append({"role": ("user", "assistant")[i % 2], "content": content})
    return messages


def read(rows: list[dict[str, Any]], made: Any, seq_len: int = 999) -> list[tuple[str, list[str]]]:
    """Of each sample the text, and the runs of targets in it."""
    samples = tokenise_chat(datasets.Dataset.from_list(rows), made, seq_len)
    found = []
    for sample in samples:
        ids, labels = sample["input_ids"], sample["labels"]
        assert all(label in (-100, i) for i, label in zip(ids, labels, strict=True))
        runs: list[list[int]] = []
        for before, label in zip([-100, *labels], labels, strict=False):
            if label != -100:
                runs += [[]] if before == -100 else []
                runs[-1].append(label)
        found.append((made.decode(ids), [made.decode(run) for run in runs]))
    return found


def test_only_answers_and_the_marks_that_end_them_are_targets() -> None:
    rows = [{"messages": turns("Hi", "Hello 🙂", "More?", "Né\n", system="Be kind")}]
    ((text, answers),) = read(rows, tokenizer(CHATML))
    assert text.startswith("<|im_start|>system\nBe kind<|im_end|>\n<|im_start|>user\nHi")
    assert answers == ["Hello 🙂<|im_end|>", "Né\n<|im_end|>"]


def test_marks_in_the_template_decide() -> None:
    ((text, answers),) = read([{"messages": turns("Hi", "Hello", "A:", "B")}], tokenizer(MARKED))
    assert text == "U:HiA:Hello<end>U:A:A:B<end>"
    assert answers == ["Hello<end>", "B<end>"]


def test_a_template_that_rewrites_earlier_answers_gives_a_sample_an_answer() -> None:
    rows = [{"messages": turns("1", "one", "2", "two")}]
    first, second = read(rows, tokenizer(THINKING))
    assert first[1] == ["<think></think>one<|im_end|>"]
    assert second[1] == ["<think></think>two<|im_end|>"]
    assert "<|im_start|>assistant\none<|im_end|>" in second[0]
    ((_, only),) = read([{"messages": turns("1", "one")}], tokenizer(THINKING))
    assert only == ["<think></think>one<|im_end|>"]


def test_other_forms_mean_the_same() -> None:
    made = tokenizer(CHATML)
    expected = read([{"messages": turns("Hi", "Hello")}], made)
    sharegpt = [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello"}]
    assert read([{"conversations": sharegpt}], made) == expected
    parts = turns("Hi", "Hello")
    parts[0] = {"role": "user", "content": [{"type": "text", "text": "Hi"}]}  # type: ignore[dict-item]
    parts[1] = {"role": "assistant", "content": [{"type": "text", "text": "Hello"}]}  # type: ignore[dict-item]
    assert read([{"messages": parts}], made) == expected


def test_of_a_prompt_of_messages_nothing_is_a_target() -> None:
    messages = turns("Hi", "Hello", "More?", "No")
    rows = [{"prompt": messages[:3], "completion": messages[3:]}]
    for template in (CHATML, MARKED):
        ((text, answers),) = read(rows, tokenizer(template))
        assert "Hello" in text
        assert [answer.removesuffix("<end>").removesuffix("<|im_end|>") for answer in answers] == [
            "No"
        ]


def test_texts_with_completions_need_no_template() -> None:
    rows = [{"prompt": "2+2=", "completion": "4"}, {"prompt": "", "completion": "x"}]
    found = read(rows, tokenizer(None))
    assert found == [("2+2=4<end>", ["4<end>"]), ("x<end>", ["x<end>"])]


def test_long_samples_are_cut_and_those_without_a_target_left_out() -> None:
    rows = [{"prompt": "ab", "completion": "cdef"}, {"prompt": "abcdefgh", "completion": "i"}]
    assert read(rows, tokenizer(None), 4) == [("abcd", ["cd"])]
    with pytest.raises(DataError, match="no conversation has an answer within 4 tokens"):
        read(rows[1:], tokenizer(None), 4)


def misspelt(role: str) -> list[dict[str, str]]:
    return [*turns("Hi"), {"role": role, "content": "Hello"}]


@pytest.mark.parametrize(
    ("rows", "template", "sentence"),
    [
        (
            [{"messages": turns("Hi", "Hello")}],
            None,
            "the tokenizer has no chat template; expected",
        ),
        ([{"messages": misspelt("asistant")}], CHATML, "did you mean 'assistant'"),
        ([{"messages": misspelt("robot")}], CHATML, r"data\[0\].messages\[1\].role is 'robot'"),
        ([{"messages": [{"role": "user", "text": "Hi"}]}], CHATML, r"\[0\].content is None"),
        ([{"messages": []}], CHATML, r"messages is \[\]; expected a list of messages"),
        ([{"messages": turns("Hi", "Oh", system="x")}], STRICT, r"\(no system role\)"),
        (
            [{"messages": [*turns("Hi"), {"role": "tool", "content": "7"}, *turns("Hi", "Oh")]}],
            STRICT,
            r"leaves out messages\[1\] of the role 'tool'",
        ),
        ([{"question": "a", "answer": "b"}], CHATML, "expected 'messages', or 'prompt' and"),
        ([{"messages": turns("Hi")}], CHATML, "no conversation has an answer"),
    ],
)
def test_what_cannot_be_read_is_one_sentence(rows: Any, template: Any, sentence: str) -> None:
    with pytest.raises(DataError, match=sentence) as caught:
        tokenise_chat(datasets.Dataset.from_list(rows), tokenizer(template), 99)
    assert "\n" not in str(caught.value)


def test_roles_that_the_template_names_are_known() -> None:
    template = CHATML.replace("m.role +", "('user' if m.role == 'critic' else m.role) +")
    rows = [{"messages": [{"role": "critic", "content": "Hi"}, *turns("Hi", "Oh")[1:]]}]
    assert read(rows, tokenizer(template))[0][1] == ["Oh<|im_end|>"]


def test_files_of_conversations_are_prepared_once(tmp_path: Path) -> None:
    path = tmp_path / "chat.jsonl"
    path.write_text(
        "".join(json.dumps({"messages": turns("Hi", f"no {i}")}) + "\n" for i in (1, 2))
    )

    def prepared(made: Any, builds: bool) -> datasets.Dataset:
        return prepare_text(
            path, made, 64, cache_dir=tmp_path / "cache", builds=builds, barrier=lambda: None
        )

    made = tokenizer(CHATML)
    first = prepared(made, True)
    assert len(first) == 2
    assert prepared(made, False)[:] == first[:]
    with pytest.raises(DataError, match="was not built"):
        prepared(tokenizer(THINKING), False)
