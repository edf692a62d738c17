"""What `zorse run` and the job that it starts tell each other: two variables and two files."""

import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, cast, get_args

from zorse_ds.files import write_text

PLAN_VARIABLE = "ZORSE_PLAN"
"""Path of a plan that goes before any other plan: a job that lost ranks gets its new one so."""
PROGRESS_VARIABLE = "ZORSE_PROGRESS"
"""Path of the file in which the first rank notes its first and its last step."""
EXIT_SAVED = 75
"""Exit code after a save that SIGTERM asked for: start again, nothing is lost."""
_LINE = 48

NoticeState = Literal["asked", "heard", "saved"]
"""`zorse run` asks the job to save and end; the first rank hears it, and has saved."""


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
        self._notice = None if path is None else notice_path(Path(path))
        self._has_begun = False

    def note(self, step: int) -> None:
        """A step was made."""
        if self._file is None:
            return
        line = f"{step} {time.time():.6f}".ljust(_LINE - 1).encode() + b"\n"
        data, place = (line, _LINE) if self._has_begun else (2 * line, 0)
        os.pwrite(self._file, data, place)
        self._has_begun = True

    def hears_notice(self) -> bool:
        """Whether `zorse run` has asked to save and end; costs a look for a file."""
        if self._notice is None or read_notice(self._notice) != "asked":
            return False
        write_notice(self._notice, "heard")
        return True

    def note_saved(self) -> None:
        """What was asked for is done."""
        if self._notice is not None and read_notice(self._notice) == "heard":
            write_notice(self._notice, "saved")

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


def notice_path(progress: Path) -> Path:
    """Where a job's notice lies, by the path of its progress."""
    return progress.with_name(f"{progress.name}.notice")


def write_notice(path: Path, state: NoticeState) -> None:
    """Say how far it is."""
    write_text(path, state)


def read_notice(path: Path) -> NoticeState | None:
    """How far it is; None where nobody asked."""
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return None
    return cast(NoticeState, text) if text in get_args(NoticeState) else None
