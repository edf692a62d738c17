"""What virtual GPUs do together, decided in the order of virtual time.

Processes are quicker or slower than their virtual GPUs, as the cores allow; what they ask of the
network must not depend on that. So a request is answered only when no rank can make an earlier one
any more: all of them are later by their own clocks, or wait for an answer themselves (Chandy and
Misra's conservative simulation). Then every answer follows from the program alone.
"""

import heapq
from collections import defaultdict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Any, Literal

from zorse_ds.cost.collectives import Collective
from zorse_ds.rehearsal.lanes import Lanes, Passage

Moment = Literal["ready", "stop"]
"""Of a passage: when all had come, or when it was through."""
Answer = Callable[[int, Any], None]
"""(rank, what): tells a rank what it waits for."""


@dataclass(slots=True)
class _Message:
    """Sent by one rank, expected by another."""

    sent_s: float | None = None
    num_bytes: float = 0.0


@dataclass(slots=True)
class _Inbox:
    """What a rank receives in a step: messages leave in this order, a few ahead of its program."""

    keys: Sequence[Hashable] = ()
    allowed_s: list[float] = field(default_factory=list)
    """When the i-th may be under way, as far as that is known."""
    next: int = 0
    last_s: float = 0.0
    """When the last one that left was ready."""


@dataclass(slots=True)
class _Meeting:
    """Who has still to come to a collective, and when the last one was ready."""

    missing: int
    ready_s: float = 0.0


@dataclass(frozen=True, slots=True)
class _Wish:
    """What a rank waits for, and since when."""

    key: Hashable
    until: Moment
    since_s: float


class Exchange:
    """Requests of all ranks. `answer` gives a waiting rank its `Passage`; None: it never comes."""

    def __init__(self, lanes: Lanes, num_ranks: int, answer: Answer) -> None:
        self._lanes, self._answer = lanes, answer
        self._clock_s = [0.0] * num_ranks
        """By rank: before this it asks for nothing more."""
        self.clear()

    def clear(self) -> None:
        """A new step: all ranks are at its origin."""
        self._clock_s = [0.0] * len(self._clock_s)
        self._lanes.clear()
        self._group_free_s: dict[Hashable, float] = {}
        self._messages: defaultdict[Hashable, _Message] = defaultdict(_Message)
        self._inboxes: defaultdict[int, _Inbox] = defaultdict(_Inbox)
        self._meetings: dict[Hashable, _Meeting] = {}
        self._pending: list[tuple[float, tuple[int, ...], Hashable, Callable[[], Passage]]] = []
        self._passed: dict[Hashable, Passage] = {}
        self._waiting: dict[int, _Wish] = {}

    # ---- what ranks tell

    def advance(self, rank: int, now_s: float) -> None:
        """The rank asks for nothing before this any more."""
        self._clock_s[rank] = now_s
        self._serve()

    def finish(self, rank: int, now_s: float) -> None:
        """The rank's step is over."""
        self.advance(rank, inf)

    def expect(self, rank: int, now_s: float, keys: Sequence[Hashable], ahead: int) -> None:
        """Messages that come in this order, the first `ahead` of them at once."""
        self._inboxes[rank] = _Inbox(keys, [now_s] * ahead)
        self._post(rank)
        self.advance(rank, now_s)

    def allow(self, rank: int, now_s: float) -> None:
        """One more of the expected messages may be under way."""
        self._inboxes[rank].allowed_s.append(now_s)
        self._post(rank)
        self.advance(rank, now_s)

    def send(
        self, rank: int, now_s: float, target: int, key: Hashable, num_bytes: float, ordered: bool
    ) -> None:
        """A message; `ordered`: it leaves when its turn has come in the target's list."""
        self._messages[key] = _Message(now_s, num_bytes)
        if ordered:
            self._post(target)
        else:
            self._ask_message(rank, target, key, now_s)
        self.advance(rank, now_s)

    def arrive(
        self, rank: int, now_s: float, key: tuple[tuple[int, ...], int], price: Collective
    ) -> None:
        """One of the ranks has come to a collective `(ranks, how-manieth)`."""
        ranks, number = key
        meeting = self._meetings.setdefault(key, _Meeting(len(ranks)))
        meeting.missing -= 1
        meeting.ready_s = max(meeting.ready_s, now_s)
        if not meeting.missing:
            del self._meetings[key]
            order = (1, ranks[0], ranks[-1], len(ranks), number)
            passage = self._collected(ranks, price, meeting.ready_s)
            heapq.heappush(self._pending, (meeting.ready_s, order, key, passage))
        self.advance(rank, now_s)

    def wait(self, rank: int, now_s: float, key: Hashable, until: Moment) -> None:
        """The rank does nothing more before it has an answer."""
        self._waiting[rank] = _Wish(key, until, now_s)
        self._clock_s[rank] = inf
        if key in self._passed:
            self._release(rank)
        self._serve()

    # ---- what follows

    def _post(self, target: int) -> None:
        """Ask for the messages whose turn it is."""
        inbox = self._inboxes[target]
        while inbox.next < min(len(inbox.keys), len(inbox.allowed_s)):
            key = inbox.keys[inbox.next]
            message = self._messages[key]
            if message.sent_s is None:
                return
            inbox.last_s = max(inbox.last_s, message.sent_s, inbox.allowed_s[inbox.next])
            inbox.next += 1
            self._ask_message(key[0], target, key, inbox.last_s)  # type: ignore[index]

    def _ask_message(self, source: int, target: int, key: Any, ready_s: float) -> None:
        num_bytes = self._messages.pop(key).num_bytes
        order = (0, source, target, key[-1])
        passage = self._sent(source, target, num_bytes, ready_s)
        heapq.heappush(self._pending, (ready_s, order, key, passage))

    def _sent(
        self, source: int, target: int, num_bytes: float, ready_s: float
    ) -> Callable[[], Passage]:
        return lambda: self._lanes.message(source, target, num_bytes, ready_s)

    def _collected(
        self, ranks: tuple[int, ...], price: Collective, ready_s: float
    ) -> Callable[[], Passage]:
        def passage() -> Passage:
            # A communicator does one thing at a time.
            start_s = max(ready_s, self._group_free_s.get(ranks, 0.0))
            found = self._lanes.collective(price, ready_s, start_s)
            self._group_free_s[ranks] = found.stop_s
            return found

        return passage

    def _serve(self) -> None:
        """Answer requests before which nothing can come any more."""
        while self._pending and self._pending[0][0] < min(self._clock_s):
            _, _, key, passage = heapq.heappop(self._pending)
            self._passed[key] = passage()
            for rank in [rank for rank, wish in self._waiting.items() if wish.key == key]:
                self._release(rank)
        if self._waiting and not self._pending and min(self._clock_s) == inf:
            self._give_up()

    def _release(self, rank: int) -> None:
        wish = self._waiting.pop(rank)
        passage = self._passed[wish.key]
        moment = passage.ready_s if wish.until == "ready" else passage.stop_s
        self._clock_s[rank] = max(wish.since_s, moment)
        self._answer(rank, passage)

    def _give_up(self) -> None:
        """Nobody is at work who could bring what they wait for."""
        waiting, self._waiting = self._waiting, {}
        for rank in waiting:
            self._answer(rank, None)
