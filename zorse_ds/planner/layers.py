"""Phase 2, layers: cut the model over the groups by dynamic programming (Zorse §4.2)."""

from collections.abc import Sequence
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

Seconds = NDArray[np.float64]
"""Prefix sums over the pipeline layers: entry n is about the first n of them."""

SLACK = 1 + 1e-9
"""Costs this close to each other count as equal."""


def cut_layers(seconds: Sequence[Seconds], most: Sequence[int]) -> tuple[int, ...] | None:
    """Layers of each group in order: the least bottleneck, then the least sum of squares.

    `seconds`: for each group the prefix sums over the layers of what they cost it. `most`: how many
    layers fit a group. None when the caps leave no cut; every group gets at least one layer.
    O(groups · layers²), by numpy.
    """
    costs = [_costs(own, cap) for own, cap in zip(seconds, most, strict=True)]
    bottleneck = _best(costs, np.maximum)[0]
    if not np.isfinite(bottleneck):
        return None
    squares = [np.where(cost <= bottleneck * SLACK, cost**2, np.inf) for cost in costs]
    return _best(squares, np.add)[1]


def _costs(seconds: Seconds, cap: int) -> Seconds:
    """Entry (m, n): what layers m … n-1 cost; infinite where there are none or too many."""
    number = np.arange(len(seconds))
    size = number[None, :] - number[:, None]
    return np.where((size > 0) & (size <= cap), seconds[None, :] - seconds[:, None], np.inf)


def _best(costs: Sequence[Seconds], join: np.ufunc) -> tuple[float, tuple[int, ...]]:
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


def bottleneck(seconds: Sequence[Seconds], counts: Sequence[int]) -> float:
    """What the slowest group's layers cost it."""
    stops = accumulate(counts)
    return max(
        float(own[stop] - own[stop - count])
        for own, stop, count in zip(seconds, stops, counts, strict=True)
    )


def spread(counts: Sequence[int], visits: int) -> tuple[tuple[int, ...], ...]:
    """Layers of each visit (outer) at each group (inner): as even as can be, the more first."""
    return tuple(
        tuple(number // visits + (visit < number % visits) for number in counts)
        for visit in range(visits)
    )
