"""Phase 2, memory: the cheapest settings with which every rank of a draft has room.

Each group climbs a ladder of its own: shards by free memory cost nothing, recompute costs forward
passes, gathered parameters cost traffic, host memory costs the most.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import ceil

from zorse_ds.core.layout import lay_out
from zorse_ds.core.plan import Plan
from zorse_ds.cost.memory import RankMemory, group_memory, memory_of
from zorse_ds.cost.setting import Setting
from zorse_ds.cost.state import StateBytes, params_of, state_bytes
from zorse_ds.planner.draft import Draft, part_of, plan_of, sample_seconds
from zorse_ds.planner.settings import rungs
from zorse_ds.schedule.compile import limits_of
from zorse_ds.schedule.inflight import InFlightLimits

ROUNDING = 1e-6
SPARE_SHARE = 0.01
"""Of a GPU's memory is left free when shards are cut by what is free."""


@dataclass(frozen=True, slots=True)
class Fit:
    """A draft with settings, and what its ranks need with them."""

    draft: Draft
    memory: Mapping[int, RankMemory]

    @property
    def overflow_bytes(self) -> int:
        """The most that a rank lacks; 0 when the draft fits."""
        return max(own.overflow_bytes for own in self.memory.values())


def fitted(draft: Draft, setting: Setting, batch: int, limits: InFlightLimits | None = None) -> Fit:
    """The draft with the first rung of each group's ladder that fits, or else the nearest one.

    In-flight limits are the likely ones where none are given.
    """
    memory: dict[int, RankMemory] = {}
    if limits is None:
        limits = likely_limits(draft, setting, batch)
    for index in range(len(draft.groups)):
        tries: list[Fit] = []
        for rung in rungs(draft, index, setting, batch):
            tries.append(_weighted(draft.with_group(index, rung), index, setting, batch, limits))
            if not tries[-1].overflow_bytes:
                break
        nearest = min(tries, key=lambda fit: fit.overflow_bytes)
        draft = nearest.draft
        memory |= nearest.memory
    return Fit(draft, memory)


def with_weights(draft: Draft, setting: Setting, batch: int) -> Fit:
    """The draft as it is, but for shards cut by free memory where equal ones do not fit."""
    memory: dict[int, RankMemory] = {}
    limits = likely_limits(draft, setting, batch)
    for index in range(len(draft.groups)):
        fit = _weighted(draft, index, setting, batch, limits)
        draft = fit.draft
        memory |= fit.memory
    return Fit(draft, memory)


def likely_limits(draft: Draft, setting: Setting, batch: int) -> InFlightLimits:
    """About how many micro-batches wait where stages turn around.

    A group runs one micro-batch on each rank at once, its span; in flight at a stage are the spans
    of it and of all below, and one more of the widest where they differ. With equal spans that is
    the textbook's number.
    """
    hosts = [group for _, group, _ in draft.cuts]
    spans = [group.size * len(group.ranks) for group in draft.groups]
    limits: InFlightLimits = {}
    seen: set[int] = set()
    below = 0
    for stage in reversed(range(len(hosts))):
        index = hosts[stage]
        if index in seen:
            break
        seen.add(index)
        below += spans[index]
        own = [spans[each] for each in seen]
        held = below + (max(own) if min(own) != max(own) else 0)
        group = draft.groups[index]
        speeds = [1 / seconds for seconds in sample_seconds(draft, index, setting)]
        whole = sum(speeds) * group.size
        for rank, speed in zip(group.ranks, speeds, strict=True):
            limits[rank, stage] = ceil(min(held, batch) * speed / whole - ROUNDING)
    return limits


def _weighted(
    draft: Draft, index: int, setting: Setting, batch: int, limits: InFlightLimits
) -> Fit:
    """One group of a draft, its shards cut by free memory where equal ones do not fit."""
    plan = part_of(draft, index, setting, batch)
    fit = Fit(draft, group_memory(plan, plan.groups[0], setting, limits))
    weights = _weights(fit, index, setting) if fit.overflow_bytes else None
    if weights is None:
        return fit
    group = replace(draft.groups[index], shard_weights=weights)
    changed = draft.with_group(index, group)
    plan = part_of(changed, index, setting, batch)
    return Fit(changed, group_memory(plan, plan.groups[0], setting, limits))


def _weights(fit: Fit, index: int, setting: Setting) -> tuple[float, ...] | None:
    """Shards cut by free memory; None where there is nothing to cut or not enough room."""
    group = fit.draft.groups[index]
    if len(group.ranks) == 1 or not group.zero_level or group.shard_weights is not None:
        return None
    sharded = sharded_bytes(fit.draft, index, setting)
    share = sharded / len(group.ranks)
    memory = [fit.memory[rank] for rank in group.ranks]
    free = [(1 - SPARE_SHARE) * own.usable_bytes - own.total_bytes + share for own in memory]
    return level_shares([max(0.0, each) / sharded for each in free])


def sharded_bytes(draft: Draft, index: int, setting: Setting) -> float:
    """Device bytes of a group's state that are cut into shards, over all its ranks."""
    group = draft.groups[index]

    def held(share: float) -> float:
        whole = StateBytes(0.0, 0.0, 0.0, 0.0, 0.0, 0.0)
        for _, layers in draft.stages_of(index):
            whole += state_bytes(
                params_of(setting.model, layers),
                group.zero_level,
                share,
                group.dtype,
                group.offload,
                setting.optimizer_bytes,
            )
        return whole.parameters + whole.optimizer + whole.reduced_gradients

    return max(held(1.0) - held(0.0), 1.0)


def level_shares(caps: list[float]) -> tuple[float, ...] | None:
    """Shares that sum to 1, none above its cap, as equal as can be; None if caps are too small."""
    if sum(caps) < 1.0:
        return None
    rest, left = 1.0, len(caps)
    shares = [0.0] * len(caps)
    for i in sorted(range(len(caps)), key=caps.__getitem__):
        shares[i] = min(caps[i], rest / left)
        rest -= shares[i]
        left -= 1
    return tuple(round(share, 6) for share in shares)


def exactly_fitted(
    draft: Draft, setting: Setting, batch: int, *, keeps_settings: bool = False
) -> tuple[Draft, Plan] | None:
    """The draft and its plan, with settings that fit by the plan's exact in-flight limits.

    Settings are chosen anew for them, unless the draft keeps its own. None when nothing fits.
    """
    plan = plan_of(draft, setting, batch)
    if not keeps_settings:
        draft = fitted(draft, setting, batch, limits_of(plan, lay_out(plan))).draft
        plan = plan_of(draft, setting, batch)
    fits = all(own.fits for own in memory_of(plan, setting).values())
    return (draft, plan) if fits else None
