"""The folder that all ranks save a model into: checked first, filled in one go at the end."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from zorse_ds.errors import ModelError
from zorse_ds.runtime.checkpoint.exchange import Exchange

UNFINISHED = ".unfinished"


class SaveTarget:
    """A folder to save into. Raises `ModelError` on every rank, before anything is written.

    `unfinished`, a hidden folder inside, takes the files; `finish` moves them in. What fails
    within `attempt` on one rank is raised on all by the next `agree`. Collective: every rank
    constructs it.
    """

    def __init__(self, folder: str | Path, world: Exchange) -> None:
        self._world = world
        self._problem: str | None = None
        self.folder, self.unfinished = Path(), Path()
        with self.attempt():
            if not isinstance(folder, str | Path) or not str(folder):
                raise ModelError(f"the folder is {folder!r}; expected the path of one to write")
            self.folder = Path(folder).expanduser().absolute()
            self.unfinished = self.folder / UNFINISHED
            if world.rank == 0:
                self._open()
        self.agree(None)
        with self.attempt():
            if not self.unfinished.is_dir():
                raise ModelError(
                    f"rank {world.rank} does not see {self.folder}; expected a folder that all "
                    "ranks share"
                )
        self.agree(None)

    @contextmanager
    def attempt(self) -> Iterator[None]:
        """Keep an error for the next `agree`."""
        try:
            yield
        except ModelError as error:
            self._problem = self._problem or str(error)
        except Exception as error:  # a full disk shows itself in many ways, in others' code too
            reason = getattr(error, "strerror", None) or f"{type(error).__name__}: {error}"
            self._problem = self._problem or (
                f"{self.folder} cannot be written by rank {self._world.rank} ({reason}); expected "
                "a folder with room in which it may write"
            )

    def agree(self, value: Any) -> list[Any]:
        """Collective: every rank's value; `ModelError` everywhere if an attempt failed on one."""
        facts: list[Any] = self._world.gather_objects((self._problem, value))
        problems = [problem for problem, _ in facts if problem is not None]
        if problems:
            if self._world.rank == 0 and self.unfinished.name == UNFINISHED:
                shutil.rmtree(self.unfinished, ignore_errors=True)
            raise ModelError(problems[0])
        return [value for _, value in facts]

    def finish(self) -> None:
        """Replace the model that was in the folder by the files written, the index last."""
        for old in self.folder.glob("model*.safetensors*"):
            old.unlink()
        written = sorted(self.unfinished.iterdir(), key=lambda p: p.name.endswith("index.json"))
        for path in written:
            place = self.folder / path.name
            if place.is_dir():
                shutil.rmtree(place)
            path.replace(place)
        self.unfinished.rmdir()

    def _open(self) -> None:
        """Make the hidden folder; ModelError says why it cannot be."""
        for path in (self.folder, *self.folder.parents):
            if path.is_file():
                found = "is a file" if path == self.folder else f"lies below the file {path}"
                raise ModelError(f"{self.folder} {found}; expected a folder to write")
        if self.folder.is_dir() and not os.access(self.folder, os.W_OK | os.X_OK):
            raise ModelError(
                f"{self.folder} is not writable; expected a folder in which rank 0 may write"
            )
        shutil.rmtree(self.unfinished, ignore_errors=True)
        self.unfinished.mkdir(parents=True)
