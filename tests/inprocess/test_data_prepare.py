"""Building once: one rank works, all read the same, failures reach everybody."""

import os
import threading
from pathlib import Path

import datasets
import pytest

from tests.inprocess.data_tokenizer import make_tokenizer
from zorse_ds.errors import DataError
from zorse_ds.integrations.data import cache_key, prepare_once, prepare_text


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")


class Job:
    """Ranks as threads that meet at one barrier."""

    def __init__(self, num_ranks: int, builders: set[int]) -> None:
        self.num_ranks, self.builders = num_ranks, builders
        self.results: dict[int, object] = {}
        self._barrier = threading.Barrier(num_ranks)

    def run(self, build, folder: Path) -> dict[int, object]:
        ranks = range(self.num_ranks)
        threads = [threading.Thread(target=self._rank, args=(r, build, folder)) for r in ranks]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(timeout=60)
        return self.results

    def _rank(self, rank: int, build, folder: Path) -> None:
        def barrier() -> None:
            self._barrier.wait(timeout=30)

        try:
            builds = rank in self.builders
            self.results[rank] = prepare_once(build, folder, builds=builds, barrier=barrier)
        except Exception as error:
            self.results[rank] = error


def test_one_rank_builds_and_all_read_from_disk(tmp_path: Path) -> None:
    calls = []

    def build() -> datasets.Dataset:
        calls.append(1)
        return datasets.Dataset.from_dict({"x": [1, 2, 3]})

    folder = tmp_path / "deep" / "key"
    for _ in range(2):
        results = Job(3, builders={0}).run(build, folder)
        assert [results[rank]["x"][:] for rank in range(3)] == [[1, 2, 3]] * 3
        assert all(results[rank].cache_files for rank in range(3))
    assert len(calls) == 1
    assert os.listdir(folder.parent) == ["key"]


def test_two_builders_of_one_folder_agree(tmp_path: Path) -> None:
    meeting = threading.Barrier(2)

    def build() -> datasets.Dataset:
        meeting.wait(timeout=30)
        return datasets.Dataset.from_dict({"x": [4]})

    results = Job(3, builders={0, 2}).run(build, tmp_path / "key")
    assert [results[rank]["x"][:] for rank in range(3)] == [[4]] * 3
    assert os.listdir(tmp_path) == ["key"]


def test_failure_of_the_builder_reaches_all_and_leaves_nothing(tmp_path: Path) -> None:
    def build() -> datasets.Dataset:
        raise DataError("bad column")

    results = Job(2, builders={0}).run(build, tmp_path / "key")
    assert str(results[0]) == "bad column"
    assert isinstance(results[1], DataError) and "was not built" in str(results[1])
    assert os.listdir(tmp_path) == []


def test_prepare_text_builds_again_when_the_source_changes(tmp_path: Path) -> None:
    tokenizer = make_tokenizer(eos_token="<end>")
    source = tmp_path / "a.jsonl"
    source.write_text('{"text": "w0 w1"}\n')

    def prepare() -> datasets.Dataset:
        folder = tmp_path / "packed"
        return prepare_text(
            source, tokenizer, 4, cache_dir=folder, builds=True, barrier=lambda: None
        )

    assert prepare()["input_ids"][:] == [[2, 3, 0]]
    source.write_text('{"text": "w0 w1 w2"}\n')
    assert prepare()["input_ids"][:] == [[2, 3, 4, 0]]
    assert len(os.listdir(tmp_path / "packed")) == 2


def test_key_changes_with_all_that_changes_samples(tmp_path: Path) -> None:
    first, second = tmp_path / "a", tmp_path / "b"
    for file in (first, second):
        file.write_text("text")
    tokenizer, other = make_tokenizer(eos_token="<end>"), make_tokenizer(eos_token="w1")
    keys = [
        cache_key([first], tokenizer, 8, "text"),
        cache_key([second], tokenizer, 8, "text"),
        cache_key([first, second], tokenizer, 8, "text"),
        cache_key([first], other, 8, "text"),
        cache_key([first], tokenizer, 9, "text"),
        cache_key([first], tokenizer, 8, "body"),
        cache_key([first], tokenizer, 8, "text", "test"),
    ]
    os.utime(first, ns=(1, 1))
    keys.append(cache_key([first], tokenizer, 8, "text"))
    assert len(set(keys)) == len(keys)


def test_key_does_not_change_with_use_of_the_tokenizer(tmp_path: Path) -> None:
    file = tmp_path / "a"
    file.write_text("text")
    tokenizer = make_tokenizer(eos_token="<end>", pad_token="<end>")
    before = cache_key([file], tokenizer, 8, "text")
    tokenizer(["w1", "w1 w2"], padding=True, truncation=True, max_length=5)
    assert cache_key([file], tokenizer, 8, "text") == before
