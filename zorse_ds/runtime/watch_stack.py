"""Where another thread of this process is."""

import sys
import traceback
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

NUM_LINES = 6
_WAITING = ("torch/distributed/", "runtime/dist_transport.py", "runtime/process_groups.py")
"""Source files whose functions return when another rank has done its part."""


def stack_of(thread: int) -> tuple[str, ...]:
    """The innermost calls, the last one last."""
    frame = sys._current_frames().get(thread)
    if frame is None:
        return ()
    calls = traceback.extract_stack(frame)[-NUM_LINES:]
    return tuple(f"{call.filename}:{call.lineno} in {call.name}: {call.line}" for call in calls)


def waits_for_others(thread: int) -> bool:
    """A call of the thread needs another rank."""
    frame = sys._current_frames().get(thread)
    return any(part in file for file in _files(frame) for part in _WAITING)


def _files(frame: FrameType | None) -> Iterator[str]:
    while frame is not None:
        yield Path(frame.f_code.co_filename).as_posix()
        frame = frame.f_back
