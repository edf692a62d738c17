"""Phase 1: ways to divide a cluster's GPUs into groups (Zorse §4, widened).

The paper cuts the bandwidth graph again and again by its minimum cut. Groups of one type and groups
of several win about as often, so both are offered for every number of groups; what is best is left
to the scores.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

from zorse_ds.core.cluster import Cluster
from zorse_ds.planner.graph import cut_tree
from zorse_ds.planner.units import Signature, Unit, joined, looks_of, signature_of
from zorse_ds.ranges import apportion, consecutive

Groups = tuple[tuple[Unit, ...], ...]
"""Units of each group, sorted; the groups in no order that means something."""

Rate = Callable[[str], float]
"""Samples a second that a GPU type runs through one block."""

NUMBERS = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16, 20, 24, 28, 32)
"""Of groups; beyond a few, the next one makes no great difference."""
EXHAUSTIVE_GPUS = 6
"""Up to so many GPUs every division is offered."""


@dataclass(frozen=True, slots=True)
class Grouping:
    """A division of the GPUs, and the idea it comes from."""

    origin: str
    groups: Groups


def groupings(
    cluster: Cluster, units: Sequence[Unit], rate: Rate, most_groups: int
) -> tuple[Grouping, ...]:
    """Different divisions into 1 … `most_groups` groups, the first origin of each kept."""
    looks = looks_of(cluster)
    found: dict[Signature, Grouping] = {}
    for grouping in _offers(cluster, units, rate, most_groups):
        found.setdefault(signature_of(grouping.groups, looks), grouping)
    return tuple(found.values())


def _offers(
    cluster: Cluster, units: Sequence[Unit], rate: Rate, most_groups: int
) -> Iterator[Grouping]:
    def weight(unit: Unit) -> float:
        return len(unit.ranks) * rate(unit.gpu_type)

    if sum(len(unit.ranks) for unit in units) <= EXHAUSTIVE_GPUS:
        yield from (
            Grouping("every division", groups)
            for groups in _divisions(units)
            if len(groups) <= most_groups
        )
        return
    by_place = sorted(units, key=lambda unit: (_region(cluster, unit), unit))
    by_type = sorted(
        units, key=lambda unit: (-rate(unit.gpu_type), unit.gpu_type, _region(cluster, unit), unit)
    )
    for number, groups in enumerate(cut_tree(cluster, units, most_groups), start=1):
        if number in NUMBERS:
            yield Grouping(f"minimum cut into {number}", normal(groups))
    for number in (number for number in NUMBERS if number <= most_groups):
        yield Grouping("even runs of neighbours", normal(even_runs(by_place, weight, number)))
        yield Grouping("even runs by speed", normal(even_runs(by_type, weight, number)))
        for key, origin in (
            (_type_key, "one type a group"),
            (_pod_key(cluster), "one type and region a group"),
        ):
            pure = _pure(by_type, key, weight, number)
            if pure is not None:
                yield Grouping(origin, normal(pure))
        yield Grouping("a share of each type", normal(_striped(by_type, number)))
    yield from _by_region(cluster, by_type, most_groups)


def normal(groups: Sequence[Sequence[Unit]]) -> Groups:
    """Groups in their normal form: units joined and sorted, empty groups left out."""
    return tuple(sorted(joined(tuple(group)) for group in groups if group))


def even_runs(
    units: Sequence[Unit], weight: Callable[[Unit], float], number: int
) -> list[list[Unit]]:
    """Cut a row of units into `number` runs of about equal weight; a unit may be halved."""
    row = list(units)
    while len(row) < number:
        widest = max(range(len(row)), key=lambda i: (len(row[i].ranks), -i))
        if len(row[widest].ranks) == 1:
            break
        row[widest : widest + 1] = row[widest].halves
    number = min(number, len(row))
    runs: list[list[Unit]] = [[] for _ in range(number)]
    whole, seen, current = sum(map(weight, row)), 0.0, 0
    for i, unit in enumerate(row):
        middle = (seen + weight(unit) / 2) / whole * number
        at_least = number - (len(row) - i)
        wanted = max(min(int(middle), number - 1), at_least, current)
        current = min(wanted, current + 1) if runs[current] else current
        runs[current].append(unit)
        seen += weight(unit)
    return runs


def _pure(
    units: Sequence[Unit],
    key: Callable[[Unit], tuple[str, ...]],
    weight: Callable[[Unit], float],
    number: int,
) -> list[list[Unit]] | None:
    """Groups whose units have one key; as many of each as its share of the speed asks for."""
    ordered = sorted(units, key=key)
    pools = [list(own) for _, own in groupby(ordered, key)]
    if number < len(pools):
        return None
    shares = [sum(map(weight, pool)) for pool in pools]
    extra = apportion(number - len(pools), shares)
    runs = [even_runs(pool, weight, 1 + more) for pool, more in zip(pools, extra, strict=True)]
    return [run for pool_runs in runs for run in pool_runs]


def _striped(units: Sequence[Unit], number: int) -> list[list[Unit]]:
    """Each group gets an equal share of every type."""
    groups: list[list[Unit]] = [[] for _ in range(number)]
    for _, own in groupby(units, lambda unit: unit.gpu_type):
        pool = list(own)
        ranks = [(unit.node, unit.gpu_type, rank) for unit in pool for rank in unit.ranks]
        for group, span in zip(
            groups, consecutive(apportion(len(ranks), [1] * number)), strict=True
        ):
            group += [Unit(node, name, (rank,)) for node, name, rank in ranks[span.as_slice()]]
    return groups


def _by_region(cluster: Cluster, units: Sequence[Unit], most_groups: int) -> Iterator[Grouping]:
    """Groups that stay within a region and have a share of each of its types."""
    regions = sorted({_region(cluster, unit) for unit in units})
    pools = [[unit for unit in units if _region(cluster, unit) == region] for region in regions]
    for number in range(1, most_groups // len(pools) + 1 if len(pools) > 1 else 1):
        striped = [group for pool in pools for group in _striped(pool, number)]
        yield Grouping("a share of each type of a region", normal(striped))


def _type_key(unit: Unit) -> tuple[str, ...]:
    return (unit.gpu_type,)


def _pod_key(cluster: Cluster) -> Callable[[Unit], tuple[str, ...]]:
    return lambda unit: (unit.gpu_type, _region(cluster, unit))


def _region(cluster: Cluster, unit: Unit) -> str:
    return cluster.nodes[unit.node].region or ""


def _divisions(units: Sequence[Unit]) -> Iterator[Groups]:
    """Every division of single GPUs."""
    singles = [Unit(unit.node, unit.gpu_type, (rank,)) for unit in units for rank in unit.ranks]

    def grow(done: list[list[Unit]], rest: list[Unit]) -> Iterator[Groups]:
        if not rest:
            yield normal(done)
            return
        first, *others = rest
        for i in range(len(done)):
            yield from grow([*done[:i], [*done[i], first], *done[i + 1 :]], others)
        yield from grow([*done, [first]], others)

    yield from grow([], singles)
