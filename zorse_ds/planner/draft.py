"""A draft: the decisions of a plan in the planner's own terms, and the plan that follows."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from math import ceil
from typing import Literal

from zorse_ds.core.plan import Dtype, GpuGroup, GpuShare, Plan, Recompute, Stage
from zorse_ds.core.recompute import KEPT, Recomputed, first_of
from zorse_ds.cost.activations import activation_table
from zorse_ds.cost.compute import compute_times
from zorse_ds.cost.setting import Setting
from zorse_ds.planner.shares import balanced, micro_batches
from zorse_ds.planner.units import Unit
from zorse_ds.ranges import Range, consecutive

Schedule = Literal["1f1b", "ministage"]
ZeroLevel = Literal[0, 1, 2, 3]
Offload = Literal["none", "params", "params+activations"]
ROUNDING = 1e-6


@dataclass(frozen=True, slots=True)
class GroupDraft:
    """What is decided for one group."""

    units: tuple[Unit, ...]
    size: int
    """The largest micro-batch."""
    dtype: Dtype
    zero_level: ZeroLevel = 2
    recompute: tuple[float, ...] = (0.0,)
    """Of each visit's blocks, the share that is made anew in backward."""
    offload: Offload = "none"
    shard_weights: tuple[float, ...] | None = None
    """One a rank, ascending ranks; None: equal."""
    sums_often: bool = False
    """Gradients are summed after every micro-batch, where the plan allows it."""

    @property
    def ranks(self) -> tuple[int, ...]:
        """Ascending."""
        return _members(self.units)[0]

    @property
    def gpu_types(self) -> tuple[str, ...]:
        """The type of each rank, in their order."""
        return _members(self.units)[1]


@lru_cache(maxsize=65536)
def _members(units: tuple[Unit, ...]) -> tuple[tuple[int, ...], tuple[str, ...]]:
    pairs = sorted((rank, unit.gpu_type) for unit in units for rank in unit.ranks)
    return tuple(rank for rank, _ in pairs), tuple(name for _, name in pairs)


@dataclass(frozen=True)
class Draft:
    """Groups in pipeline order and the layers of every stage."""

    schedule: Schedule
    groups: tuple[GroupDraft, ...]
    layers: tuple[tuple[int, ...], ...]
    """How many layers each visit (outer) has at each group (inner); 0 leaves the stage out."""
    ahead: int = 0
    """See `Plan.ahead`."""

    @property
    def num_visits(self) -> int:
        """Rounds through the groups."""
        return len(self.layers)

    @cached_property
    def cuts(self) -> tuple[tuple[int, int, Range], ...]:
        """Visit, group and layers of every stage, in model order."""
        places = [
            (visit, group, number)
            for visit, own in enumerate(self.layers)
            for group, number in enumerate(own)
            if number
        ]
        ranges = consecutive([number for _, _, number in places])
        return tuple((v, g, r) for (v, g, _), r in zip(places, ranges, strict=True))

    @cached_property
    def _stages(self) -> tuple[tuple[tuple[int, Range], ...], ...]:
        stages: list[list[tuple[int, Range]]] = [[] for _ in self.groups]
        for visit, group, layers in self.cuts:
            stages[group].append((visit, layers))
        return tuple(map(tuple, stages))

    def stages_of(self, group: int) -> tuple[tuple[int, Range], ...]:
        """Visits and layers of the stages of a group."""
        return self._stages[group]

    def with_group(self, index: int, group: GroupDraft) -> "Draft":
        """The draft with one group decided otherwise."""
        groups = (*self.groups[:index], group, *self.groups[index + 1 :])
        return replace(self, groups=groups)


Stages = tuple[tuple[int, Range], ...]
"""Visits and layers of the stages of a group."""


def sample_seconds(draft: Draft, index: int, setting: Setting) -> tuple[float, ...]:
    """What one sample costs each rank of a group, over all its stages.

    Passes, and copies of activations to and from host memory, for which a rank waits.
    """
    return group_sample_seconds(draft.groups[index], draft.stages_of(index), setting)


@lru_cache(maxsize=16384)
def group_sample_seconds(group: GroupDraft, stages: Stages, setting: Setting) -> tuple[float, ...]:
    """`sample_seconds` of a group with these stages."""
    times = compute_times(setting)
    copied = 2 * _copied_bytes(group, stages, setting)
    found: dict[tuple[str, float], float] = {}
    seconds = []
    for rank, name in zip(group.ranks, group.gpu_types, strict=True):
        host_bytes_per_s = setting.cluster.gpus[rank].host_bytes_per_s
        key = (name, host_bytes_per_s if copied else 0.0)
        if key not in found:
            sums = times.sums(name, group.dtype, group.size)
            whole = sum(
                sums.forward_s(layers)
                + sums.backward_s(layers, recomputed(group.recompute[visit], layers, setting))
                for visit, layers in stages
            )
            found[key] = whole / group.size + copied / host_bytes_per_s
        seconds.append(found[key])
    return tuple(seconds)


def _copied_bytes(group: GroupDraft, stages: Stages, setting: Setting) -> float:
    """Of one sample's activations, one way."""
    if group.offload != "params+activations":
        return 0.0
    table = activation_table(setting)
    return sum(
        table.of(
            layers,
            group.dtype,
            recomputed(group.recompute[visit], layers, setting),
            offloaded=True,
        ).host_per_sample
        for visit, layers in stages
    )


@lru_cache(maxsize=65536)
def recomputed(share: float, layers: Range, setting: Setting) -> Recomputed:
    """What of a stage is recomputed if a share of its blocks is: whole blocks, rounded up."""
    every = [layer for layer in range(*layers) if setting.recomputes(layer)]
    number = ceil(share * len(every) - ROUNDING)
    if number == len(every):
        return first_of(layers) if every else KEPT
    return first_of(layers, every[number - 1] + 1 - layers.start if number else 0)


def plan_of(draft: Draft, setting: Setting, batch: int) -> Plan:
    """The plan: samples go to ranks so that the ranks of a group end together."""
    names = group_names(draft)
    numbers = range(len(draft.groups))
    return Plan(
        global_batch_size=batch,
        schedule=draft.schedule,
        ahead=draft.ahead,
        groups=tuple(_group(draft, i, names[i], setting, batch) for i in numbers),
        stages=tuple(_stages(draft, names, setting)),
    )


def part_of(draft: Draft, index: int, setting: Setting, batch: int) -> Plan:
    """What of the plan one group's memory depends on: the group alone, and all stages."""
    names = group_names(draft)
    return Plan.model_construct(
        version=1,
        global_batch_size=batch,
        schedule=draft.schedule,
        turnaround=True,
        ahead=draft.ahead,
        groups=(_group(draft, index, names[index], setting, batch),),
        stages=tuple(_stages(draft, names, setting)),
    )


def _group(draft: Draft, index: int, name: str, setting: Setting, batch: int) -> GpuGroup:
    group = draft.groups[index]
    samples = balanced(batch, sample_seconds(draft, index, setting))
    weights = group.shard_weights or (1.0,) * len(samples)
    return GpuGroup(
        name=name,
        gpus=tuple(
            _share(rank, micro_batches(number, group.size), weight)
            for rank, number, weight in zip(group.ranks, samples, weights, strict=True)
        ),
        zero_level=group.zero_level,
        recompute=_usual(group, draft, index),
        reduce_after="micro_batch" if _sums_often(draft, group) else "step",
        offload=group.offload,
        dtype=group.dtype,
    )


def _sums_often(draft: Draft, group: GroupDraft) -> bool:
    plain = group.zero_level == 2 and group.offload == "none"
    return group.sums_often and plain and len(draft.cuts) == 1


@lru_cache(maxsize=65536)
def _share(rank: int, sizes: tuple[int, ...], weight: float) -> GpuShare:
    return GpuShare(rank=rank, micro_batches=sizes, shard_weight=weight)


def _stages(draft: Draft, names: Sequence[str], setting: Setting) -> Iterator[Stage]:
    usual = [_usual(group, draft, i) for i, group in enumerate(draft.groups)]
    for visit, index, layers in draft.cuts:
        again = recomputed(draft.groups[index].recompute[visit], layers, setting).layers.size
        own: Recompute = "full" if again else "none"
        changed = None if own == usual[index] else own
        yield _stage(names[index], layers, changed, again if 0 < again < layers.size else None)


@lru_cache(maxsize=65536)
def _stage(name: str, layers: Range, recompute: Recompute | None, number: int | None) -> Stage:
    return Stage(group=name, layers=layers, recompute=recompute, recompute_layers=number)


def group_names(draft: Draft) -> list[str]:
    """`a100-sxm-40gb`, `t4+v100 2`: the types of a group, numbered where several would be alike."""
    plain = ["+".join(sorted({u.gpu_type for u in group.units})).lower() for group in draft.groups]
    return [
        name if plain.count(name) == 1 else f"{name} {plain[: i + 1].count(name)}"
        for i, name in enumerate(plain)
    ]


def _usual(group: GroupDraft, draft: Draft, index: int) -> Recompute:
    """What most stages of the group do."""
    own = [group.recompute[visit] > 0 for visit, _ in draft.stages_of(index)]
    return "full" if 2 * sum(own) > len(own) else "none"
