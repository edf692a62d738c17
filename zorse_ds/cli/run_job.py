"""One attempt of `zorse run`: the launcher's process, and how its steps go."""

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from zorse_ds.core.handover import (
    EXIT_SAVED,
    Step,
    notice_path,
    read_notice,
    read_progress,
    write_notice,
)

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
    _asked_at: float | None = None
    """When the job was asked to save and end, until it has heard that."""

    def run(self) -> int:
        """The launcher's exit code, or `EXIT_SAVED` where the job saved because it was told to end.

        The launcher and its processes on this host are gone afterwards.
        """
        self._notice.unlink(missing_ok=True)
        process = subprocess.Popen(self.command, env=dict(self.environment), start_new_session=True)
        try:
            with self._passing_signals_to(process):
                code = self._wait(process)
        finally:
            _end(process)
        # Launchers have an exit code of their own for ranks that ended with one.
        return EXIT_SAVED if code and read_notice(self._notice) == "saved" else code

    @property
    def _notice(self) -> Path:
        return notice_path(self.progress_path)

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
            self._insist(process)
            if now > end_at:
                # What it holds open to a lost host would never end.
                return 1
        self._look()
        return process.returncode

    def _insist(self, process: "subprocess.Popen[bytes]") -> None:
        """A job that does not hear in time that it shall end is told by the launcher."""
        if self._asked_at is None:
            return
        if read_notice(self._notice) != "asked":
            self._asked_at = None
        elif time.monotonic() - self._asked_at > max(END_S, 2 * self._step_s):
            self._asked_at = None
            process.send_signal(signal.SIGTERM)

    @property
    def _step_s(self) -> float:
        """Of the steps so far, on average."""
        if self.first is None or self.last is None or self.first == self.last:
            return 0.0
        return (self.last.at_s - self.first.at_s) / (self.last.number - self.first.number)

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
            if number == signal.SIGTERM and self.told is None and self.first is not None:
                # Launchers would end their ranks before a long step is over.
                write_notice(self._notice, "asked")
                self._asked_at = time.monotonic()
            else:
                process.send_signal(number)
            self.told = number

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
