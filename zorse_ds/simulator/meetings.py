"""Collectives of a simulated step: they start when the last of their ranks has come."""

from collections.abc import Callable, Sequence
from typing import Any

from zorse_ds.cost.collectives import Collective
from zorse_ds.schedule import instructions as kinds
from zorse_ds.simulator.durations import Durations
from zorse_ds.simulator.script import Script
from zorse_ds.simulator.timeline import Span
from zorse_ds.simulator.wires import Wires

Wake = Callable[[int, str, int, float], None]
"""(rank, name, stage, stop): the rank goes on at `stop`, held until then by `name`."""


class _Meeting:
    """Who has still to come, and the latest time at which somebody was ready."""

    __slots__ = ("missing", "ready_s")

    def __init__(self, count: int) -> None:
        self.missing = count
        self.ready_s = 0.0


class Meetings:
    """What ranks do together. Every handler returns whether the rank is held up."""

    def __init__(
        self, script: Script, durations: Durations, wires: Wires, wake: Wake, record: bool
    ) -> None:
        self._durations, self._wires, self._wake = durations, wires, wake
        self._interleaved = script.interleaved
        self._ties = {tie.index: tie for tie in script.ties}
        self._world = tuple(range(script.plan.world_size))
        self._open: dict[tuple[type, int, int], _Meeting] = {}
        self._prices: dict[tuple[type, int], Collective] = {}
        self._agree_s: dict[tuple[int, ...], float] = {}
        self._free_s: dict[tuple[int, ...], float] = {}
        """When the communicator of some ranks has ended what it runs: one thing at a time."""
        self._loaded_s: dict[tuple[int, int], float] = {}
        self._copied_s: dict[int, float] = {}
        self._gathers: dict[tuple[int, int], int] = {}
        """(rank, stage) → how many gathers it has started."""
        self.whole_s: dict[tuple[int, int], float | None] = {}
        """(rank, stage) → when its gathered parameters are there; None while nobody knows."""
        self._record = record
        self.background: list[Span] = []
        """Gathers of parameters and copies from the host, which run beside the passes."""

    def prefetch(self, at: Any, now: float) -> bool:
        """A copy from host memory; one after the other on a rank."""
        start = max(now, self._copied_s.get(at.rank, 0.0))
        stop = start + self._durations.prefetch_s(at.rank, at.stage)
        self._copied_s[at.rank] = self._loaded_s[at.rank, at.stage] = stop
        self._note("PrefetchParams", (at.rank,), at.stage, start, stop)
        return False

    def unshard(self, at: Any, now: float) -> list[int]:
        """A gather that nobody waits for yet; returns the ranks that know now when it ends."""
        ranks = self._durations.groups[at.index].ranks
        self.whole_s[at.rank, at.index] = None
        # A rank without micro-batches runs ahead, to the second gather of a stage too.
        gather = self._gathers[at.rank, at.index] = self._gathers.get((at.rank, at.index), 0) + 1
        loaded = self._loaded_s.pop((at.rank, at.index), 0.0)
        ready = self._joined(at, ranks, max(now, loaded), gather)
        if ready is None:
            return []
        price = self._price(at, self._durations.unshard)
        start, stop = self._ran(ranks, price, ready)
        for rank in ranks:
            self.whole_s[rank, at.index] = stop
        self._note("UnshardParams", ranks, at.index, start, stop)
        return list(ranks)

    def agree(self, at: Any, now: float) -> bool:
        """A few numbers summed up: over the world, or over the last stage's group."""
        alone = type(at) is kinds.CountTargets and not self._interleaved
        ranks = self._durations.groups[at.index].ranks if alone else self._world
        ready = self._joined(at, ranks, now)
        if ready is not None:
            self._release(at, ranks, ready + self._agreement_s(ranks))
        return True

    def tied(self, at: Any, now: float) -> bool:
        """Gradients of a tie summed, or its new values handed out."""
        tie = self._ties[at.index]
        ready = self._joined(at, tie.ranks, now)
        if ready is not None:
            reduces = type(at) is kinds.ReduceTiedGrads
            price = self._price(at, lambda _: self._durations.tied(tie, reduces=reduces))
            self._release(at, tie.ranks, self._ran(tie.ranks, price, ready)[1])
        return True

    def reduce(self, at: Any, now: float) -> bool:
        """A stage's gradients summed over its group."""
        ranks = self._durations.groups[at.index].ranks
        ready = self._joined(at, ranks, now)
        if ready is not None:
            _, stop = self._ran(ranks, self._price(at, self._durations.reduce), ready)
            for rank in ranks:
                own = stop + self._durations.reduce_s(rank, at.index)
                self._wake(rank, "ReduceGrads", at.index, own)
        return True

    def step(self, at: Any, now: float) -> bool:
        """The own share stepped; at levels 1 and 2 the new parameters are gathered."""
        durations = self._durations
        ranks = durations.groups[at.index].ranks
        price = self._price(at, durations.publish)
        stepped = now + durations.step_s(at.rank, at.index)
        if self._interleaved:
            stepped += self._agreement_s(ranks)
        if not price.lanes:
            self._wake(at.rank, "OptimizerStep", at.index, stepped)
            return True
        ready = self._joined(at, ranks, stepped)
        if ready is not None:
            self._release(at, ranks, self._ran(ranks, price, ready)[1])
        return True

    def _joined(self, at: Any, ranks: Sequence[int], ready: float, number: int = 0) -> float | None:
        """One more has come; when all have, the time at which the last was ready."""
        key = (type(at), at.index, number)
        meeting = self._open.get(key)
        if meeting is None:
            meeting = self._open[key] = _Meeting(len(ranks))
        meeting.missing -= 1
        meeting.ready_s = max(meeting.ready_s, ready)
        if meeting.missing:
            return None
        del self._open[key]
        return meeting.ready_s

    def _ran(
        self, ranks: tuple[int, ...], collective: Collective, ready: float
    ) -> tuple[float, float]:
        start, stop = self._wires.collect(collective, max(ready, self._free_s.get(ranks, 0.0)))
        self._free_s[ranks] = stop
        return start, stop

    def _release(self, at: Any, ranks: Sequence[int], stop: float) -> None:
        name = type(at).__name__
        for rank in ranks:
            self._wake(rank, name, at.index, stop)

    def _price(self, at: Any, make: Callable[[int], Collective]) -> Collective:
        key = (type(at), at.index)
        price = self._prices.get(key)
        if price is None:
            price = self._prices[key] = make(at.index)
        return price

    def _agreement_s(self, ranks: tuple[int, ...]) -> float:
        if ranks not in self._agree_s:
            self._agree_s[ranks] = self._durations.agree_s(ranks)
        return self._agree_s[ranks]

    def _note(self, name: str, ranks: Sequence[int], stage: int, start: float, stop: float) -> None:
        if self._record and stop > start:
            self.background += [Span(rank, name, start, stop, stage) for rank in ranks]
