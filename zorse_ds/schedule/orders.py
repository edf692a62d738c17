"""The compute order: which rank runs which micro-batch of which stage, forward or backward, when.

The order comes from running the plan on the integer clock, so every rank finds the same order.
"""

import heapq
from collections import deque
from dataclasses import dataclass, field
from typing import Literal

from zorse_ds.core.layout import Layout
from zorse_ds.errors import ScheduleError
from zorse_ds.schedule.inflight import InFlightLimits
from zorse_ds.schedule.ticks import BACKWARD_COST, forward_ticks

Phase = Literal["forward", "backward"]
Schedule = Literal["1f1b", "gpipe", "forward"]


@dataclass(frozen=True, slots=True)
class Compute:
    """One micro-batch of one stage, one way, with its time on the integer clock."""

    start: int
    rank: int
    stage: int
    micro_batch: int
    phase: Phase
    stop: int


@dataclass(slots=True)
class _Lane:
    """One rank at one stage: what waits, what runs, what is in flight."""

    rank: int
    stage: int
    limit: int
    forwards: deque[int] = field(default_factory=deque)
    backwards: deque[int] = field(default_factory=deque)
    ticks: dict[int, int] = field(default_factory=dict)
    free_at: int = 0


class _Clock:
    """The state of the integer-clock run."""

    def __init__(self, layout: Layout, limits: InFlightLimits, schedule: Schedule) -> None:
        self.layout = layout
        self.schedule = schedule
        self.order: list[Compute] = []
        self.waits_forward, self.waits_backward = _open_needs(layout)
        self.lanes = _lanes(layout, limits)
        self.wakes = [(0, rank, stage) for rank, stage in sorted(self.lanes)]
        self.finished: list[tuple[int, int, Compute]] = []

    def run(self) -> list[Compute]:
        """Advance the clock until nothing is left to start or to finish."""
        while self.wakes or self.finished:
            now = min(heap[0][0] for heap in (self.wakes, self.finished) if heap)
            while self.finished and self.finished[0][0] == now:
                self._finish(heapq.heappop(self.finished)[2])
            while self.wakes and self.wakes[0][0] == now:
                _, rank, stage = heapq.heappop(self.wakes)
                self._start_next(now, self.lanes[rank, stage])
        return self.order

    def _start_next(self, now: int, lane: _Lane) -> None:
        if lane.free_at > now:
            return
        choice = self._choose(lane)
        if choice is None:
            return
        phase, micro_batch = choice
        ticks = lane.ticks[micro_batch] * (BACKWARD_COST if phase == "backward" else 1)
        lane.free_at = now + ticks
        compute = Compute(now, lane.rank, lane.stage, micro_batch, phase, lane.free_at)
        heapq.heappush(self.finished, (lane.free_at, len(self.order), compute))
        self.order.append(compute)

    def _choose(self, lane: _Lane) -> tuple[Phase, int] | None:
        """Backward before forward, the oldest first; GPipe first runs all its forwards."""
        may_go_back = self.schedule == "1f1b" or not lane.forwards
        if may_go_back and lane.backwards:
            oldest = lane.backwards[0]
            if not self.waits_backward[lane.stage][oldest]:
                return "backward", lane.backwards.popleft()
        has_room = self.schedule != "1f1b" or len(lane.backwards) < lane.limit
        if lane.forwards and has_room and not self.waits_forward[lane.stage][lane.forwards[0]]:
            micro_batch = lane.forwards.popleft()
            if self.schedule != "forward":
                lane.backwards.append(micro_batch)
            return "forward", micro_batch
        return None

    def _finish(self, done: Compute) -> None:
        heapq.heappush(self.wakes, (done.stop, done.rank, done.stage))
        here = (done.stage, done.micro_batch)
        if done.phase == "forward":
            self.waits_backward[done.stage][done.micro_batch] -= 1
            for transfer in self.layout.outgoing.get(here, ()):
                self.waits_forward[done.stage + 1][transfer.target] -= 1
                heapq.heappush(self.wakes, (done.stop, transfer.target_rank, done.stage + 1))
        else:
            for transfer in self.layout.incoming.get(here, ()):
                self.waits_backward[done.stage - 1][transfer.source] -= 1
                heapq.heappush(self.wakes, (done.stop, transfer.source_rank, done.stage - 1))


def compute_order(layout: Layout, limits: InFlightLimits, schedule: Schedule) -> list[Compute]:
    """All computations of a step by start time, producers before consumers.

    `"forward"` runs no backward (evaluation). Raises `ScheduleError` when the limits let the
    pipeline stall. O(n log n) in the number of micro-batches and transfers.
    """
    order = _Clock(layout, limits, schedule).run()
    ways = 1 if schedule == "forward" else 2
    expected = ways * sum(len(micro_batches) for micro_batches in layout.micro_batches)
    if len(order) != expected:
        raise ScheduleError(
            f"the {schedule} order stalls after {len(order)} of {expected} computations; expected "
            "in-flight limits that follow from the routes"
        )
    return order


def _lanes(layout: Layout, limits: InFlightLimits) -> dict[tuple[int, int], _Lane]:
    lanes: dict[tuple[int, int], _Lane] = {}
    for stage, micro_batches in enumerate(layout.micro_batches):
        for micro_batch, ticks in zip(micro_batches, forward_ticks(micro_batches), strict=True):
            key = (micro_batch.rank, stage)
            lane = lanes.setdefault(key, _Lane(*key, limits[key]))
            lane.forwards.append(micro_batch.index)
            lane.ticks[micro_batch.index] = ticks
    return lanes


def _open_needs(layout: Layout) -> tuple[list[list[int]], list[list[int]]]:
    """Per stage and micro-batch: arrivals that its forward and its backward still wait for."""
    forward = [[0] * len(micro_batches) for micro_batches in layout.micro_batches]
    backward = [[1] * len(micro_batches) for micro_batches in layout.micro_batches]
    for boundary in layout.transfers:
        for transfer in boundary:
            forward[transfer.boundary + 1][transfer.target] += 1
            backward[transfer.boundary][transfer.source] += 1
    return forward, backward
