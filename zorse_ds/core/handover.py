"""What `zorse run` and the job that it starts tell each other: two variables and a file."""

import os
import time
from dataclasses import dataclass
from pathlib import Path

PLAN_VARIABLE = "ZORSE_PLAN"
"""Path of a plan that goes before any other plan: a job that lost ranks gets its new one so."""
PROGRESS_VARIABLE = "ZORSE_PROGRESS"
"""Path of the file in which the first rank notes its first and its last step."""
_LINE = 48


@dataclass(frozen=True, slots=True)
class Step:
    """A step that was made."""

    number: int
    at_s: float
    """When it ended, by `time.time` of the first rank's host."""


class ProgressNotes:
    """The first rank's side: one small write a step, nothing without a path."""

    def __init__(self, path: str | None) -> None:
        self._file = os.open(path, os.O_CREAT | os.O_WRONLY, 0o644) if path else None
        self._has_begun = False

    def note(self, step: int) -> None:
        """A step was made."""
        if self._file is None:
            return
        line = f"{step} {time.time():.6f}".ljust(_LINE - 1).encode() + b"\n"
        data, place = (line, _LINE) if self._has_begun else (2 * line, 0)
        os.pwrite(self._file, data, place)
        self._has_begun = True

    def close(self) -> None:
        """No more notes."""
        if self._file is not None:
            os.close(self._file)
            self._file = None


def read_progress(path: Path) -> tuple[Step, Step] | None:
    """The first and the last step of the job; None before the first."""
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return None
    if len(data) != 2 * _LINE:
        return None
    first, last = (line.split() for line in data.decode().splitlines())
    return Step(int(first[0]), float(first[1])), Step(int(last[0]), float(last[1]))
