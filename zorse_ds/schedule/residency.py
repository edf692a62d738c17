"""When the full parameters of a sharded stage are on a rank: gathered once a visit, then dropped.

This is Pipeline-Efficient ZeRO (Zorse §3): a visit runs all micro-batches of one stage, so each
stage is gathered at most twice a step, however many micro-batches there are.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from zorse_ds.core.plan import GpuGroup, Plan
from zorse_ds.schedule.instructions import (
    BackwardPass,
    ForwardPass,
    Instruction,
    PrefetchParams,
    ReshardParams,
    UnshardParams,
)
from zorse_ds.schedule.orders import Compute
from zorse_ds.schedule.visits import Schedule, visits_of

GATHERED_LEVEL = 3
"""From this `zero_level` on, parameters live as shards."""


@dataclass(frozen=True, slots=True)
class Residency:
    """A group's stay with the full parameters of one stage: one visit, or two in a row."""

    stage: int
    first_visit: int
    last_visit: int


def residencies_of(plan: Plan, group: str, schedule: Schedule) -> list[Residency]:
    """The stays of a group in a step. Visits in a row at one stage keep its parameters."""
    stays: list[Residency] = []
    for index, visit in enumerate(visits_of(plan, group, schedule)):
        if stays and stays[-1].stage == visit.stage:
            stays[-1] = Residency(visit.stage, stays[-1].first_visit, index)
        else:
            stays.append(Residency(visit.stage, index, index))
    return stays


def add_residency(
    trace: Iterable[Instruction], order: Sequence[Compute], plan: Plan, schedule: Schedule
) -> Iterator[Instruction]:
    """Gather a stage while the one before it runs, drop it after a rank's last use.

    All ranks of a group gather together: once the last of them has entered the visit before. By
    then every rank has left the visit before that one, so none holds more than two stages. Where
    shards are in host memory, each rank starts to fetch its own when it enters the visit before.
    """
    before: dict[int, list[Instruction]] = defaultdict(list)
    after: dict[int, list[Instruction]] = defaultdict(list)
    for group in plan.groups:
        if group.zero_level >= GATHERED_LEVEL:
            _place(group, residencies_of(plan, group.name, schedule), order, before, after)
    position = 0
    for instruction in trace:
        if not isinstance(instruction, ForwardPass | BackwardPass):
            yield instruction
            continue
        yield from before[position]
        yield instruction
        yield from after[position]
        position += 1


def _place(
    group: GpuGroup,
    stays: Sequence[Residency],
    order: Sequence[Compute],
    before: dict[int, list[Instruction]],
    after: dict[int, list[Instruction]],
) -> None:
    first, last = _bounds(group, order)
    ranks = sorted({rank for rank, _ in first})
    for i, stay in enumerate(stays):
        if i == 0:
            gather_at = min(first[rank, stay.first_visit] for rank in ranks)
        else:
            gather_at = max(first[rank, stays[i - 1].first_visit] for rank in ranks)
        if group.offload != "none":
            entered = stays[max(i - 1, 0)].first_visit
            for rank in group.ranks:
                at = min(first.get((rank, entered), gather_at), gather_at)
                before[at].append(PrefetchParams(rank, stay.stage))
        before[gather_at] += [UnshardParams(rank, stay.stage) for rank in group.ranks]
        ends = {rank: last[rank, stay.last_visit] for rank in ranks}
        for rank in group.ranks:
            after[ends.get(rank, max(ends.values()))].append(ReshardParams(rank, stay.stage))


Bounds = dict[tuple[int, int], int]
"""(rank, visit) → a position in the compute order."""


def _bounds(group: GpuGroup, order: Sequence[Compute]) -> tuple[Bounds, Bounds]:
    """The first and the last computation of each rank in each visit."""
    first: Bounds = {}
    last: Bounds = {}
    members = set(group.ranks)
    for position, compute in enumerate(order):
        if compute.rank in members:
            key = (compute.rank, compute.visit)
            first.setdefault(key, position)
            last[key] = position
    return first, last
