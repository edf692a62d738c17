"""Moving micro-batches from one rank of a group to another, with the samples of the group kept.

Every rank keeps its micro-batch size, so what moves is a lot: the least number of samples that is a
whole number of micro-batches on both sides.
"""

from collections import Counter
from dataclasses import dataclass
from math import lcm

from zorse_ds.core.plan import GpuGroup, GpuShare, Plan


@dataclass(frozen=True, slots=True)
class Lot:
    """Samples that leave one rank of a group and go to another."""

    giver: int
    taker: int
    num_samples: int


def usual_size(gpu: GpuShare) -> int:
    """The size that most of a rank's micro-batches have, the larger one of two; 0 for none."""
    counts = Counter(gpu.micro_batches)
    return max(counts, key=lambda size: (counts[size], size), default=0)


def lot_between(giver: GpuShare, taker: GpuShare) -> Lot | None:
    """What the giver can hand over; None if it would be left with nothing, or the taker is idle."""
    own, other = usual_size(giver), usual_size(taker)
    if not own or not other:
        return None
    num_samples = lcm(own, other)
    given = num_samples // own
    if giver.micro_batches.count(own) < given or len(giver.micro_batches) <= given:
        return None
    return Lot(giver.rank, taker.rank, num_samples)


def with_lot(group: GpuGroup, lot: Lot) -> GpuGroup:
    """The group after a lot of `lot_between` has moved; its sum of samples stays."""

    def changed(gpu: GpuShare) -> GpuShare:
        if gpu.rank not in (lot.giver, lot.taker):
            return gpu
        size = usual_size(gpu)
        sizes = list(gpu.micro_batches)
        # Behind the last one of its size: what is of another size keeps its place.
        last = len(sizes) - sizes[::-1].index(size)
        number = lot.num_samples // size
        if gpu.rank == lot.taker:
            sizes[last:last] = [size] * number
        else:
            for _ in range(number):
                del sizes[len(sizes) - 1 - sizes[::-1].index(size)]
        return gpu.model_copy(update={"micro_batches": tuple(sizes)})

    return group.model_copy(update={"gpus": tuple(map(changed, group.gpus))})


def with_group(plan: Plan, group: GpuGroup) -> Plan:
    """The plan with one of its groups replaced by another of that name."""
    groups = tuple(group if each.name == group.name else each for each in plan.groups)
    return plan.model_copy(update={"groups": groups})


def moved_samples(before: Plan, after: Plan) -> int:
    """Samples that another rank runs, over all groups."""
    pairs = zip(before.groups, after.groups, strict=True)
    return sum(
        max(0, new.num_samples - old.num_samples)
        for one, other in pairs
        for old, new in zip(one.gpus, other.gpus, strict=True)
    )
