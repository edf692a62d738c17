"""Phase 2, memory: settings with which every rank of a draft has room, by the memory model."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from math import ceil

from zorse_ds.core.layout import Layout, lay_out
from zorse_ds.core.plan import Plan
from zorse_ds.cost.memory import RankMemory, group_memory, memory_of
from zorse_ds.cost.setting import Setting
from zorse_ds.cost.state import StateBytes, params_of, state_bytes
from zorse_ds.planner.draft import ROUNDING, Draft, GroupDraft, part_of, plan_of, sample_seconds
from zorse_ds.planner.offers import offers_of
from zorse_ds.planner.seats import held_samples, seats_of
from zorse_ds.planner.settings import SPARE_SHARE, levels_of, offloads_of
from zorse_ds.schedule.compile import limits_of
from zorse_ds.schedule.inflight import InFlightLimits

NEARLY = 0.95
"""What the closed form of memory may be off by."""
TRIES = 6
"""Settings of a group that are tried before the smallest."""


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
    """The draft with the best settings of each group that fit, or else the nearest ones.

    Micro-batch sizes stay. In-flight limits are the likely ones where none are given.
    """
    memory: dict[int, RankMemory] = {}
    if limits is None:
        limits = likely_limits(draft, setting, batch)
    for index in range(len(draft.groups)):
        tries: list[Fit] = []
        for group in _likely_settings(draft, index, setting, batch):
            tries.append(_weighted(draft.with_group(index, group), index, setting, batch, limits))
            if not tries[-1].overflow_bytes:
                break
        nearest = min(tries, key=lambda fit: fit.overflow_bytes)
        draft = nearest.draft
        memory |= nearest.memory
    return Fit(draft, memory)


def _likely_settings(
    draft: Draft, index: int, setting: Setting, batch: int
) -> Iterator[GroupDraft]:
    """Settings that fit by the closed form or nearly so, the best first; at last the smallest."""
    group = draft.groups[index]
    seats = seats_of([each.units for each in draft.groups], setting, batch, draft.num_visits)
    spans = [each.size * len(each.ranks) for each in draft.groups]
    seat = seats[index].holding(held_samples(spans, batch, draft.ahead)[index]).tighter(NEARLY)
    count = sum(layers.size for _, layers in draft.stages_of(index))
    options = [o for o in offers_of(seat, setting, count).ranked(count) if o.size == group.size]
    for option in options[:TRIES]:
        yield option.group(group.units, seat)
    smallest = (1.0,) * draft.num_visits
    level = levels_of(len(group.ranks), draft.num_visits)[-1]
    yield replace(
        group,
        recompute=smallest,
        zero_level=level,
        offload=offloads_of(setting)[-1],
        shard_weights=None,
    )


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

    Of the samples that a group holds there each rank has its share; see `held_samples`.
    """
    hosts = [group for _, group, _ in draft.cuts]
    tail = _tail(hosts)
    spans = [draft.groups[index].size * len(draft.groups[index].ranks) for index in tail]
    limits: InFlightLimits = {}
    for place, held in enumerate(held_samples(spans, batch, draft.ahead)):
        index, stage = tail[place], len(hosts) - len(tail) + place
        group = draft.groups[index]
        speeds = [1 / seconds for seconds in sample_seconds(draft, index, setting)]
        whole = sum(speeds) * group.size
        for rank, speed in zip(group.ranks, speeds, strict=True):
            limits[rank, stage] = ceil(held * speed / whole - ROUNDING)
    return limits


def _tail(hosts: list[int]) -> list[int]:
    """Groups of the stages that turn around: the last ones, each group once."""
    start = len(hosts)
    while start and hosts[start - 1] not in hosts[start:]:
        start -= 1
    return hosts[start:]


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


@dataclass(frozen=True)
class Sure:
    """A draft that fits by the exact in-flight limits of its plan."""

    draft: Draft
    plan: Plan
    layout: Layout
    limits: InFlightLimits


def exactly_fitted(
    draft: Draft, setting: Setting, batch: int, *, keeps_settings: bool = False
) -> Sure | None:
    """The draft as it is or, if it does not fit, with settings that do; None when none does.

    Settings stay at all events if the draft `keeps_settings`.
    """
    sure = _sure(draft, setting, batch)
    if sure is None and not keeps_settings:
        plan = plan_of(draft, setting, batch)
        limits = limits_of(plan, lay_out(plan))
        sure = _sure(fitted(draft, setting, batch, limits).draft, setting, batch)
    return sure


def _sure(draft: Draft, setting: Setting, batch: int) -> Sure | None:
    plan = plan_of(draft, setting, batch)
    layout = lay_out(plan)
    limits = limits_of(plan, layout)
    fits = all(own.fits for own in memory_of(plan, setting, limits).values())
    return Sure(draft, plan, layout, limits) if fits else None
