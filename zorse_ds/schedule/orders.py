"""The compute order: which rank runs which micro-batch of which stage, forward or backward, when.

The order comes from running the plan on the integer clock, so every rank finds the same order.
"""

import heapq
from collections import deque
from dataclasses import dataclass, field
from typing import Literal

from zorse_ds.core.layout import Layout
from zorse_ds.core.plan import Plan
from zorse_ds.errors import ScheduleError
from zorse_ds.schedule.inflight import InFlightLimits
from zorse_ds.schedule.ticks import BACKWARD_COST, stage_ticks
from zorse_ds.schedule.visits import Schedule, Visit, visits_of

Phase = Literal["forward", "backward"]


@dataclass(frozen=True, slots=True)
class Compute:
    """One micro-batch of one stage, one way, with its time on the integer clock."""

    start: int
    rank: int
    stage: int
    micro_batch: int
    phase: Phase
    stop: int
    visit: int
    """Which of its group's visits it belongs to."""


@dataclass(slots=True)
class _Lane:
    """One rank at one stage: what waits and what is in flight."""

    limit: int
    ticks: list[int]
    forwards: deque[int] = field(default_factory=deque)
    backwards: deque[int] = field(default_factory=deque)
    in_flight: int = 0


@dataclass(slots=True)
class _Rank:
    """One rank on its way through the visits of its group."""

    rank: int
    visits: tuple[Visit, ...]
    peers: tuple[int, ...]
    """Ranks of the group that run micro-batches, this one too."""
    entered: list[int]
    """How many of them have run something in each visit; one list for the group."""
    lanes: dict[int, _Lane]
    visit: int = 0
    started: int = -1
    """The latest visit in which it has run something."""
    free_at: int = 0


class _Clock:
    """The state of the integer-clock run."""

    def __init__(
        self, plan: Plan, layout: Layout, limits: InFlightLimits, schedule: Schedule
    ) -> None:
        self.layout = layout
        self.order: list[Compute] = []
        self.waits_forward, self.waits_backward = _open_needs(layout)
        self.ranks = _ranks(plan, layout, limits, schedule)
        self.wakes = [(0, rank) for rank in sorted(self.ranks)]
        self.finished: list[tuple[int, int, Compute]] = []

    def run(self) -> list[Compute]:
        """Advance the clock until nothing is left to start or to finish."""
        while self.wakes or self.finished:
            now = min(heap[0][0] for heap in (self.wakes, self.finished) if heap)
            while self.finished and self.finished[0][0] == now:
                self._finish(heapq.heappop(self.finished)[2])
            while self.wakes and self.wakes[0][0] == now:
                self._start_next(now, self.ranks[heapq.heappop(self.wakes)[1]])
        return self.order

    def _start_next(self, now: int, own: _Rank) -> None:
        if own.free_at > now:
            return
        self._leave_finished_visits(own)
        if own.visit == len(own.visits) or not self._peers_follow(own):
            return
        visit = own.visits[own.visit]
        lane = own.lanes[visit.stage]
        choice = self._choose(visit, lane)
        if choice is None:
            return
        phase, micro_batch = choice
        ticks = lane.ticks[micro_batch] * (BACKWARD_COST if phase == "backward" else 1)
        own.free_at = now + ticks
        compute = Compute(now, own.rank, visit.stage, micro_batch, phase, own.free_at, own.visit)
        heapq.heappush(self.finished, (own.free_at, len(self.order), compute))
        self.order.append(compute)
        if own.started < own.visit:
            for visit_entered in range(own.started + 1, own.visit + 1):
                own.entered[visit_entered] += 1
            own.started = own.visit
            for peer in own.peers:
                heapq.heappush(self.wakes, (now, peer))

    def _leave_finished_visits(self, own: _Rank) -> None:
        while own.visit < len(own.visits):
            visit = own.visits[own.visit]
            lane = own.lanes[visit.stage]
            if (visit.forward and lane.forwards) or (visit.backward and lane.backwards):
                return
            own.visit += 1

    def _peers_follow(self, own: _Rank) -> bool:
        """No rank enters a visit before all of its group have entered the one before.

        So a group never has more than two stages in hand, and gathers them together.
        """
        return not own.visit or own.entered[own.visit - 1] == len(own.peers)

    def _choose(self, visit: Visit, lane: _Lane) -> tuple[Phase, int] | None:
        """The oldest forward while the limit has room, for others wait for it; else backward."""
        has_room = visit.forward and lane.forwards and lane.in_flight < lane.limit
        if has_room and not self.waits_forward[visit.stage][lane.forwards[0]]:
            lane.in_flight += 1
            return "forward", lane.forwards.popleft()
        if visit.backward and lane.backwards:
            oldest = lane.backwards[0]
            if not self.waits_backward[visit.stage][oldest]:
                lane.in_flight -= 1
                return "backward", lane.backwards.popleft()
        return None

    def _finish(self, done: Compute) -> None:
        heapq.heappush(self.wakes, (done.stop, done.rank))
        here = (done.stage, done.micro_batch)
        if done.phase == "forward":
            self.waits_backward[done.stage][done.micro_batch] -= 1
            for transfer in self.layout.outgoing.get(here, ()):
                waits = self.waits_forward[done.stage + 1]
                waits[transfer.target] -= 1
                if not waits[transfer.target]:
                    heapq.heappush(self.wakes, (done.stop, transfer.target_rank))
        else:
            for transfer in self.layout.incoming.get(here, ()):
                waits = self.waits_backward[done.stage - 1]
                waits[transfer.source] -= 1
                if not waits[transfer.source]:
                    heapq.heappush(self.wakes, (done.stop, transfer.source_rank))


def compute_order(
    plan: Plan, layout: Layout, limits: InFlightLimits, schedule: Schedule
) -> list[Compute]:
    """All computations of a step by start time, producers before consumers.

    `"forward"` runs no backward (evaluation). Raises `ScheduleError` when the limits let the
    pipeline stall. O(n log n) in the number of micro-batches and transfers.
    """
    order = _Clock(plan, layout, limits, schedule).run()
    ways = 1 if schedule == "forward" else 2
    expected = ways * sum(len(micro_batches) for micro_batches in layout.micro_batches)
    if len(order) != expected:
        raise ScheduleError(
            f"the {schedule} order stalls after {len(order)} of {expected} computations; expected "
            "in-flight limits that follow from the routes"
        )
    return order


def _ranks(
    plan: Plan, layout: Layout, limits: InFlightLimits, schedule: Schedule
) -> dict[int, _Rank]:
    ranks: dict[int, _Rank] = {}
    for group in plan.groups:
        visits = visits_of(plan, group.name, schedule)
        peers = tuple(gpu.rank for gpu in group.gpus if gpu.micro_batches)
        entered = [0] * len(visits)
        for rank in peers:
            ranks[rank] = _Rank(rank, visits, peers, entered, {})
    for stage, micro_batches in enumerate(layout.micro_batches):
        ticks = stage_ticks(plan, stage, micro_batches)
        for micro_batch in micro_batches:
            rank = micro_batch.rank
            lanes = ranks[rank].lanes
            if stage not in lanes:
                lanes[stage] = _Lane(limits[rank, stage], ticks)
            lanes[stage].forwards.append(micro_batch.index)
            if schedule != "forward":
                lanes[stage].backwards.append(micro_batch.index)
    return ranks


def _open_needs(layout: Layout) -> tuple[list[list[int]], list[list[int]]]:
    """Per stage and micro-batch: arrivals that its forward and its backward still wait for."""
    forward = [[0] * len(micro_batches) for micro_batches in layout.micro_batches]
    backward = [[1] * len(micro_batches) for micro_batches in layout.micro_batches]
    for boundary in layout.transfers:
        for transfer in boundary:
            forward[transfer.boundary + 1][transfer.target] += 1
            backward[transfer.boundary][transfer.source] += 1
    return forward, backward
