"""Whatever instant a save dies at, every visible checkpoint is whole, and the next save cleans."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from zorse_ds.core.checkpoint import folder as module
from zorse_ds.core.checkpoint.folder import MANIFEST_NAME, CheckpointFolder, check_tag
from zorse_ds.errors import CheckpointError


class DiedError(Exception):
    """Stands for SIGKILL."""


def save(root: Path, tag: str, content: str = "", **options: Any) -> None:
    folder = CheckpointFolder(root)
    unfinished = folder.begin(tag)
    (unfinished / MANIFEST_NAME).write_text(content or tag)
    folder.commit(tag, **{"is_latest": True} | options)


def content(root: Path, tag: str) -> str:
    return (CheckpointFolder(root).find(tag) / MANIFEST_NAME).read_text()


def hidden(root: Path) -> list[str]:
    return [path.name for path in root.iterdir() if path.name.startswith(".")]


def test_latest_names_the_last_one_saved(tmp_path: Path) -> None:
    folder = CheckpointFolder(tmp_path / "new" / "root")
    assert folder.latest() is None
    save(folder.root, "a")
    save(folder.root, "b")
    save(folder.root, "c", is_latest=False)
    assert folder.latest() == "b"
    assert folder.tags() == ["a", "b", "c"]
    assert (folder.root / "latest").read_text() == "b"


def test_the_same_tag_is_replaced(tmp_path: Path) -> None:
    save(tmp_path, "a", "old")
    save(tmp_path, "a", "new")
    assert content(tmp_path, "a") == "new" and not hidden(tmp_path)


@pytest.mark.parametrize("dies_at", range(12))
@pytest.mark.parametrize("tag", ["a", "b"])
def test_a_death_at_any_call_leaves_what_there_was(
    tag: str, dies_at: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path, "a", "first")
    calls = 0

    def counted(call: Callable[..., Any]) -> Callable[..., Any]:
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls > dies_at:
                raise DiedError
            return call(*args, **kwargs)

        return wrapper

    with monkeypatch.context() as patch:
        for name in ("sync_folder", "write_text"):
            patch.setattr(module, name, counted(getattr(module, name)))
        for name in ("rename", "mkdir"):
            patch.setattr(Path, name, counted(getattr(Path, name)))
        patch.setattr(module.shutil, "rmtree", counted(module.shutil.rmtree))
        try:
            save(tmp_path, tag, "second")
            died = False
        except DiedError:
            died = True
    latest = CheckpointFolder(tmp_path).latest()
    assert latest in ("a", tag)
    assert content(tmp_path, latest) in ("first", "second")
    assert died or content(tmp_path, tag) == "second"
    if tag == "b":
        assert content(tmp_path, "a") == "first"
    save(tmp_path, "c", "third")
    assert not hidden(tmp_path)
    assert content(tmp_path, "a") in ("first", "second") and content(tmp_path, "c") == "third"


def test_only_the_newest_are_kept(tmp_path: Path) -> None:
    for tag in "abcde":
        save(tmp_path, tag)
    folder = CheckpointFolder(tmp_path)
    assert folder.prune(3) == ["a", "b"]
    assert folder.tags() == ["c", "d", "e"]
    assert folder.prune(3) == []


def test_what_latest_names_is_never_removed(tmp_path: Path) -> None:
    save(tmp_path, "best")
    for tag in "abc":
        save(tmp_path, tag, is_latest=False)
    assert CheckpointFolder(tmp_path).prune(1) == ["a", "b"]
    assert CheckpointFolder(tmp_path).tags() == ["best", "c"]


def test_folders_of_others_are_left_alone(tmp_path: Path) -> None:
    (tmp_path / "notes").mkdir()
    (tmp_path / ".hidden").mkdir()
    for tag in "ab":
        save(tmp_path, tag)
    CheckpointFolder(tmp_path).prune(1)
    assert (tmp_path / "notes").is_dir() and (tmp_path / ".hidden").is_dir()


@pytest.mark.parametrize("tag", ["", ".a", "a/b", "../a", "a\0", "latest"])
def test_a_tag_is_a_visible_name(tag: str) -> None:
    with pytest.raises(CheckpointError, match="expected the name of a folder"):
        check_tag(tag)


def test_a_tag_that_is_not_there_is_answered_with_those_that_are(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="does not exist; expected a folder with checkpoints"):
        CheckpointFolder(tmp_path).find("a")
    save(tmp_path, "a")
    (tmp_path / "b").mkdir()
    with pytest.raises(CheckpointError, match=r"b is not whole; expected one of a$"):
        CheckpointFolder(tmp_path).find("b")
    with pytest.raises(CheckpointError, match="the checkpoint folder is None"):
        CheckpointFolder(None)  # type: ignore[arg-type]
