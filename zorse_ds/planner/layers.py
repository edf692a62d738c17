"""Phase 2, layers: cut the model over the groups by dynamic programming (Zorse §4.2)."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil

import numpy as np
from numpy.typing import NDArray

Seconds = NDArray[np.float64]
"""Prefix sums over the pipeline layers: entry n is about the first n of them."""
Costs = NDArray[np.float64]
"""Entry (m, n): what layers m … n-1 cost a group; infinite where it cannot have them."""

Layers = tuple[tuple[int, ...], ...]
"""How many layers each visit (outer) has at each group (inner)."""

LONGEST = 2.0
"""Times the average that a visit may last."""
SLACK = 1 + 1e-9
"""Costs this close to each other count as equal."""


def cut_layers(costs: Sequence[Costs]) -> tuple[int, ...] | None:
    """Layers of each group in order: the least bottleneck, then the least sum of squares.

    None when no cut is finite; every group gets at least one layer. O(groups · layers²), by numpy.
    """
    bottleneck = _best(costs, np.maximum)[0]
    if not np.isfinite(bottleneck):
        return None
    squares = [np.where(cost <= bottleneck * SLACK, cost**2, np.inf) for cost in costs]
    return _best(squares, np.add)[1]


def by_range(seconds: Seconds, least: int = 1) -> Costs:
    """Costs from prefix sums; a group has at least `least` layers."""
    number = np.arange(len(seconds))
    size = number[None, :] - number[:, None]
    return np.where(size >= least, seconds[None, :] - seconds[:, None], np.inf)


def by_count(seconds: NDArray[np.float64], num_layers: int) -> Costs:
    """Costs from what n layers cost, wherever they are, up to as many as have an entry."""
    every = np.full(num_layers + 1, np.inf)
    every[1 : len(seconds)] = seconds[1:]
    number = np.arange(num_layers + 1)
    size = number[None, :] - number[:, None]
    return np.where(size > 0, every[np.maximum(size, 0)], np.inf)


def _best(costs: Sequence[Costs], join: np.ufunc) -> tuple[float, tuple[int, ...]]:
    """The cheapest way through all groups, costs joined by `join`, and its layer counts."""
    value = np.full(len(costs[0]), np.inf)
    value[0] = 0.0
    choices = []
    for cost in costs:
        whole = join(value[:, None], cost)
        choice = whole.argmin(axis=0)
        choices.append(choice)
        value = whole[choice, np.arange(len(choice))]
    stop = len(value) - 1
    best = float(value[stop])
    counts = []
    for choice in reversed(choices):
        start = int(choice[stop])
        counts.append(stop - start)
        stop = start
    return best, tuple(reversed(counts))


def spread(counts: Sequence[int], visits: int) -> Layers:
    """Layers of each visit (outer) at each group (inner): as even as can be, the more first."""
    return tuple(
        tuple(number // visits + (visit < number % visits) for number in counts)
        for visit in range(visits)
    )


@dataclass(frozen=True, slots=True)
class Pace:
    """What layers cost a group."""

    layer_s: float
    """One more."""
    extra_s: float
    """Beside them in the last visit: the head."""
    most: int
    """It has room for, over all visits."""


def cut_visits(paces: Sequence[Pace], num_layers: int, visits: int) -> Layers | None:
    """Layers of each visit (outer) at each group (inner) with the least time over all visits.

    In a visit all groups work in step, so it lasts as long as its longest stage. The time of a
    visit says how many layers it has, and a knapsack over them finds the times: exact but for
    groups that run out of room. None where there is too little of it.
    """
    times = _times(paces, num_layers, visits)
    usual = _counts(paces, times, visits, last=False)
    closing = _counts(paces, times, visits, last=True)
    chosen = _knapsack(times, usual.sum(axis=1), closing.sum(axis=1), num_layers, visits)
    if chosen is None:
        return None
    rows = [*usual[list(chosen[:-1])].tolist(), closing[chosen[-1]].tolist()]
    return _trimmed(rows, paces, num_layers)


def _times(paces: Sequence[Pace], num_layers: int, visits: int) -> NDArray[np.float64]:
    """Seconds that a visit may last: those of whole layers of some group."""
    speed = sum(1 / pace.layer_s for pace in paces)
    longest = LONGEST * (num_layers / visits / speed + max(pace.layer_s for pace in paces))
    found = {
        number * pace.layer_s + extra
        for pace in paces
        for extra in {0.0, pace.extra_s}
        for number in range(1, min(num_layers, ceil(longest / pace.layer_s)) + 1)
    }
    return np.array(sorted(found))


def _counts(
    paces: Sequence[Pace], times: NDArray[np.float64], visits: int, last: bool
) -> NDArray[np.int64]:
    """For each time (outer) the layers that each group (inner) can run in it."""
    columns = []
    for pace in paces:
        free = np.maximum(times - (pace.extra_s if last else 0.0), 0.0)
        number = np.floor(free / pace.layer_s * SLACK)
        columns.append(np.minimum(number, ceil(pace.most / visits)).astype(np.int64))
    return np.stack(columns, axis=1)


def _knapsack(
    times: NDArray[np.float64],
    usual: NDArray[np.int64],
    closing: NDArray[np.int64],
    num_layers: int,
    visits: int,
) -> tuple[int, ...] | None:
    """Which times the visits last so that they have all layers in the least time; long ones first.

    Entry n of the values is the least time so far of visits with n layers or more.
    """
    value = np.full(num_layers + 1, np.inf)
    value[0] = 0.0
    choices = []
    for visit in range(visits):
        counts = closing if visit == visits - 1 else usual
        before = np.maximum(np.arange(num_layers + 1)[None, :] - counts[:, None], 0)
        whole = np.where(counts[:, None] > 0, value[before] + times[:, None], np.inf)
        choice = whole.argmin(axis=0)
        choices.append((choice, counts))
        value = whole[choice, np.arange(num_layers + 1)]
    if not np.isfinite(value[num_layers]):
        return None
    left, chosen = num_layers, []
    for choice, counts in reversed(choices):
        chosen.append(int(choice[left]))
        left = max(0, left - int(counts[chosen[-1]]))
    last, *others = chosen
    return (*sorted(others, reverse=True), last)


def _trimmed(rows: list[list[int]], paces: Sequence[Pace], num_layers: int) -> Layers:
    """One layer after the other out of the longest stage, until there are as many as there are."""
    for _ in range(sum(map(sum, rows)) - num_layers):
        totals = [sum(column) for column in zip(*rows, strict=True)]
        places = [(v, g) for v, row in enumerate(rows) for g in range(len(row)) if row[g]]
        visit, group = max(
            ((v, g) for v, g in places if totals[g] > 1),
            key=lambda at: (rows[at[0]][at[1]] * paces[at[1]].layer_s, -at[0], -at[1]),
        )
        rows[visit][group] -= 1
    return tuple(tuple(row) for row in rows)
