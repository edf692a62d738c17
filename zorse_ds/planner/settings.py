"""What a group may do for memory, and what each costs it."""

from dataclasses import replace
from itertools import product

from zorse_ds.cost.dtypes import MASTER_BYTES
from zorse_ds.cost.optimizer import step_s
from zorse_ds.cost.setting import Setting
from zorse_ds.cost.state import params_of
from zorse_ds.planner.draft import (
    Draft,
    GroupDraft,
    Offload,
    Stages,
    ZeroLevel,
    group_sample_seconds,
)
from zorse_ds.planner.traffic import gather_s, ring_pace

OFFLOADS: tuple[Offload, ...] = ("none", "params", "params+activations")
SIZES = (1, 2, 4, 8, 16)
"""Largest micro-batches that are tried."""
MOST_TOKENS = 16384
"""In a micro-batch: with more, GPUs gain nothing, and the pipeline fills more slowly."""
AHEADS = (1, 0)
"""How far stages are ahead of those below; more than one gains nothing."""
SPARE_SHARE = 0.01
"""Of a GPU's memory is left free when shards are cut by what is free."""


def offloads_of(setting: Setting) -> tuple[Offload, ...]:
    """What groups may keep in host memory, from nothing to most."""
    return OFFLOADS if setting.may_offload else OFFLOADS[:1]


def sizes_of(width: int, setting: Setting, batch: int) -> tuple[int, ...]:
    """Micro-batch sizes for a group of `width` ranks."""
    return tuple(
        size
        for size in SIZES
        if size == 1 or (size * width <= batch and size * setting.seq_len <= MOST_TOKENS)
    )


def levels_of(width: int, visits: int) -> tuple[ZeroLevel, ...]:
    """ZeRO levels for a group: a single visit has nothing to gather twice."""
    least: ZeroLevel = 0 if width == 1 else 2
    return (least, 3) if visits > 1 else (least,)


PARTS = (0.0, 0.25, 0.5, 0.75, 1.0)
"""Of the only stage of a group that may be recomputed."""


def patterns_of(visits: int) -> tuple[tuple[float, ...], ...]:
    """What of each visit is recomputed.

    A part of the only one; of several none, all but the one where the pipeline turns around, all.
    """
    if visits == 1:
        return tuple((part,) for part in PARTS)
    return (0.0,) * visits, (*(1.0,) * (visits - 1), 0.0), (1.0,) * visits


def rungs(draft: Draft, index: int, setting: Setting, batch: int) -> list[GroupDraft]:
    """Settings of a group, the cheapest first."""
    group = draft.groups[index]
    visits = [visit for visit, _ in draft.stages_of(index)]
    recomputes = {
        tuple(1.0 * (visit in again) for visit in range(draft.num_visits))
        for again in ((), visits[:-1], visits)
    }
    if draft.num_visits == 1:
        recomputes = set(patterns_of(1))
    levels = levels_of(len(group.ranks), draft.num_visits)
    every = [
        replace(group, recompute=again, zero_level=level, offload=offload, shard_weights=None)
        for again, level, offload in product(recomputes, levels, offloads_of(setting))
    ]
    return sorted(every, key=lambda rung: _cost(draft, index, rung, setting, batch))


def _cost(
    draft: Draft, index: int, rung: GroupDraft, setting: Setting, batch: int
) -> tuple[float, int, tuple[float, ...], int]:
    """Seconds a step that the settings need on an average rank; then what is simpler."""
    stages = draft.stages_of(index)
    each = group_sample_seconds(rung, stages, setting)
    seconds = batch * sum(each) / len(each) ** 2 + host_s(rung, stages, setting)
    if rung.zero_level == 3:
        pace = ring_pace(rung.ranks, setting)
        seconds += sum(gather_s(rung.dtype, layers, setting, pace) for _, layers in stages)
    return seconds, OFFLOADS.index(rung.offload), rung.recompute, rung.zero_level


def host_s(group: GroupDraft, stages: Stages, setting: Setting) -> float:
    """Seconds a step of the optimizer in host memory, and of what is copied for it."""
    if group.offload == "none":
        return 0.0
    gpu = setting.cluster.gpus[group.ranks[0]]
    seconds = 0.0
    for _, layers in stages:
        stepped = params_of(setting.model, layers).owned / len(group.ranks)
        seconds += step_s(setting, gpu.type, group.dtype, stepped, on_host=True)
        seconds += 2 * stepped * MASTER_BYTES / gpu.host_bytes_per_s
    return seconds
