"""One stage over all GPUs, whose gradients are summed after every micro-batch: plain data
parallelism with ZeRO level 2, which no closed form of a pipeline's cost knows."""

from collections.abc import Iterator
from itertools import islice

from zorse_ds.cost.setting import Setting
from zorse_ds.planner.draft import Draft, GroupDraft
from zorse_ds.planner.fit import with_weights
from zorse_ds.planner.options import group_dtype
from zorse_ds.planner.settings import SIZES
from zorse_ds.planner.units import Unit, joined, units_of

ORIGIN = "all GPUs alike"
LARGEST = 3
"""Sizes of micro-batches that are simulated, of those that fit, with recompute and without."""


def lone_drafts(setting: Setting, batch: int) -> list[Draft]:
    """Those that fit, with the largest micro-batches; none where a GPU would be alone."""
    units = joined(units_of(setting.cluster))
    if sum(len(unit.ranks) for unit in units) < 2:
        return []
    found: list[Draft] = []
    for recompute in (False, True):
        found += islice(_fitting(units, recompute, setting, batch), LARGEST)
    return found


def _fitting(
    units: tuple[Unit, ...], recompute: bool, setting: Setting, batch: int
) -> Iterator[Draft]:
    each = -(-batch // sum(len(unit.ranks) for unit in units))
    sizes = {-(-each // number) for number in range(1, each + 1)}
    for size in sorted((size for size in sizes if size <= SIZES[-1]), reverse=True):
        group = GroupDraft(
            units, size, group_dtype(units, setting), 2, (recompute,), sums_often=True
        )
        draft = Draft("1f1b", (group,), ((setting.model.num_layers,),))
        fit = with_weights(draft, setting, batch)
        if not fit.overflow_bytes:
            yield fit.draft
