"""Phase 2: the drafts that a grouping offers, by order, number of visits and micro-batch size."""

from collections.abc import Iterator, Sequence
from itertools import permutations
from math import inf

import numpy as np

from zorse_ds.core.plan import Dtype
from zorse_ds.cost.compute import compute_times
from zorse_ds.cost.dtypes import usable_dtype
from zorse_ds.cost.setting import Setting
from zorse_ds.planner.draft import Draft, GroupDraft
from zorse_ds.planner.groupings import Groups
from zorse_ds.planner.layers import Seconds, bottleneck, cut_layers, spread
from zorse_ds.planner.units import Unit

SIZES = (1, 2, 4, 8, 16)
"""Largest micro-batches that are tried."""
MOST_TOKENS = 16384
"""In a micro-batch: with more, GPUs gain nothing, and the pipeline fills more slowly."""
VISITS = (1, 2, 3, 4, 6, 8, 12)
"""1: 1F1B. More: ministages."""
ALL_ORDERS_UP_TO = 3
"""Groups; with more, only the orders that make sense are tried."""


def orders(groups: Groups, setting: Setting) -> list[Groups]:
    """Orders of the groups: by memory (1F1B keeps most in flight at the front), by speed, by place.

    With ministages the fast and memory-rich go last, where the pipeline turns around.
    """
    if len(groups) <= ALL_ORDERS_UP_TO:
        return list(permutations(groups))
    cluster = setting.cluster

    def memory(group: tuple[Unit, ...]) -> float:
        return min(cluster.gpus[unit.ranks[0]].usable_bytes for unit in group)

    def speed(group: tuple[Unit, ...]) -> float:
        times = compute_times(setting)
        layers = setting.model.num_layers
        return sum(
            len(unit.ranks)
            / times.sums(unit.gpu_type, group_dtype(group, setting), 1).forward[layers]
            for unit in group
        )

    def region(group: tuple[Unit, ...]) -> str:
        return str(cluster.nodes[group[0].node].region)

    rich_first = sorted(groups, key=lambda group: (-memory(group), -speed(group), group))
    by_region = sorted(groups, key=lambda group: (region(group), -memory(group), group))
    back = sorted(groups, key=lambda group: region(group), reverse=True)
    back = sorted(back, key=lambda group: (_reverse(region(group)), -memory(group), group))
    found = [rich_first, by_region, back]
    return list(dict.fromkeys(tuple(o) for order in found for o in (order, order[::-1])))


def _reverse(text: str) -> tuple[int, ...]:
    """Sorts texts the other way round."""
    return tuple(-ord(letter) for letter in text)


def group_dtype(group: Sequence[Unit], setting: Setting) -> Dtype:
    """The setting's dtype, or what all types of a group have instead."""
    types = {rank_type.name: rank_type for rank_type in (gpu.type for gpu in setting.cluster.gpus)}
    usable = {usable_dtype(setting.dtype, types[unit.gpu_type]) for unit in group}
    if len(usable) == 1:
        return usable.pop()
    return "float16" if usable == {"bfloat16", "float16"} else "float32"


def drafts_of(
    ordered: Groups, setting: Setting, batch: int, within_s: float = inf
) -> Iterator[Draft]:
    """Drafts for groups in this order, without a look at memory.

    Those of which one group alone would need more than `within_s` are left out.
    """
    dtypes = [group_dtype(group, setting) for group in ordered]
    widest = max(sum(len(unit.ranks) for unit in group) for group in ordered)
    for size in SIZES:
        if size > 1 and (size * widest > batch or size * setting.seq_len > MOST_TOKENS):
            break
        for again in (False, True):
            seconds = [
                group_seconds(group, dtype, size, setting, float(again))
                for group, dtype in zip(ordered, dtypes, strict=True)
            ]
            counts = cut_layers(seconds, [setting.model.num_layers] * len(ordered))
            if counts is None or batch * bottleneck(seconds, counts) > within_s:
                continue
            for visits in VISITS:
                if visits > 1 and min(counts) < visits:
                    break
                yield _draft(ordered, dtypes, size, counts, visits, again)


def _draft(
    ordered: Groups,
    dtypes: Sequence[Dtype],
    size: int,
    counts: Sequence[int],
    visits: int,
    again: bool,
) -> Draft:
    recompute = tuple(again for _ in range(visits))
    groups = tuple(
        GroupDraft(units=units, size=size, dtype=dtype, recompute=recompute)
        for units, dtype in zip(ordered, dtypes, strict=True)
    )
    return Draft("1f1b" if visits == 1 else "ministage", groups, spread(counts, visits))


def group_seconds(
    group: Sequence[Unit], dtype: Dtype, size: int, setting: Setting, again: float
) -> Seconds:
    """What the first n layers would cost a group for one sample of the batch, prefix sums.

    `again`: the share of forward passes that recompute repeats.
    """
    times = compute_times(setting)
    speed = np.zeros(setting.model.num_layers)
    for unit in group:
        sums = times.sums(unit.gpu_type, dtype, size)
        whole = np.array(sums.forward) + np.array(sums.backward)
        whole = whole + again * np.array(sums.again)
        speed += len(unit.ranks) / np.maximum(np.diff(whole) / size, 1e-12)
    return np.concatenate([[0.0], np.cumsum(1 / speed)])
