"""A folder of checkpoints: tags, `latest`, and how a new one takes its place in one go.

Hidden names mark what is not to be read: `.TAG.incomplete` is being written, `.TAG.replaced` was
there before under the same tag, `.TAG.removed` is being deleted. Whatever instant a process dies
at, every visible checkpoint is whole, and the next save cleans up.
"""

import os
import shutil
from pathlib import Path

from zorse_ds.errors import CheckpointError
from zorse_ds.files import write_text

MANIFEST_NAME = "manifest.json"
LATEST_NAME = "latest"
_INCOMPLETE, _REPLACED, _REMOVED = ".incomplete", ".replaced", ".removed"


class CheckpointFolder:
    """The checkpoints in `root`, by tag. One process writes at a time."""

    def __init__(self, root: str | Path) -> None:
        if not isinstance(root, str | os.PathLike) or not str(root):
            raise CheckpointError(
                f"the checkpoint folder is {root!r}; expected the path of a folder"
            )
        self.root = Path(root).expanduser().absolute()

    def path(self, tag: str) -> Path:
        """Where the checkpoint of that tag is, or will be."""
        return self.root / tag

    def incomplete(self, tag: str) -> Path:
        """Where it is written until it is whole."""
        return self.root / f".{tag}{_INCOMPLETE}"

    def tags(self) -> list[str]:
        """Tags of all whole checkpoints, the oldest first."""
        manifests = [path for path in self.root.glob(f"[!.]*/{MANIFEST_NAME}") if path.is_file()]
        manifests.sort(key=lambda path: (path.stat().st_mtime_ns, path.parent.name))
        return [path.parent.name for path in manifests]

    def latest(self) -> str | None:
        """The tag that `latest` names; None when there is no such file."""
        path = self.root / LATEST_NAME
        try:
            return path.read_bytes().decode().strip()
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as problem:
            reason = getattr(problem, "strerror", None) or "it is no text"
            raise CheckpointError(
                f"{path} cannot be read ({reason}); expected the tag of a checkpoint"
            ) from None

    def find(self, tag: str) -> Path:
        """The folder of a whole checkpoint; `CheckpointError` names those that there are."""
        check_tag(tag)
        for path in (self.path(tag), self.root / f".{tag}{_REPLACED}"):
            if (path / MANIFEST_NAME).is_file():
                return path
        known = self.tags()
        found = "is not whole" if self.path(tag).is_dir() else "does not exist"
        expected = f"one of {', '.join(known)}" if known else "a folder with checkpoints"
        raise CheckpointError(f"the checkpoint {self.path(tag)} {found}; expected {expected}")

    def begin(self, tag: str) -> Path:
        """Clean up after saves that did not end, and make the folder to write into."""
        self.root.mkdir(parents=True, exist_ok=True)
        self._clean()
        path = self.incomplete(tag)
        path.mkdir()
        return path

    def commit(self, tag: str, *, is_latest: bool) -> None:
        """Make the folder that `begin` gave the checkpoint of `tag`, and `latest` name it.

        Its files must be on the disk already (`sync_file`).
        """
        sync_folder(self.incomplete(tag))
        final, replaced = self.path(tag), self.root / f".{tag}{_REPLACED}"
        if final.exists():
            final.rename(replaced)
        self.incomplete(tag).rename(final)
        sync_folder(self.root)
        if is_latest:
            write_text(self.root / LATEST_NAME, tag)
            sync_folder(self.root)
        shutil.rmtree(replaced, ignore_errors=True)

    def abandon(self, tag: str) -> None:
        """Remove what was written of a checkpoint that cannot be finished."""
        shutil.rmtree(self.incomplete(tag), ignore_errors=True)

    def prune(self, keep_last: int) -> list[str]:
        """Remove all but the newest `keep_last`, never what `latest` names; returns what went."""
        latest = self.latest()
        old = [tag for tag in self.tags()[:-keep_last] if tag != latest]
        for tag in old:
            removed = self.root / f".{tag}{_REMOVED}"
            self.path(tag).rename(removed)
            shutil.rmtree(removed, ignore_errors=True)
        return old

    def _clean(self) -> None:
        for replaced in self.root.glob(f".*{_REPLACED}"):
            tag = replaced.name[1 : -len(_REPLACED)]
            if self.path(tag).exists():
                shutil.rmtree(replaced)
            else:
                replaced.rename(self.path(tag))
        for suffix in (_INCOMPLETE, _REMOVED):
            for path in self.root.glob(f".*{suffix}"):
                shutil.rmtree(path)
        for path in self.root.glob(f".{LATEST_NAME}.*"):
            path.unlink()


def check_tag(tag: str) -> None:
    """Raise `CheckpointError` for a tag that is no visible folder name."""
    if not tag or tag.startswith(".") or "/" in tag or "\0" in tag or tag == LATEST_NAME:
        raise CheckpointError(
            f"the tag is {tag!r}; expected the name of a folder, such as 'global_step100'"
        )


def sync_file(path: Path) -> None:
    """Have the bytes of a file on the disk before going on."""
    with path.open("rb") as file:
        os.fsync(file.fileno())


def sync_folder(path: Path) -> None:
    """Have the names in a folder on the disk before going on."""
    handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
