"""The time of a virtual GPU.

Each rank knows its virtual time in seconds since the step's origin, the same moment for all ranks.
Work moves it on, and the process sleeps until that moment has come in real time. Deadlines follow
from virtual times and not from when a process woke up, so that errors do not add up.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Pace:
    """How virtual seconds pass in real ones."""

    scale: float = 1.0
    """Real seconds of a virtual one; 0: nobody sleeps, and times are the virtual ones alone."""


@dataclass(frozen=True, slots=True)
class Work:
    """What a virtual GPU did, in virtual seconds, and what for."""

    name: str
    start_s: float
    stop_s: float
    cause: Any = None
    """The instruction under way, where it is known."""


class VirtualClock:
    """The virtual time of one rank. Only the rank's own thread moves it on.

    `told`: hears the new time before the process sleeps until then.
    """

    def __init__(self, pace: Pace, told: Callable[[float], None] = lambda now_s: None) -> None:
        self.pace, self._told = pace, told
        self.now_s = 0.0
        self.behind_s = 0.0
        """The most by which the process was late, in virtual seconds."""
        self.works: list[Work] = []
        self.origin = time.monotonic()
        """The step's, by `time.monotonic()`."""

    def begin(self, origin: float) -> None:
        """Start a step at `origin`, a moment of `time.monotonic()`, which all processes share."""
        self.origin = origin
        self.now_s = 0.0
        self._sleep()
        # What was late before the step is no part of it.
        self.behind_s = 0.0
        self.works = []

    def work(self, name: str, seconds: float, cause: Any = None) -> None:
        """Be at work for virtual seconds; what was really computed meanwhile is part of them."""
        start = self.now_s
        self.now_s += seconds
        self.works.append(Work(name, start, self.now_s, cause))
        self._told(self.now_s)
        self._sleep()

    def wait_until(self, moment_s: float) -> None:
        """Wait for something that is there at a virtual moment."""
        if moment_s > self.now_s:
            self.now_s = moment_s
            self._sleep()

    def _sleep(self) -> None:
        if not self.pace.scale:
            return
        left = self.origin + self.now_s * self.pace.scale - time.monotonic()
        if left > 0:
            time.sleep(left)
        else:
            self.behind_s = max(self.behind_s, -left / self.pace.scale)
