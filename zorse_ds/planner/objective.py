"""The least time, or the least price of a token: for the latter nodes may be left out."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Literal

from zorse_ds.cost.setting import Setting
from zorse_ds.errors import ClusterError, PlannerError
from zorse_ds.planner.effort import USUAL, Effort, Progress, silent
from zorse_ds.planner.search import Found, search

Objective = Literal["time", "cost"]
MOST_KINDS = 4
"""Kinds of nodes of which every selection is tried; with more, one kind at a time is left out."""


@dataclass(frozen=True)
class Choice:
    """What was found, and for which part of the cluster."""

    found: Found
    setting: Setting
    left_out: tuple[str, ...] = ()
    """Names of the nodes that are not used."""


def choose(
    setting: Setting,
    batch: int,
    objective: Objective = "time",
    effort: Effort = USUAL,
    progress: Progress = silent,
) -> Choice:
    """The best plan by the objective.

    `"time"` uses all nodes. `"cost"` also tries without nodes of some types, and raises
    `ClusterError` unless each node has a price. Raises `PlannerError` when nothing fits.
    """
    if objective == "time":
        return Choice(search(setting, batch, effort, progress), setting)
    unpriced = [i for i, node in enumerate(setting.cluster.nodes) if node.price_per_hour is None]
    if unpriced:
        raise ClusterError(
            f"nodes[{unpriced[0]}].price_per_hour is missing; expected a price for every node, as "
            "the objective is cost"
        )
    choices = list(_priced(setting, batch, effort, progress))
    if not choices:
        raise PlannerError(
            "no plan fits any selection of the cluster's nodes; expected more memory or a smaller "
            "model (the objective time says what is missing)"
        )
    return min(choices, key=_price)


def _price(choice: Choice) -> float:
    """Of a step."""
    return choice.found.best.step_s * (choice.setting.cluster.price_per_hour or 0.0)


def _priced(setting: Setting, batch: int, effort: Effort, progress: Progress) -> Iterator[Choice]:
    for left_out in _selections(setting):
        cluster = setting.cluster.without(left_out) if left_out else setting.cluster
        part = replace(setting, cluster=cluster)
        names = tuple(setting.cluster.node_name(node) for node in left_out)
        try:
            yield Choice(search(part, batch, effort, progress), part, names)
        except PlannerError:
            # Too small a part of the cluster; another one may do.
            continue


def _selections(setting: Setting) -> Iterator[tuple[int, ...]]:
    """Nodes to leave out, all of a kind together; first none."""
    kinds: dict[tuple[str, ...], list[int]] = {}
    for index, node in enumerate(setting.cluster.nodes):
        kinds.setdefault(tuple(sorted(set(node.types))), []).append(index)
    most = len(kinds) - 1 if len(kinds) <= MOST_KINDS else 1
    for number in range(most + 1):
        for gone in combinations(kinds.values(), number):
            yield tuple(index for own in gone for index in own)
