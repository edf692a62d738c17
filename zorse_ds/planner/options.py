"""Phase 2: the orders that the groups of a grouping may stand in, and what layers cost them."""

from functools import lru_cache
from itertools import permutations

import numpy as np

from zorse_ds.core.plan import Dtype
from zorse_ds.cost.compute import compute_times
from zorse_ds.cost.dtypes import usable_dtype
from zorse_ds.cost.setting import Setting
from zorse_ds.planner.groupings import Groups
from zorse_ds.planner.layers import Seconds
from zorse_ds.planner.units import Unit

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
    found = [rich_first]
    if len({node.region for node in cluster.nodes}) > 1:
        found.append(sorted(rich_first, key=region))
        found.append(sorted(rich_first, key=region, reverse=True))
    return list(dict.fromkeys(tuple(o) for order in found for o in (order, order[::-1])))


@lru_cache(maxsize=16384)
def group_dtype(group: tuple[Unit, ...], setting: Setting) -> Dtype:
    """The setting's dtype, or what all types of a group have instead."""
    gpus = setting.cluster.gpus
    usable = {usable_dtype(setting.dtype, gpus[unit.ranks[0]].type) for unit in group}
    if len(usable) == 1:
        return usable.pop()
    return "float16" if usable == {"bfloat16", "float16"} else "float32"


@lru_cache(maxsize=16384)
def group_seconds(
    group: tuple[Unit, ...], dtype: Dtype, size: int, setting: Setting, again: float
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
