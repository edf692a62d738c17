"""Gradients of one stage that are summed after every micro-batch, beside the passes."""

from collections.abc import Callable

from zorse_ds.simulator.durations import Durations
from zorse_ds.simulator.wires import Wires

At = Callable[[float, Callable[[float], None]], None]
"""(when, what): do something at a time."""


class SimulatedRounds:
    """Who has come to which sum, and when each rank's own shard of a round is summed up.

    `completed`: hears the ranks that know now when a round ends. A rank begins a round when the one
    before has ended for it.
    """

    def __init__(
        self,
        stage: int,
        durations: Durations,
        wires: Wires,
        at: At,
        completed: Callable[[tuple[int, ...], float], None],
    ) -> None:
        self._stage, self._durations, self._wires = stage, durations, wires
        self._at, self._completed = at, completed
        self._lots = durations.lots(stage)
        self._ranks = durations.groups[stage].ranks
        self._prices = [durations.sum_lot(stage, lot) for lot in self._lots]
        self._total = durations.layout.num_rounds(stage)
        self._begun = dict.fromkeys(self._ranks, 0)
        self._missing: dict[tuple[int, int], int] = {}
        self._free_s = 0.0
        """When the communicator has ended what it runs."""
        self._summed_s = dict.fromkeys(self._ranks, 0.0)
        self._ended: list[dict[int, float]] = []
        """Of each round that is through: when it ended for each rank."""

    def ready_s(self, rank: int) -> float | None:
        """When a rank may begin its next round; None while nobody knows."""
        return self._end_s(rank, self._begun[rank] - 1)

    def begin(self, rank: int, start_s: float, micro_batch: int) -> None:
        """A backward pass starts."""
        self._come(rank, start_s, self._durations.lot_ready_s(self._stage, micro_batch))

    def end(self, rank: int, now: float) -> float | None:
        """When all rounds have ended for a rank whose passes have; None while nobody knows.

        Who had fewer micro-batches comes with zeros.
        """
        while self._begun[rank] < self._total:
            ready_s = self.ready_s(rank)
            if ready_s is None:
                return None
            self._come(rank, max(now, ready_s), [0.0] * len(self._lots))
        return self._end_s(rank, self._total - 1)

    def _come(self, rank: int, start_s: float, offsets_s: list[float]) -> None:
        number = self._begun[rank]
        self._begun[rank] += 1
        for index, offset_s in enumerate(offsets_s):
            self._at(start_s + offset_s, self._arrival(number, index))

    def _arrival(self, number: int, index: int) -> Callable[[float], None]:
        def arrive(now: float) -> None:
            left = self._missing.setdefault((number, index), len(self._ranks)) - 1
            self._missing[number, index] = left
            if not left:
                self._sum(index, now)

        return arrive

    def _sum(self, index: int, now: float) -> None:
        """All have come: the lot travels, and every rank sums up its shard."""
        _, stop = self._wires.collect(self._prices[index], max(now, self._free_s))
        self._free_s = stop
        for rank in self._ranks:
            seconds = self._durations.sum_lot_s(rank, self._stage, self._lots[index])
            self._summed_s[rank] = max(self._summed_s[rank], stop) + seconds
        if index == len(self._lots) - 1:
            self._ended.append(dict(self._summed_s))
            self._completed(self._ranks, now)

    def _end_s(self, rank: int, number: int) -> float | None:
        if number < 0:
            return 0.0
        return self._ended[number][rank] if number < len(self._ended) else None
