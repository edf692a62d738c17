"""Local search: drafts one decision away from a draft."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import pairwise

from zorse_ds.core.plan import Dtype
from zorse_ds.cost.setting import Setting
from zorse_ds.planner.draft import Draft, GroupDraft
from zorse_ds.planner.layers import Costs, by_range, cut_layers, spread
from zorse_ds.planner.options import VISITS, group_dtype, group_seconds
from zorse_ds.planner.settings import AHEADS, SIZES, rungs
from zorse_ds.planner.units import Unit, joined

NEAR = 4
"""Places in the pipeline over which GPUs are handed on and groups change places."""


def neighbours(draft: Draft, setting: Setting) -> Iterator[Draft]:
    """Layers, micro-batch sizes, visits, the order of groups, who is in which, and how many."""
    yield from _moved_layers(draft)
    yield from _resized(draft)
    yield from _revisited(draft, setting)
    yield from (replace(draft, ahead=ahead) for ahead in AHEADS if ahead != draft.ahead)
    yield from _reordered(draft, setting)
    yield from _regrouped(draft, setting)
    yield from _merged(draft, setting)
    yield from _split(draft, setting)


def resettled(draft: Draft, setting: Setting, batch: int) -> Iterator[Draft]:
    """One group does something else for memory, with the layers as they are and cut anew."""
    for index in range(len(draft.groups)):
        for rung in rungs(draft, index, setting, batch):
            changed = draft.with_group(index, rung)
            yield changed
            again = recut(changed, setting)
            if again is not None and again.layers != draft.layers:
                yield again


def recut(draft: Draft, setting: Setting, visits: int | None = None) -> Draft | None:
    """The draft with its layers cut anew for the speeds of its groups; None if that cannot be."""
    visits = visits or draft.num_visits
    counts = cut_layers(
        [
            _costs(
                group.units,
                group.dtype,
                group.size,
                setting,
                sum(group.recompute) / len(group.recompute),
            )
            for group in draft.groups
        ]
    )
    if counts is None or min(counts) < visits:
        return None
    groups = tuple(_with_visits(group, visits) for group in draft.groups)
    schedule = draft.schedule if visits == draft.num_visits else "ministage"
    layers = spread(counts, visits)
    return Draft("1f1b" if visits == 1 else schedule, groups, layers, draft.ahead)


@lru_cache(maxsize=2048)
def _costs(
    units: tuple[Unit, ...], dtype: Dtype, size: int, setting: Setting, again: float
) -> Costs:
    return by_range(group_seconds(units, dtype, size, setting, again))


def _with_visits(group: GroupDraft, visits: int) -> GroupDraft:
    if len(group.recompute) == visits:
        return group
    return replace(group, recompute=(group.recompute[0],) * visits)


def _moved_layers(draft: Draft) -> Iterator[Draft]:
    """One layer from a stage to another one, within a visit or between visits of a group."""
    places = [(v, g) for v in range(draft.num_visits) for g in range(len(draft.groups))]
    for source in places:
        if draft.layers[source[0]][source[1]] <= (1 if draft.schedule == "1f1b" else 0):
            continue
        for target in places:
            if source != target and (source[0] == target[0] or source[1] == target[1]):
                layers = _shifted(draft.layers, source, target)
                if all(sum(own) for own in zip(*layers, strict=True)):
                    yield replace(draft, layers=layers)


def _shifted(
    layers: tuple[tuple[int, ...], ...], source: tuple[int, int], target: tuple[int, int]
) -> tuple[tuple[int, ...], ...]:
    new = [list(own) for own in layers]
    new[source[0]][source[1]] -= 1
    new[target[0]][target[1]] += 1
    return tuple(tuple(own) for own in new)


def _resized(draft: Draft) -> Iterator[Draft]:
    """Micro-batches of one group, or of all, a step larger or smaller."""
    for step in (1, -1):
        whole: Draft | None = draft
        for index, group in enumerate(draft.groups):
            size = _next_size(group.size, step)
            if size is None:
                whole = None
                continue
            changed = replace(group, size=size)
            yield draft.with_group(index, changed)
            whole = whole and whole.with_group(index, changed)
        if whole is not None and len(draft.groups) > 1:
            yield whole


def _next_size(size: int, step: int) -> int | None:
    if step > 0:
        return min((each for each in SIZES if each > size), default=None)
    return max((each for each in SIZES if each < size), default=None)


def _revisited(draft: Draft, setting: Setting) -> Iterator[Draft]:
    for visits in VISITS:
        if visits != draft.num_visits:
            found = recut(draft, setting, visits)
            if found is not None:
                yield found


def _reordered(draft: Draft, setting: Setting) -> Iterator[Draft]:
    """All groups the other way round; then two of them change places, neighbours first."""
    number = len(draft.groups)
    if number > 1:
        turned = recut(replace(draft, groups=draft.groups[::-1]), setting)
        if turned is not None:
            yield turned
    for distance in range(1, min(number, NEAR + 1)):
        for first in range(number - distance):
            groups = list(draft.groups)
            other = first + distance
            groups[first], groups[other] = groups[other], groups[first]
            found = recut(replace(draft, groups=tuple(groups)), setting)
            if found is not None:
                yield found


def _regrouped(draft: Draft, setting: Setting) -> Iterator[Draft]:
    """A unit, half of it or one GPU of it goes to another group; layers are cut anew."""
    for source, group in enumerate(draft.groups):
        for unit in group.units:
            for part in _parts(unit):
                rest = _without(group.units, part)
                if not rest:
                    continue
                for target in range(len(draft.groups)):
                    if 0 < abs(target - source) <= NEAR:
                        found = _handed(draft, source, rest, target, part, setting)
                        if found is not None:
                            yield found


def _merged(draft: Draft, setting: Setting) -> Iterator[Draft]:
    """Two groups that follow each other become one."""
    for first, (one, other) in enumerate(pairwise(draft.groups)):
        units = joined((*one.units, *other.units))
        whole = replace(one, units=units, dtype=group_dtype(units, setting), shard_weights=None)
        groups = (*draft.groups[:first], whole, *draft.groups[first + 2 :])
        found = recut(replace(draft, groups=groups), setting)
        if found is not None:
            yield found


def _split(draft: Draft, setting: Setting) -> Iterator[Draft]:
    """A group becomes two of half the width that follow each other."""
    for index, group in enumerate(draft.groups):
        if len(group.ranks) < 2:
            continue
        halves = [
            replace(group, units=units, dtype=group_dtype(units, setting), shard_weights=None)
            for units in _halved(group.units)
        ]
        groups = (*draft.groups[:index], *halves, *draft.groups[index + 1 :])
        found = recut(replace(draft, groups=groups), setting)
        if found is not None:
            yield found


def _halved(units: Sequence[Unit]) -> tuple[tuple[Unit, ...], tuple[Unit, ...]]:
    """Two parts of about as many GPUs; only one unit is cut."""
    singles = [Unit(unit.node, unit.gpu_type, (rank,)) for unit in units for rank in unit.ranks]
    half = (len(singles) + 1) // 2
    return joined(tuple(singles[:half])), joined(tuple(singles[half:]))


def _parts(unit: Unit) -> list[Unit]:
    """The whole unit, its second half, its last GPU; without repeats."""
    parts = [unit]
    if len(unit.ranks) > 1:
        parts += [unit.halves[1], Unit(unit.node, unit.gpu_type, unit.ranks[-1:])]
    return list(dict.fromkeys(parts))


def _without(units: Sequence[Unit], part: Unit) -> tuple[Unit, ...]:
    left = []
    for unit in units:
        ranks = tuple(rank for rank in unit.ranks if rank not in part.ranks)
        if ranks:
            left.append(Unit(unit.node, unit.gpu_type, ranks))
    return tuple(left)


def _handed(
    draft: Draft,
    source: int,
    rest: tuple[Unit, ...],
    target: int,
    part: Unit,
    setting: Setting,
) -> Draft | None:
    taken = joined((*draft.groups[target].units, part))
    groups = list(draft.groups)
    for index, units in ((source, rest), (target, taken)):
        groups[index] = replace(
            groups[index],
            units=units,
            dtype=group_dtype(units, setting),
            shard_weights=None,
        )
    return recut(replace(draft, groups=tuple(groups)), setting)
