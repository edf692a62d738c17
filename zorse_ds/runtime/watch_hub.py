"""The middle of the watch, in a process of its own: it hears of all ranks and says why all end."""

import contextlib
import hmac
import socket
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

from zorse_ds.runtime import watch_verdict as verdicts
from zorse_ds.runtime.watch_verdict import UNKNOWN, Place, State, Verdict
from zorse_ds.runtime.watch_wire import Line, ready

POLL_S = 0.25
CAUSE_S = 1.0
"""How long a rank whose wires broke may be the first to tell: often another one is the cause."""
ANSWER_S = 1.0
"""How long a rank may take to say what it is doing."""
SEND_S = 1.0
PAUSE_S = 5.0
"""Nobody is blamed for time in which this process did not run either (a suspended job)."""


class Hub:
    """A thread that listens; `port` is where. The first verdict is the only one."""

    def __init__(self, places: Sequence[Place], token: str, timeout_s: float) -> None:
        self._places, self._token, self._timeout_s = places, token, timeout_s
        self._listening = socket.create_server(("", 0))
        self.port: int = self._listening.getsockname()[1]
        self._strangers: list[Line] = []
        self._lines: dict[int, Line] = {}
        self._guards: list[Line] = []
        self._last: dict[int, State] = {}
        self._heard_at: dict[int, float] = {}
        self._answers: dict[int, State] = {}
        self._suspect: tuple[Verdict, float] | None = None
        self._cause_until = self._answers_until = float("inf")
        self._verdict: Verdict | None = None
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="zorse-hub", daemon=True)
        self._thread.start()

    def wait(self, timeout_s: float) -> None:
        """Until all ranks have left; those that are left then hear that nobody watches any more."""
        self._thread.join(timeout_s)
        self._closing = True
        self._thread.join(timeout=2.0)

    def _run(self) -> None:
        last = time.monotonic()
        while not self._closing and not self._is_over():
            for end in ready(self._ends(), POLL_S):
                if end is self._listening:
                    self._welcome()
                else:
                    self._hear(end)
            now = time.monotonic()
            if now - last > PAUSE_S:
                self._heard_at = dict.fromkeys(self._heard_at, now)
            last = now
            self._look_at_the_clock(now)
        self._tell({"bye": True})
        for open_end in self._ends():
            with contextlib.suppress(OSError):
                open_end.close()

    def _ends(self) -> list[Any]:
        return [self._listening, *self._strangers, *self._guards, *self._lines.values()]

    def _is_over(self) -> bool:
        """There were ranks, and all have left."""
        return bool(self._heard_at) and not self._lines and not self._strangers

    def _welcome(self) -> None:
        connection, _ = self._listening.accept()
        # A process that is stopped must not hold up the hub once its buffer is full.
        connection.settimeout(SEND_S)
        self._strangers.append(Line(connection))

    def _hear(self, line: Line) -> None:
        messages = line.receive()
        if line in self._strangers:
            self._introduce(line, messages)
            return
        if line in self._guards:
            # The ranks of its host have gone, of which the hub hears by itself.
            self._guards.remove(line)
            line.close()
            return
        rank = next(rank for rank, own in self._lines.items() if own is line)
        if messages is None:
            self._lost(rank)
            return
        for message in messages:
            self._heard(rank, message)

    def _introduce(self, line: Line, messages: list[dict[str, Any]] | None) -> None:
        """Whoever does not know the token is sent away."""
        self._strangers.remove(line)
        first = messages[0] if messages else {}
        known = hmac.compare_digest(str(first.get("token", "")).encode(), self._token.encode())
        if not known:
            line.close()
            return
        if first.get("guard"):
            self._guards.append(line)
            if self._verdict is not None:
                line.send({"verdict": self._verdict.to_dict()})
            return
        rank = int(first["rank"])
        self._lines[rank] = line
        self._heard_at[rank] = time.monotonic()
        line.send({"welcome": True})
        for message in (messages or [])[1:]:
            self._heard(rank, message)

    def _lost(self, rank: int) -> None:
        self._lines.pop(rank).close()
        if self._verdict is None:
            self._decide(verdicts.gone(self._places[rank], self._last.get(rank, UNKNOWN)))
        elif rank in self._verdict.ranks:
            self._tell({"ended": True})

    def _heard(self, rank: int, message: dict[str, Any]) -> None:
        if "bye" in message:
            self._lines.pop(rank).close()
            return
        state = State(**message["state"])
        self._last[rank], self._heard_at[rank] = state, time.monotonic()
        if message.get("answer"):
            self._answers[rank] = state
        elif message.get("stuck"):
            self._ask()
        elif "failed" in message:
            verdict = verdicts.raised(self._places[rank], state, message["failed"])
            if not message["is_wire"]:
                self._decide(verdict)
            elif self._suspect is None:
                self._suspect = (verdict, state.age_s)
                self._cause_until = time.monotonic() + CAUSE_S
        elif rank == 0:
            self._tell({"first": message["state"]})

    def _look_at_the_clock(self, now: float) -> None:
        if any(self._is_overdue(rank, now) for rank in self._lines):
            self._ask()
        if self._verdict is None and now >= self._cause_until:
            self._cause_until = float("inf")
            self._ask()
        answered = self._answers.keys() >= self._lines.keys()
        asked = self._answers_until < float("inf")
        if self._verdict is None and asked and (answered or now >= self._answers_until):
            self._decide(self._judge())

    def _is_overdue(self, rank: int, now: float) -> bool:
        """Its process was in a step and does not even say so any more."""
        in_step = self._last.get(rank, UNKNOWN).step is not None
        return in_step and now - self._heard_at[rank] > self._timeout_s

    def _ask(self) -> None:
        if self._answers_until == float("inf"):
            self._answers_until = time.monotonic() + ANSWER_S
            self._tell({"ask": True})

    def _judge(self) -> Verdict:
        """A wire that broke early, while all ranks answer, is that rank's own failure."""
        watched = [place for place in self._places if place.rank in self._lines]
        all_answer = self._answers.keys() >= self._lines.keys()
        if self._suspect is not None and all_answer and self._suspect[1] < 0.9 * self._timeout_s:
            return self._suspect[0]
        now = time.monotonic()
        last = {
            rank: replace(state, age_s=state.age_s + now - self._heard_at[rank])
            for rank, state in self._last.items()
        }
        return verdicts.silent(watched, last, self._answers, self._timeout_s)

    def _decide(self, verdict: Verdict) -> None:
        if self._verdict is None:
            self._verdict = verdict
            self._tell({"verdict": verdict.to_dict()})
            if not any(rank in self._lines for rank in verdict.ranks):
                self._tell({"ended": True})

    def _tell(self, message: dict[str, Any]) -> None:
        for line in [*self._lines.values(), *self._guards]:
            line.send(message)


def plain(state: State) -> dict[str, Any]:
    """A state as it travels."""
    return asdict(state)
