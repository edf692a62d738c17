"""A quick cost for a draft: what the simulator would say, to some per cent, without a trace.

It misranks drafts that are close, so the best are simulated (design §2.6); its place is to throw
away the hopeless ones.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

from zorse_ds.cost.compute import compute_times
from zorse_ds.cost.dtypes import DTYPE_BYTES
from zorse_ds.cost.setting import Setting
from zorse_ds.planner.draft import (
    Draft,
    GroupDraft,
    Stages,
    group_sample_seconds,
    recomputed,
)
from zorse_ds.planner.settings import host_s
from zorse_ds.planner.traffic import Shares, boundary_loads, gather_s, ring_pace


@dataclass(frozen=True, slots=True)
class Score:
    """Seconds of a step and what they consist of."""

    busy_s: float
    """Of the busiest group's passes."""
    comm_s: float
    """What the busiest lanes need beyond the passes that hide them."""
    fill_s: float
    """Of the first and last micro-batches, on their way through the other groups."""
    update_s: float
    """Reductions, copies and steps in host memory that nothing hides."""

    @property
    def step_s(self) -> float:
        """The whole step."""
        return self.busy_s + self.comm_s + self.fill_s + self.update_s


@dataclass(frozen=True, slots=True)
class _Facts:
    """Of one group of a draft."""

    busy_s: float
    forward_s: Mapping[int, float]
    """By visit."""
    backward_s: Mapping[int, float]
    """By visit."""
    turning_s: float
    """Forward passes of the visit where the pipeline turns around."""
    first_s: float
    """One micro-batch forward and backward through the stage that a visit has, slowest type."""
    shares: Shares
    """The part of the batch that each node runs."""
    gathers_s: tuple[float, float]
    """Gathers of parameters that overlap with passes, in the forward and the backward phase."""
    update_s: float
    """Reductions, gathers and steps in host memory that the group waits for."""


def score(draft: Draft, setting: Setting, batch: int) -> Score:
    """The cost of a step of `batch` samples."""
    facts = [
        _facts(group, draft.stages_of(i), setting, batch) for i, group in enumerate(draft.groups)
    ]
    loads = boundary_loads(draft, setting, [each.shares for each in facts], batch)
    for index, each in enumerate(facts):
        loads.forward["gather", index], loads.backward["gather", index] = each.gathers_s
    slowest = max(range(len(facts)), key=lambda i: facts[i].busy_s + facts[i].update_s)
    if draft.schedule == "1f1b":
        busy = facts[slowest].busy_s
        beyond = max(0.0, loads.whole_s - busy)
    else:
        forward = _in_step(each.forward_s for each in facts)
        backward = _in_step(each.backward_s for each in facts)
        busy = forward + backward
        beyond = max(0.0, loads.forward_s - forward) + max(0.0, loads.backward_s - backward)
    if not draft.ahead and _unlike(draft):
        # Each stage waits for the forward pass above that follows a backward pass.
        beyond += max(each.turning_s for each in facts)
    fill = sum(each.first_s for i, each in enumerate(facts) if i != slowest)
    fill += 2 * sum(_hop_s(draft, setting, a, b) for a, b in pairwise(range(len(facts))))
    return Score(busy, beyond, fill, facts[slowest].update_s)


def _unlike(draft: Draft) -> bool:
    """Groups cut their time into passes in different ways."""
    looks = {(len(each.ranks), each.size, each.recompute[-1:]) for each in draft.groups}
    return len(looks) > 1


def _in_step(by_visit: Iterable[Mapping[int, float]]) -> float:
    """In a visit all groups work at the pace of the slowest one."""
    slowest: dict[int, float] = {}
    for own in by_visit:
        for visit, seconds in own.items():
            slowest[visit] = max(seconds, slowest.get(visit, 0.0))
    return sum(slowest.values())


@lru_cache(maxsize=16384)
def _facts(group: GroupDraft, stages: Stages, setting: Setting, batch: int) -> _Facts:
    each = group_sample_seconds(group, stages, setting)
    seconds = dict(zip(group.gpu_types, each, strict=True))
    speed = sum(len(unit.ranks) / seconds[unit.gpu_type] for unit in group.units)
    shares: dict[int, float] = {}
    for unit in group.units:
        part = len(unit.ranks) / seconds[unit.gpu_type] / speed
        shares[unit.node] = shares.get(unit.node, 0.0) + part
    slowest = max(seconds, key=lambda name: seconds[name])
    # A rank runs whole samples: on average half of one more than its ideal share.
    busy = batch / speed + min(seconds.values()) / 2
    sums = compute_times(setting).sums(slowest, group.dtype, group.size)
    forward = {visit: sums.forward_s(layers) for visit, layers in stages}
    backward = {
        visit: sums.backward_s(layers, recomputed(group.recompute[visit], layers, setting))
        for visit, layers in stages
    }
    part = busy / (sum(forward.values()) + sum(backward.values()))
    gathers, waits = _collectives(group, stages, setting)
    return _Facts(
        busy,
        {visit: own * part for visit, own in forward.items()},
        {visit: own * part for visit, own in backward.items()},
        forward[stages[-1][0]] * part,
        seconds[slowest] * group.size / len(stages),
        shares,
        gathers,
        waits + host_s(group, stages, setting),
    )


def _collectives(
    group: GroupDraft, stages: Stages, setting: Setting
) -> tuple[tuple[float, float], float]:
    """Seconds of gathers in both phases, and of the collectives that a group must wait for.

    A sum of gradients takes as long as a gather: both are in the group's dtype.
    """
    pace = ring_pace(group.ranks, setting)
    gathers = [gather_s(group.dtype, layers, setting, pace) for _, layers in stages]
    waits = sum(gathers)
    if group.zero_level == 3:
        return (sum(gathers), sum(gathers[:-1])), waits
    return (0.0, 0.0), waits + (sum(gathers) if group.zero_level else 0.0)


def _hop_s(draft: Draft, setting: Setting, above: int, below: int) -> float:
    """One micro-batch from a group to the next one."""
    groups = draft.groups
    path = setting.cluster.path(groups[above].ranks[0], groups[below].ranks[0])
    size = min(groups[above].size, groups[below].size)
    element = DTYPE_BYTES[groups[below].dtype]
    return (
        path.latency_s + size * setting.seq_len * setting.model.hidden * element / path.bytes_per_s
    )
