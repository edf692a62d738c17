"""Small files: every mistake is one sentence of the caller's error, a crash loses nothing."""

import json
import os
from pathlib import Path

import pytest

from zorse_ds.errors import ConfigError, PlanError
from zorse_ds.files import parse_json, read_json, write_text


def test_reads_an_object(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text('{"a": [1, {"b": null}]}')
    assert read_json(path, PlanError) == {"a": [1, {"b": None}]}


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("", "line 1 column 1"),
        ('{"a": }', "line 1 column 7"),
        ('{\n"a": 1,\n}', "line 3 column 1"),
        ("[1]", "holds a list; expected a JSON object"),
        ("3", "holds a int"),
        ("null", "holds a NoneType"),
        ('{"a": 1, "a": 2}', "key 'a' is given twice"),
        ('{"x": [{"b": 1, "c": 2, "b": 1}]}', "key 'b' is given twice"),
        ('{"a":' * 100_000, "nested too deeply"),
        ("[" * 100_000, "nested too deeply"),
        ('{"a": ' + "9" * 5000 + "}", "number that is too long"),
    ],
)
def test_each_mistake_is_one_sentence(text: str, sentence: str) -> None:
    with pytest.raises(ConfigError, match=r"^here") as caught:
        parse_json(text, "here", ConfigError)
    assert sentence in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("content", [b"\xff\xfe", b'{"a": "\x80"}'])
def test_bytes_that_are_no_text(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "a.json"
    path.write_bytes(content)
    with pytest.raises(PlanError, match="not UTF-8"):
        read_json(path, PlanError)


def test_missing_file_and_folder(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match="No such file"):
        read_json(tmp_path / "none.json", PlanError)
    with pytest.raises(PlanError, match="directory"):
        read_json(tmp_path, PlanError)


def test_write_makes_folders_and_leaves_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "new" / "folder" / "a.json"
    write_text(path, "one")
    write_text(path, "two")
    assert path.read_text() == "two"
    assert [p.name for p in path.parent.iterdir()] == ["a.json"]


def test_a_crash_while_writing_keeps_the_old_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a.json"
    write_text(path, json.dumps({"old": 1}))

    def crash(_: int) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(os, "fsync", crash)
    with pytest.raises(OSError, match="disk full"):
        write_text(path, "half")
    assert json.loads(path.read_text()) == {"old": 1}
    assert [p.name for p in tmp_path.iterdir()] == ["a.json"]
