"""A quick cost for a draft: what the simulator would say, to some per cent, without a trace.

It misranks drafts that are close, so the best are simulated (design §2.6); its place is to throw
away the hopeless ones.
"""

from dataclasses import dataclass
from itertools import pairwise

from zorse_ds.cost.compute import compute_times
from zorse_ds.cost.dtypes import DTYPE_BYTES
from zorse_ds.cost.setting import Setting
from zorse_ds.planner.draft import Draft, sample_seconds
from zorse_ds.planner.settings import host_s
from zorse_ds.planner.traffic import Loads, Shares, boundary_loads, gather_s, reduce_s, ring_pace


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
    forward_s: float
    """Part of `busy_s`."""
    first_s: float
    """One micro-batch forward and backward through the stage that a visit has, slowest type."""
    shares: Shares
    """The part of the batch that each node runs."""


def score(draft: Draft, setting: Setting, batch: int) -> Score:
    """The cost of a step of `batch` samples."""
    facts = [_facts(draft, i, setting, batch) for i in range(len(draft.groups))]
    loads = boundary_loads(draft, setting, [each.shares for each in facts], batch)
    reduce = [
        _collectives(draft, i, setting, loads) + host_s(draft, i, group, setting, batch)
        for i, group in enumerate(draft.groups)
    ]
    slowest = max(range(len(facts)), key=lambda i: facts[i].busy_s + reduce[i])
    busy = facts[slowest].busy_s
    if draft.schedule == "1f1b":
        beyond = max(0.0, loads.whole_s - busy)
    else:
        forward = max(each.forward_s for each in facts)
        backward = max(each.busy_s - each.forward_s for each in facts)
        beyond = max(0.0, loads.forward_s - forward) + max(0.0, loads.backward_s - backward)
    fill = sum(each.first_s for i, each in enumerate(facts) if i != slowest)
    fill += 2 * sum(_hop_s(draft, setting, a, b) for a, b in pairwise(range(len(facts))))
    return Score(busy, beyond, fill, reduce[slowest])


def _facts(draft: Draft, index: int, setting: Setting, batch: int) -> _Facts:
    group = draft.groups[index]
    seconds = dict(zip(group.gpu_types, sample_seconds(draft, index, setting), strict=True))
    speed = sum(len(unit.ranks) / seconds[unit.gpu_type] for unit in group.units)
    shares: dict[int, float] = {}
    for unit in group.units:
        part = len(unit.ranks) / seconds[unit.gpu_type] / speed
        shares[unit.node] = shares.get(unit.node, 0.0) + part
    slowest = max(seconds, key=lambda name: seconds[name])
    sums = compute_times(setting).sums(slowest, group.dtype, group.size)
    stages = draft.stages_of(index)
    forward = sum(sums.forward_s(layers) for _, layers in stages)
    # A rank runs whole samples: on average half of one more than its ideal share.
    busy = batch / speed + min(seconds.values()) / 2
    per_sample = seconds[slowest]
    return _Facts(
        busy,
        busy * (forward / group.size) / per_sample,
        per_sample * group.size / max(1, len(stages)),
        shares,
    )


def _collectives(draft: Draft, index: int, setting: Setting, loads: Loads) -> float:
    """Seconds of reductions a group must wait for; gathers overlap and go onto the lanes."""
    group = draft.groups[index]
    pace = ring_pace(group.ranks, setting)
    waits = 0.0
    stages = draft.stages_of(index)
    for position, (_, layers) in enumerate(stages):
        gather = gather_s(draft, index, layers, setting, pace)
        reduce = reduce_s(layers, setting, pace)
        last = position == len(stages) - 1
        if group.zero_level == 3:
            loads.forward["gather", index] += gather
            loads.backward["gather", index] += 0.0 if last else gather
        waits += reduce + (gather if group.zero_level in (1, 2) else 0.0)
    return waits


def _hop_s(draft: Draft, setting: Setting, above: int, below: int) -> float:
    """One micro-batch from a group to the next one."""
    groups = draft.groups
    path = setting.cluster.path(groups[above].ranks[0], groups[below].ranks[0])
    size = min(groups[above].size, groups[below].size)
    element = DTYPE_BYTES[groups[below].dtype]
    return (
        path.latency_s + size * setting.seq_len * setting.model.hidden * element / path.bytes_per_s
    )
