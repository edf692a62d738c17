"""One attempt of `zorse run`: the launcher's process, and how its steps go."""

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from zorse_ds.core.handover import Step, read_progress

LOOK_S = 0.1
STANDSTILL_S = 10.0
"""Without a step for so long, and at these intervals after, other hosts are looked at."""
END_S = 20.0
"""How long ranks may take to end by themselves after a host is lost, and a launcher to obey."""


@dataclass
class Attempt:
    """A running launcher. `on_first_step` is called once."""

    command: Sequence[str]
    environment: Mapping[str, str]
    progress_path: Path
    unreachable: Callable[[], list[str]]
    on_first_step: Callable[[Step], None]
    first: Step | None = None
    last: Step | None = None
    lost: list[str] = field(default_factory=list)
    """Hosts that were out of reach while the job stood still."""
    told: int | None = None
    """The signal that the user sent."""

    def run(self) -> int:
        """The launcher's exit code; it and its processes on this host are gone afterwards."""
        process = subprocess.Popen(self.command, env=dict(self.environment), start_new_session=True)
        try:
            with self._passing_signals_to(process):
                return self._wait(process)
        finally:
            _end(process)

    def _wait(self, process: "subprocess.Popen[bytes]") -> int:
        moved_at, end_at = time.monotonic(), float("inf")
        while process.poll() is None:
            time.sleep(LOOK_S)
            now = time.monotonic()
            if self._look():
                moved_at = now
            elif now - moved_at > STANDSTILL_S and not self.lost:
                self.lost, moved_at = self.unreachable(), time.monotonic()
                end_at = moved_at + END_S if self.lost else end_at
            if now > end_at:
                # What it holds open to a lost host would never end.
                return 1
        self._look()
        return process.returncode

    def _look(self) -> bool:
        """Whether a step was made since the last look."""
        steps = read_progress(self.progress_path)
        if steps is None or steps[1] == self.last:
            return False
        if self.first is None:
            self.first = steps[0]
            self.on_first_step(self.first)
        self.last = steps[1]
        return True

    @contextlib.contextmanager
    def _passing_signals_to(self, process: "subprocess.Popen[bytes]") -> Iterator[None]:
        def pass_on(number: int, frame: object) -> None:
            self.told = number
            process.send_signal(number)

        numbers = (signal.SIGINT, signal.SIGTERM)
        before = {number: signal.signal(number, pass_on) for number in numbers}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


def _end(process: "subprocess.Popen[bytes]") -> None:
    """The launcher and what it started in its session here."""
    for number, patience_s in ((signal.SIGTERM, END_S), (signal.SIGKILL, 5.0)):
        try:
            os.killpg(process.pid, number)
        except ProcessLookupError:
            break
        until = time.monotonic() + patience_s
        while _is_there(process) and time.monotonic() < until:
            time.sleep(0.05)
    process.wait()


def _is_there(process: "subprocess.Popen[bytes]") -> bool:
    process.poll()
    try:
        os.killpg(process.pid, 0)
    except ProcessLookupError:
        return False
    return True
