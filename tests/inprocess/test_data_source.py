"""Opening text: every form gives the same documents, every mistake one clear sentence."""

import gzip
import json
from pathlib import Path

import datasets
import pytest

from zorse_ds.errors import DataError
from zorse_ds.integrations.data import load_source, source_files

TEXTS = ["one", "two\nlines", "three"]


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")


def write_jsonl(path: Path, texts: list[str], column: str = "text") -> Path:
    path.write_text("".join(json.dumps({column: text}) + "\n" for text in texts))
    return path


def test_jsonl(tmp_path: Path) -> None:
    assert load_source(write_jsonl(tmp_path / "a.jsonl", TEXTS))["text"][:] == TEXTS


def test_compressed_jsonl(tmp_path: Path) -> None:
    plain = write_jsonl(tmp_path / "a.jsonl", TEXTS)
    packed = tmp_path / "b.jsonl.gz"
    packed.write_bytes(gzip.compress(plain.read_bytes()))
    assert load_source(packed)["text"][:] == TEXTS


def test_json_list(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text(json.dumps([{"text": text} for text in TEXTS]))
    assert load_source(str(path))["text"][:] == TEXTS


def test_parquet(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    datasets.Dataset.from_dict({"text": TEXTS}).to_parquet(str(path))
    assert load_source(path)["text"][:] == TEXTS


def test_text_file_is_one_document_under_any_column_name(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("first\n\nsecond\n")
    opened = load_source(path, text_column="content")
    assert opened["content"][:] == ["first\n\nsecond\n"]


def test_glob_reads_files_by_name(tmp_path: Path) -> None:
    for name in ("b", "a", "c"):
        write_jsonl(tmp_path / f"{name}.jsonl", [name])
    assert load_source(str(tmp_path / "*.jsonl"))["text"][:] == ["a", "b", "c"]


def test_list_of_files_keeps_its_order(tmp_path: Path) -> None:
    files = [write_jsonl(tmp_path / f"{name}.jsonl", [name]) for name in ("b", "a")]
    assert load_source(files)["text"][:] == ["b", "a"]


def test_saved_folder_and_its_splits(tmp_path: Path) -> None:
    saved = {name: datasets.Dataset.from_dict({"text": [name]}) for name in ("train", "test")}
    datasets.DatasetDict(saved).save_to_disk(str(tmp_path / "both"))
    saved["test"].save_to_disk(str(tmp_path / "one"))
    assert load_source(tmp_path / "both", "test")["text"][:] == ["test"]
    assert load_source(tmp_path / "one")["text"][:] == ["test"]
    with pytest.raises(DataError, match=r"no split 'tset'; expected 'test' or 'train'.*'test'\?"):
        load_source(tmp_path / "both", "tset")
    with pytest.raises(DataError, match="no split is given"):
        load_source(tmp_path / "both")
    with pytest.raises(DataError, match="without splits, not split 'train'"):
        load_source(tmp_path / "one", "train")


def test_slice_of_files(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", [str(i) for i in range(10)])
    assert load_source(path, "train[80%:]")["text"][:] == ["8", "9"]


def test_tokenised_data_needs_no_text(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps({"input_ids": [1, 2]}) + "\n")
    assert load_source(path).column_names == ["input_ids"]


def test_missing_file_names_the_nearest(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "train.jsonl", TEXTS)
    with pytest.raises(DataError, match=r"trian.jsonl does not exist; .*'train.jsonl'\?"):
        load_source(tmp_path / "trian.jsonl")
    with pytest.raises(DataError, match=r"already the folder .*nowhere is missing"):
        load_source(tmp_path / "nowhere" / "train.jsonl")


def test_missing_column_names_the_nearest(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", TEXTS, column="content")
    with pytest.raises(DataError, match=r"no column 'contents'; .*did you mean 'content'\?"):
        load_source(path, text_column="contents")


def test_nothing_to_read_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no file matches"):
        source_files(tmp_path / "*.jsonl")
    with pytest.raises(DataError, match="list of data files is empty"):
        source_files([])
    with pytest.raises(DataError, match="folder that datasets did not save"):
        load_source(tmp_path)


def test_unknown_and_mixed_formats_are_refused(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("text\none\n")
    (tmp_path / "a.txt").write_text("one")
    other = write_jsonl(tmp_path / "a.jsonl", TEXTS)
    with pytest.raises(DataError, match=r"unknown ending '.csv'"):
        load_source(tmp_path / "a.csv")
    with pytest.raises(DataError, match=r"a.txt is text and .*a.jsonl is json"):
        load_source([tmp_path / "a.txt", other])


def test_broken_json_is_named(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "one"}\n{"text": \n')
    with pytest.raises(DataError, match=r"a.jsonl cannot be read as json: "):
        load_source(path)


@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.parquet", "a.jsonl.gz"])
def test_an_empty_file_is_one_sentence(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(gzip.compress(b"") if name.endswith(".gz") else b"")
    with pytest.raises(
        DataError, match=r"is empty; expected at least one|cannot be read as parquet"
    ):
        load_source(tmp_path / name)


@pytest.mark.parametrize("value", [7, [1, 2], True])
def test_a_column_without_text_is_refused(value: object, tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text(json.dumps({"text": value}) + "\n")
    with pytest.raises(DataError, match=r"column 'text' holds .*; expected text"):
        load_source(tmp_path / "a.jsonl")


def test_files_with_other_columns_are_told_apart(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"messages": []}\n')
    (tmp_path / "b.jsonl").write_text('{"prompt": "x", "completion": "y"}\n')
    with pytest.raises(DataError, match=r"columns .*prompt.*, others messages; expected") as told:
        load_source(tmp_path / "*.jsonl")
    assert "\n" not in str(told.value)


def test_a_file_of_another_kind_is_not_suggested(tmp_path: Path) -> None:
    (tmp_path / "train.json5").write_text("")
    with pytest.raises(DataError, match=r"does not exist; expected a data file$"):
        load_source(tmp_path / "train.jsonl")
