"""The bandwidth graph of a cluster and its minimum cuts (Zorse §4.1)."""

from collections.abc import Iterator, Sequence

import rustworkx as rx

from zorse_ds.core.cluster import Cluster
from zorse_ds.planner.units import Unit


def bandwidth(cluster: Cluster, a: Unit, b: Unit) -> float:
    """Bytes a second that two units can exchange, all their GPUs at once."""
    if a.node == b.node:
        return cluster.path(a.ranks[0], b.ranks[0]).bytes_per_s * min(len(a.ranks), len(b.ranks))
    return cluster.path(a.ranks[0], b.ranks[0]).bytes_per_s


def cut_tree(
    cluster: Cluster, units: Sequence[Unit], most_groups: int
) -> Iterator[tuple[tuple[Unit, ...], ...]]:
    """Divisions into 1, 2, … `most_groups` groups: the loosest group is cut in two each time.

    Loosest: the group whose minimum cut is the smallest part of the bandwidth it holds, so that a
    lone node is not split off as long as two rooms can be told apart.
    """
    groups: list[tuple[Unit, ...]] = [tuple(units)]
    cuts = {groups[0]: _cut(cluster, groups[0])}
    yield tuple(groups)
    while len(groups) < min(most_groups, len(units)):
        loosest = min(
            (group for group in groups if len(group) > 1), key=lambda group: (cuts[group][0], group)
        )
        groups.remove(loosest)
        for part in cuts[loosest][1]:
            groups.append(part)
            cuts[part] = _cut(cluster, part)
        yield tuple(groups)


def _cut(cluster: Cluster, units: tuple[Unit, ...]) -> tuple[float, tuple[tuple[Unit, ...], ...]]:
    """How loosely a group hangs together, and its two parts."""
    if len(units) < 2:
        return float("inf"), ()
    graph: rx.PyGraph[Unit, float] = rx.PyGraph()
    graph.add_nodes_from(list(units))
    inside = 0.0
    for i, first in enumerate(units):
        for j in range(i + 1, len(units)):
            weight = bandwidth(cluster, first, units[j])
            inside += weight
            graph.add_edge(i, j, weight)
    found = rx.stoer_wagner_min_cut(graph, weight_fn=float)
    assert found is not None, "a graph of two nodes or more has a cut"
    value, nodes = found
    side = set(nodes)
    parts = (
        tuple(unit for i, unit in enumerate(units) if i in side),
        tuple(unit for i, unit in enumerate(units) if i not in side),
    )
    return value / inside, tuple(sorted(parts))
