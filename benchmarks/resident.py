"""How much a process's resident memory grows meanwhile, at most, mapped files included."""

import ctypes
import gc
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

Result = TypeVar("Result")


def status_bytes(key: str) -> int:
    """A size out of this process's status: `VmRSS` now, `VmHWM` its most since the last reset."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{key}:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"the kernel does not tell {key}")


def reset_peak() -> None:
    """`VmHWM` starts again from what is resident now."""
    Path("/proc/self/clear_refs").write_text("5")


def growth_of(work: Callable[[], Result]) -> tuple[Result, int]:
    """What `work` returns, and the bytes by which resident memory grew at most meanwhile.

    What was freed before is given back first: `work` would grow into it unseen.
    """
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    reset_peak()
    before = status_bytes("VmRSS")
    result = work()
    return result, status_bytes("VmHWM") - before
