"""What memory a process of this host uses, and how much is left to it."""

import os
import resource
import sys
from pathlib import Path

_CGROUP = Path("/sys/fs/cgroup")
_STATM = Path("/proc/self/statm")


def resident_bytes() -> int:
    """What the process holds now; 0 where the system does not say."""
    if not _STATM.exists():
        return 0
    return int(_STATM.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def peak_resident_bytes() -> int:
    """The most that the process ever held."""
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def free_bytes() -> float | None:
    """What nobody uses, of the host or of what the container may use; None where nobody knows."""
    found = [each for each in (_of_host(), _of_container()) if each is not None]
    return min(found, default=None)


def _of_host() -> float | None:
    if "SC_AVPHYS_PAGES" not in os.sysconf_names:
        return None
    return float(os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))


def _of_container() -> float | None:
    limit, used = (_CGROUP / name for name in ("memory.max", "memory.current"))
    if not (limit.exists() and used.exists()):
        return None
    text = limit.read_text().strip()
    return None if text == "max" else max(0.0, float(text) - float(used.read_text()))
