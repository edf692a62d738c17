"""The watch process of a host: it ends ranks that cannot end themselves, and holds the hub.

A rank that is stopped, or spins without giving its threads a turn, neither hears nor obeys; so this
is a process of its own. It loads the standard library alone, needs nothing of the ranks but the
numbers of their processes, and goes when they have gone.
"""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from zorse_ds.errors import WorldError
from zorse_ds.runtime import watch_verdict as verdicts
from zorse_ds.runtime.watch_hub import POLL_S, Hub
from zorse_ds.runtime.watch_verdict import UNKNOWN, Place, Verdict
from zorse_ds.runtime.watch_wire import Line, ready

START_S = 60.0
"""How long it may take to start, on a busy host."""
SILENT_END_S = 1.0
"""How long ranks may take to end by themselves when another does not answer."""
LATE_END_S = 13.0
"""The same when one failed or is gone: more than all of a rank's own patience."""
LINGER_S = 20.0
"""How long the hub stays for other hosts when all ranks of its own have gone."""


@dataclass(frozen=True, slots=True)
class Duty:
    """What a watch process is told. Without `address` it is the one that holds the hub."""

    places: tuple[Place, ...]
    """All ranks of the job."""
    home: str
    token: str
    timeout_s: float
    address: tuple[str, int] | None = None

    def to_json(self) -> str:
        """See `from_json`."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> "Duty":
        """What `to_json` wrote."""
        data = json.loads(text)
        places = tuple(
            Place(**{**place, "stages": tuple(place["stages"])}) for place in data.pop("places")
        )
        address = data.pop("address")
        return cls(places=places, address=address and (address[0], address[1]), **data)


def start(duty: Duty) -> int:
    """Start the watch process of this host and return the hub's port; raises `WorldError`."""
    root = str(Path(__file__).resolve().parents[2])
    code = f"import sys; sys.path.insert(0, {root!r}); import {__name__} as w; w.main()"
    command = [sys.executable, "-I", "-S", "-c", code]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            answer, _ = process.communicate(duty.to_json(), timeout=START_S)
        except subprocess.TimeoutExpired:
            process.kill()
            answer = ""
    if not answer.strip().isdigit():
        raise WorldError(
            f"the watch process of {socket.gethostname()} did not start within {START_S:g} s (exit "
            f"code {process.returncode}); expected that {sys.executable} can run beside the ranks"
        )
    return int(answer)


def main() -> None:
    """Read a `Duty` from the standard input; write the hub's port and watch until all is over."""
    duty = Duty.from_json(sys.stdin.read())
    # A launcher that ends the ranks, or a terminal that closes, must not take the watch away first.
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    # An orphan is nobody's child: no rank has to wait for it, no launcher ends it with a rank.
    if os.fork():
        os._exit(0)
    hub = Hub(duty.places, duty.token, duty.timeout_s) if duty.address is None else None
    address = duty.address or ("localhost", hub.port if hub else 0)
    guard = Guard(duty, address)
    print(address[1], flush=True)  # noqa: T201
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 0)
    os.dup2(null, 1)
    guard.run()
    if hub is not None:
        others = any(place.home != duty.home for place in duty.places)
        hub.wait(LINGER_S if others else 0.0)


class RankProcess:
    """A rank of this host, told from a later process of the same number by when it began."""

    def __init__(self, place: Place) -> None:
        self.place = place
        self._began = self._beginning()

    @property
    def is_alive(self) -> bool:
        """It runs or is stopped; one that ended and waits for its parent's notice is not."""
        return self._began is not None and self._beginning() == self._began

    def kill(self) -> None:
        """At once, whatever it is doing."""
        if self.is_alive:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.place.pid, signal.SIGKILL)

    def _beginning(self) -> int | None:
        """Its start in the kernel's ticks. No pidfd, which kernels before 5.3 and some sandboxes
        lack."""
        try:
            stat = Path(f"/proc/{self.place.pid}/stat").read_text()
        except OSError:
            return None
        # The name of the program, in parentheses, may hold anything.
        state, *fields = stat.rpartition(")")[2].split()
        return None if state in "ZX" else int(fields[18])


class Guard:
    """Hears the verdict and sees to it that the ranks of this host end."""

    def __init__(self, duty: Duty, address: tuple[str, int]) -> None:
        self._places = duty.places
        self._own = [place for place in duty.places if place.home == duty.home]
        self._processes = [RankProcess(place) for place in self._own]
        self._line: Line | None = Line(socket.create_connection(address, timeout=START_S))
        self._line.connection.settimeout(None)
        self._line.send({"token": duty.token, "guard": True})
        self._verdict: Verdict | None = None
        self._end_at = float("inf")
        self._is_over = False

    def run(self) -> None:
        """Until all ranks of this host have left the watch or ended."""
        while self._processes and not self._is_over:
            if self._line is None:
                time.sleep(POLL_S)
            elif ready([self._line], POLL_S):
                self._hear()
            self._processes = [process for process in self._processes if process.is_alive]
            if time.monotonic() >= self._end_at:
                for process in self._processes:
                    process.kill()

    def _hear(self) -> None:
        assert self._line is not None, "it said something"
        messages = self._line.receive()
        if messages is None:
            self._line.close()
            self._line = None
            # The ranks see it too.
            self._decide(verdicts.hub_gone(self._places[0], UNKNOWN))
            return
        for message in messages:
            if "verdict" in message:
                self._decide(Verdict.from_dict(message["verdict"]))
            elif "bye" in message:
                self._is_over = True

    def _decide(self, verdict: Verdict) -> None:
        if self._verdict is not None:
            return
        self._verdict = verdict
        is_silent = verdict.kind == "silent"
        self._end_at = time.monotonic() + (SILENT_END_S if is_silent else LATE_END_S)
        if not is_silent:
            return
        if all(place.rank in verdict.ranks for place in self._own):
            sys.stderr.write(f"zorse: {verdict.text}\n")
            sys.stderr.flush()
        for process in self._processes:
            if process.place.rank in verdict.ranks:
                process.kill()
