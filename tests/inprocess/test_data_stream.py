"""Streams give the samples of prepared data, in any portions, and go on where they were."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any, cast

import datasets
import pytest

from tests.inprocess.data_tokenizer import make_tokenizer
from zorse_ds.errors import DataError
from zorse_ds.integrations.data import SampleStream, load_source, prepare_text
from zorse_ds.integrations.recipe.shared_stream import SharedStream
from zorse_ds.runtime.dist_world import DistWorld

SEQ_LEN = 8


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "datasets")


def texts(count: int) -> list[str]:
    return [" ".join(f"w{(i + j) % 50}" for j in range(3 + 5 * i % 17)) for i in range(count)]


def source_in(folder: Path, form: str) -> Path:
    """Twelve documents, or pairs, as files of a form."""
    rows: list[dict[str, Any]] = [{"text": text} for text in texts(12)]
    if form == "pairs":
        halves = [(text[: len(text) // 3], text[len(text) // 3 :]) for text in texts(12)]
        rows = [{"prompt": prompt, "completion": rest} for prompt, rest in halves]
    if form == "parquet":
        datasets.Dataset.from_list(rows).to_parquet(folder / "data.parquet")
        return folder / "data.parquet"
    if form == "saved":
        datasets.Dataset.from_list(rows).save_to_disk(folder / "saved")
        return folder / "saved"
    (folder / "data.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return folder / "data.jsonl"


def stream_of(source: Path, batch_size: int = 3, **options: Any) -> SampleStream:
    return SampleStream(source, make_tokenizer(eos_token="<end>"), SEQ_LEN, batch_size, **options)


def taken(stream: SampleStream, count: int) -> list[dict[str, list[int]]]:
    return [sample for _ in range(count) for sample in next(stream)]


@pytest.mark.parametrize("form", ["jsonl", "parquet", "saved", "pairs"])
def test_the_first_epoch_is_what_preparing_gives(form: str, tmp_path: Path) -> None:
    source = source_in(tmp_path, form)
    prepared = prepare_text(
        source,
        make_tokenizer(eos_token="<end>"),
        SEQ_LEN,
        cache_dir=tmp_path / "cache",
        builds=True,
        barrier=lambda: None,
    ).to_list()
    # The last packed sample may be short there, and is filled from the next epoch here.
    whole = [row for row in prepared if form == "pairs" or len(row["input_ids"]) == SEQ_LEN]
    assert len(whole) >= 9
    assert taken(stream_of(source, 1), len(whole)) == whole


def test_no_token_is_lost_between_epochs(tmp_path: Path) -> None:
    source = source_in(tmp_path, "jsonl")
    tokenizer = make_tokenizer(eos_token="<end>")
    row = [i for text in texts(12) for i in [*tokenizer(text)["input_ids"], 0]]
    samples = taken(stream_of(source, 2), len(row) // 4)
    found = [i for sample in samples for i in sample["input_ids"]]
    assert len(found) > 2 * len(row)
    assert found == (row * 4)[: len(found)]


@pytest.mark.parametrize("form", ["jsonl", "pairs"])
@pytest.mark.parametrize("buffer", [0, 5])
@pytest.mark.parametrize("cut", [0, 2, 5, 9])
def test_a_stream_goes_on_from_its_state(form: str, buffer: int, cut: int, tmp_path: Path) -> None:
    """Also into the next epoch; and winding forward comes to the same place."""
    source = source_in(tmp_path, form)
    options = {"shuffle_buffer": buffer, "seed": 7}
    whole = stream_of(source, **options)
    taken(whole, cut)
    state = json.loads(json.dumps(whole.state_dict()))
    expected = taken(whole, 10)
    resumed, wound = stream_of(source, **options), stream_of(source, **options)
    resumed.load_state_dict(state)
    wound.skip_to(cut)
    assert taken(resumed, 10) == expected
    assert taken(wound, 10) == expected
    assert resumed.num_batches == wound.num_batches == cut + 10


def test_seeds_and_epochs_differ(tmp_path: Path) -> None:
    source = source_in(tmp_path, "pairs")
    first, second = (stream_of(source, 12, shuffle_buffer=12, seed=seed) for seed in (1, 2))
    epochs = [next(first) for _ in range(2)]
    assert epochs[0] != epochs[1]
    assert next(second) != epochs[0]


def test_a_stream_of_nothing_is_refused(tmp_path: Path) -> None:
    empty = tmp_path / "empty.jsonl"
    empty.write_text(json.dumps({"text": ""}) + "\n")
    with pytest.raises(DataError, match="holds no sample; expected at least one"):
        next(stream_of(empty))
    other = tmp_path / "other.jsonl"
    other.write_text(json.dumps({"body": "w1"}) + "\n")
    with pytest.raises(DataError, match="has no column 'text'; expected one of its columns 'body'"):
        stream_of(other)


@pytest.mark.parametrize(
    ("source", "revision"), [("owner/name", None), ("owner/name@v1.2", "v1.2")]
)
def test_a_name_of_the_hub_is_asked_for(
    source: str, revision: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []

    def load_dataset(name: str, **options: Any) -> datasets.Dataset:
        asked.append((name, options))
        return datasets.Dataset.from_list([{"text": "w1"}])

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    assert load_source(source, "test")["text"][:] == ["w1"]
    assert asked == [("owner/name", {"split": "test", "revision": revision, "streaming": False})]


def test_a_hub_out_of_reach_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    def load_dataset(name: str, **options: Any) -> datasets.Dataset:
        raise ConnectionError("no route\nto host")

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    with pytest.raises(DataError) as caught:
        load_source("owner/name")
    assert str(caught.value) == (
        "owner/name is neither a path here nor a data set of the hub that can be read (no route); "
        "expected one of them"
    )


class TwoRanks:
    """What the first of two ranks says, both hear."""

    def __init__(self) -> None:
        self.said: Any = None

    def from_first(self, value: Any) -> Any:
        self.said = value if value is not None else self.said
        return pickle.loads(pickle.dumps(self.said))


def shared(own: SampleStream | None, ranks: TwoRanks) -> SharedStream:
    return SharedStream(own, cast(DistWorld, ranks))


def test_a_shared_stream_is_read_by_one_rank(tmp_path: Path) -> None:
    source, ranks = source_in(tmp_path, "pairs"), TwoRanks()
    expected = stream_of(source)
    first, second = shared(stream_of(source), ranks), shared(None, ranks)
    second.resume(None, 4)
    for _ in range(4):
        batch = next(expected)
        assert next(first) == next(second) == batch
    assert first.state_dict() == expected.state_dict() and second.state_dict() == {}
    # The state is older than the step that is gone on from.
    state = first.state_dict()
    next(expected)
    again = shared(stream_of(source), ranks)
    again.resume(state, 5)
    assert next(again) == next(expected)


def test_data_that_the_first_rank_cannot_use_are_told_by_all(tmp_path: Path) -> None:
    (tmp_path / "data.jsonl").write_text('{"text": ""}\n')
    ranks = TwoRanks()
    for stream in (shared(stream_of(tmp_path / "data.jsonl"), ranks), shared(None, ranks)):
        with pytest.raises(DataError, match="holds no sample; expected at least one"):
            next(stream)
