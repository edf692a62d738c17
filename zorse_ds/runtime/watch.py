"""The watch of a rank: a thread that tells the others when it fails, and ends it when one did.

It needs neither gloo nor NCCL, in whose calls the main thread may be stuck: each rank holds one TCP
connection to a hub, in the watch process of the first rank's host. Nothing is sent from step to
step but, once a second, which instruction is running.
"""

import contextlib
import os
import socket
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from zorse_ds.errors import DataError, PeerError, TransportError, WorldError
from zorse_ds.runtime import watch_verdict as verdicts
from zorse_ds.runtime.watch_hub import PAUSE_S, POLL_S, plain
from zorse_ds.runtime.watch_stack import stack_of, waits_for_others
from zorse_ds.runtime.watch_verdict import UNKNOWN, Place, State, Verdict
from zorse_ds.runtime.watch_wire import Line, ready

EXIT_PEER = 76
"""Exit code of a process that ends because another rank failed, is gone or does not answer."""
TOLD_EVERY_S = 1.0
CONNECT_S = 10.0
VERDICT_S = 5.0
"""How long a rank that failed waits to hear who was first."""
HUB_S = 3.0
"""How long the hub may take to a verdict; more than all of its own patience."""
LAST_WORDS_S = 3.0
"""How long the others wait for the rank that failed to print its traceback and end."""
OWN_END_S = 2.0
"""How long a main thread may take to end by itself after that."""
FAILED_END_S = 10.0
"""How long the rank that failed may take to end."""

Doing = Callable[[], tuple[str, float] | None]
"""What the worker is at and since when (`time.perf_counter`), or None."""


class Watch:
    """Constructed by the main thread of each rank of a job, with the hub's address.

    `places` are all ranks. Raises `WorldError` when the hub is out of reach.
    """

    def __init__(
        self,
        rank: int,
        places: Sequence[Place],
        address: tuple[str, int],
        token: str,
        timeout_s: float,
    ) -> None:
        self._rank, self._places, self._timeout_s = rank, places, timeout_s
        self.doing: Doing = lambda: None
        self.verdict: Verdict | None = None
        self._step: int | None = None
        self._since = self._awake_since = time.perf_counter()
        self._main = threading.get_ident()
        self._first = UNKNOWN
        self._failed = self._wire_failed = False
        self._told_at: float | None = None
        """When the hub was asked for a verdict."""
        self._decided, self._ended = threading.Event(), threading.Event()
        self.is_open = True
        self._line = _connected(rank, address, token)
        own = weakref.ref(self)
        os.register_at_fork(after_in_child=lambda: _forget(own()))
        self._thread = threading.Thread(target=self._run, name="zorse-watch", daemon=True)
        self._thread.start()

    # ---- the main thread

    @contextmanager
    def step(self, number: int) -> Iterator[None]:
        """What fails inside ends all ranks. Raises `PeerError` when another rank was the first."""
        self._since, self._step = time.perf_counter(), number
        self._line.send({"state": plain(self._state())})
        try:
            yield
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            # No batch, on every rank alike: nothing has started, and training may go on.
            if isinstance(error, DataError) and self.doing() is None:
                raise
            if not self.tell(error):
                raise PeerError(self._sentence()) from None
            raise
        finally:
            self._since, self._step = time.perf_counter(), None

    def tell(self, error: BaseException) -> bool:
        """Report an error that ends this rank; False when another rank was the first to fail."""
        if self._failed or not self.is_open:
            return self._was_first()
        self._failed, self._told_at = True, time.monotonic()
        told = f"{type(error).__name__}: {error}".split("\n")[0]
        self._wire_failed = isinstance(error, TransportError)
        report = {"failed": told, "is_wire": self._wire_failed, "state": plain(self._state())}
        self._line.send(report)
        self._decided.wait(VERDICT_S)
        if not self._was_first():
            return False
        error.add_note(f"{self._places[self._rank]} failed at {self._state()}; all ranks end")
        return True

    def close(self) -> None:
        """Leave the watch: whatever becomes of this process is of no concern to the others."""
        if not self.is_open:
            return
        self.is_open = False
        if self.verdict is None:
            self._line.send({"bye": True})
            self._thread.join(timeout=2.0)
        self._line.close()

    def forget(self) -> None:
        """In a forked child: its open connections would hide that the parent died."""
        self.is_open = False
        self._line.close()

    def _was_first(self) -> bool:
        """This rank's own error is the reason, or nobody could tell another."""
        verdict = self.verdict
        return verdict is None or (verdict.kind == "raised" and self._rank in verdict.ranks)

    def _sentence(self) -> str:
        assert self.verdict is not None, "somebody was named"
        return self.verdict.text

    # ---- the thread

    def _run(self) -> None:
        told_at, last = 0.0, time.monotonic()
        while self.is_open and self.verdict is None:
            if time.monotonic() - last > PAUSE_S:
                self._awake_since = time.perf_counter()
            last = time.monotonic()
            if ready([self._line], POLL_S):
                self._receive()
            if time.monotonic() - told_at >= TOLD_EVERY_S:
                told_at = time.monotonic()
                self._line.send({"state": plain(self._state())})
            self._check_own_age()
        if self.verdict is not None:
            self._end_with_the_others()

    def _receive(self) -> None:
        messages = self._line.receive()
        if messages is None:
            if self.is_open and self.verdict is None:
                self._take(verdicts.hub_gone(self._places[0], self._first))
            self._ended.set()
            return
        for message in messages:
            self._heard(message)

    def _heard(self, message: dict[str, Any]) -> None:
        if "ask" in message:
            self._line.send({"answer": True, "state": plain(self._state(with_stack=True))})
        elif "first" in message:
            self._first = State(**message["first"])
        elif "verdict" in message:
            self._take(Verdict.from_dict(message["verdict"]))
        elif "ended" in message:
            self._ended.set()
        elif "bye" in message:
            self.is_open = False

    def _take(self, verdict: Verdict) -> None:
        self.verdict = verdict
        self._decided.set()

    def _check_own_age(self) -> None:
        state, now = self._state(), time.monotonic()
        is_stuck = state.step is not None and state.age_s > self._timeout_s
        if is_stuck and self._told_at is None:
            self._told_at = now
            self._line.send({"stuck": True, "state": plain(state)})
        if self._told_at is not None and now > self._told_at + HUB_S:
            places = self._places[0], self._places[self._rank]
            self._take(verdicts.silent_hub(places[0], self._first, places[1], state))

    def _state(self, with_stack: bool = False) -> State:
        step, doing = self._step, self.doing()
        now = time.perf_counter()
        stack = stack_of(self._main) if with_stack else ()
        waits = self._wire_failed or (with_stack and waits_for_others(self._main))
        if step is None:
            return State(None, "no step", now - self._since, waits, stack)
        text, since = doing or ("the start", self._since)
        age_s = now - max(since, self._since, self._awake_since)
        return State(step, text, age_s, waits, stack)

    # ---- the end

    def _end_with_the_others(self) -> None:
        """Let the one that failed speak and the main thread end by itself, then end the process."""
        verdict = self.verdict
        assert verdict is not None, "nobody ends without a reason"
        if self._was_first():
            time.sleep(FAILED_END_S)
            _end_process(1)
        if self._speaks_for_its_host(verdict):
            sys.stderr.write(f"zorse: {verdict.text}\n")
            sys.stderr.flush()
        if verdict.kind == "silent":
            _end_process(EXIT_PEER)
        self._wait_for_the_end_of_others()
        time.sleep(OWN_END_S)
        _end_process(EXIT_PEER)

    def _wait_for_the_end_of_others(self) -> None:
        until = time.monotonic() + LAST_WORDS_S
        while not self._ended.is_set() and time.monotonic() < until:
            if ready([self._line], POLL_S):
                self._receive()

    def _speaks_for_its_host(self, verdict: Verdict) -> bool:
        """The lowest rank of each host that is none of those named, or the lowest of all."""
        own = self._places[self._rank].host
        here = [place.rank for place in self._places if place.host == own]
        return self._rank == min(here, key=lambda rank: (rank in verdict.ranks, rank))


def _connected(rank: int, address: tuple[str, int], token: str) -> Line:
    try:
        connection = socket.create_connection(address, timeout=CONNECT_S)
        line = Line(connection)
        line.send({"token": token, "rank": rank})
        answer = line.receive()
        connection.settimeout(None)
    except OSError as error:
        answer, reason = None, str(error)
    else:
        reason = "no answer"
    if answer is None:
        raise WorldError(
            f"rank {rank} cannot reach the first rank at {address[0]}:{address[1]} ({reason}); "
            "expected that hosts reach each other on any port, as gloo and NCCL need it too"
        )
    return line


def _forget(watch: Watch | None) -> None:
    if watch is not None and watch.is_open:
        watch.forget()


def _end_process(code: int) -> None:
    """At once: the main thread may be in a call that never returns."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)
