"""The integer clock: time in whole ticks that follow from the plan alone.

Every rank needs equal time for its share of the batch in all its stages, as a good plan intends.
Nothing measured enters, so every rank finds the same times.
"""

from collections.abc import Sequence

from zorse_ds.core.layout import MicroBatch
from zorse_ds.core.plan import Plan

SHARE_TICKS = 1 << 20
"""Ticks in which a rank runs its whole share of the batch forward through one stage."""
BACKWARD_COST = 2
"""A backward pass takes about twice a forward pass."""


def forward_ticks(micro_batches: Sequence[MicroBatch]) -> list[int]:
    """Ticks of each micro-batch's forward pass, given all micro-batches of its group."""
    shares: dict[int, int] = {}
    for micro_batch in micro_batches:
        start, stop = micro_batch.samples
        shares[micro_batch.rank] = shares.get(micro_batch.rank, 0) + stop - start
    return [
        SHARE_TICKS * (each.samples[1] - each.samples[0]) // shares[each.rank]
        for each in micro_batches
    ]


def stage_ticks(plan: Plan, stage: int, micro_batches: Sequence[MicroBatch]) -> list[int]:
    """Forward ticks of each micro-batch at one of its group's stages, by the stage's layers."""
    name = plan.stages[stage].group
    layers = sum(each.layers.size for each in plan.stages if each.group == name)
    own = plan.stages[stage].layers.size
    return [max(1, ticks * own // layers) for ticks in forward_ticks(micro_batches)]


def forward_ends(micro_batches: Sequence[MicroBatch]) -> list[int]:
    """When each micro-batch's forward ends if its rank runs one forward after the other."""
    now: dict[int, int] = {}
    ends = []
    for micro_batch, ticks in zip(micro_batches, forward_ticks(micro_batches), strict=True):
        now[micro_batch.rank] = now.get(micro_batch.rank, 0) + ticks
        ends.append(now[micro_batch.rank])
    return ends
