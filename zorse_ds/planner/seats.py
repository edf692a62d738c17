"""Groups in their places in a pipeline, reduced to what their settings depend on.

Groups of alike GPUs have equal seats, so that what is worked out for one serves for all.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from zorse_ds.core.plan import Dtype
from zorse_ds.cost.compute import best_samples_per_s
from zorse_ds.cost.setting import Setting
from zorse_ds.planner.counts import Place
from zorse_ds.planner.options import group_dtype
from zorse_ds.planner.traffic import ring_pace
from zorse_ds.planner.units import Unit


@dataclass(frozen=True, slots=True)
class Members:
    """Alike GPUs of a group."""

    gpu_type: str
    number: int
    usable_bytes: int
    """Of the one that has least."""
    host_bytes_per_s: float
    """Of the slowest."""


@dataclass(frozen=True, slots=True)
class Seat:
    """A group in a pipeline: all that its settings depend on beside its layers."""

    members: tuple[Members, ...]
    dtype: Dtype
    pace: float
    """Seconds a byte takes once around the group (`traffic.ring_pace`)."""
    place: Place
    visits: int
    batch: int
    weight: float
    """Its share of the speed of all groups: what its seconds weigh against filling the pipeline."""
    held: float = 0.0
    """Samples in flight in the group where the pipeline turns around."""
    tightness: float = 1.0
    """What the closed form of bytes is to be multiplied by."""

    @property
    def width(self) -> int:
        """Ranks."""
        return sum(each.number for each in self.members)

    def holding(self, samples: float) -> "Seat":
        """The seat with so many samples in flight."""
        return replace(self, held=samples)

    def tighter(self, factor: float) -> "Seat":
        """The seat with so many times the bytes."""
        return replace(self, tightness=round(self.tightness * factor, 3))


def seats_of(
    groups: Sequence[tuple[Unit, ...]], setting: Setting, batch: int, visits: int
) -> list[Seat]:
    """The seats of groups in pipeline order, with nothing in flight."""
    dtypes = [group_dtype(group, setting) for group in groups]
    speeds = [
        sum(len(unit.ranks) * best_samples_per_s(setting, unit.gpu_type, dtype) for unit in group)
        for group, dtype in zip(groups, dtypes, strict=True)
    ]
    return [
        Seat(
            members=_members(group, setting),
            dtype=dtypes[i],
            pace=ring_pace(_ranks(group), setting),
            place=Place(i == 0, i == len(groups) - 1),
            visits=visits,
            batch=batch,
            # Rounded, for the order of a sum would make equal seats differ.
            weight=round(speeds[i] / sum(speeds), 9),
        )
        for i, group in enumerate(groups)
    ]


def held_samples(spans: Sequence[int], batch: int, ahead: int) -> list[float]:
    """Samples in flight in each group where the pipeline turns around.

    `spans`: samples that each group runs at once. In flight are the spans of a group and of all
    below, and one more of the widest where they differ. With equal spans that is the textbook's
    number. For `ahead` see `schedule.inflight.further_ahead`.
    """
    held = []
    for index in range(len(spans)):
        below = spans[index:]
        more = max(below) if min(below) != max(below) else 0
        more += ahead * sum(max(pair) for pair in pairwise(below))
        held.append(float(min(batch, sum(below) + more)))
    return held


def _ranks(group: Sequence[Unit]) -> tuple[int, ...]:
    return tuple(sorted(rank for unit in group for rank in unit.ranks))


def _members(group: Sequence[Unit], setting: Setting) -> tuple[Members, ...]:
    numbers = Counter(unit.gpu_type for unit in group for _ in unit.ranks)
    found = []
    for name, number in sorted(numbers.items()):
        gpus = [
            setting.cluster.gpus[rank]
            for unit in group
            if unit.gpu_type == name
            for rank in unit.ranks
        ]
        usable = min(gpu.usable_bytes for gpu in gpus)
        found.append(Members(name, number, usable, min(gpu.host_bytes_per_s for gpu in gpus)))
    return tuple(found)
