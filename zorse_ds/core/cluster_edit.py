"""Other clusters than the one at hand: without some nodes, or with GPUs added. For what-if."""

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from zorse_ds.core.gpus import GpuType, gpu_type_named
from zorse_ds.core.nodes import MAX_GPUS, Node
from zorse_ds.core.strict import suggestion
from zorse_ds.core.typical import typical_links
from zorse_ds.errors import ClusterError

if TYPE_CHECKING:
    from zorse_ds.core.cluster import Cluster

MAX_LISTED = 12
"""Names of nodes in a sentence."""

_ADDED = re.compile(r"(?:(\d+)\s*[x*]\s*)?(.*?)(?:@(\d+(?:\.\d+)?))?", re.IGNORECASE)


def without(cluster: "Cluster", nodes: Sequence[int | str]) -> dict[str, Any]:
    """The data of `cluster` without `nodes`, each an index or a name. Raises `ClusterError`."""
    gone = {_index_of(cluster, node) for node in nodes}
    kept = [index for index in range(len(cluster.nodes)) if index not in gone]
    if not kept:
        raise ClusterError(
            f"without {_words(nodes)} no node is left; expected at most {len(cluster.nodes) - 1} "
            "nodes to go"
        )
    data = cluster.to_dict()
    position = {old: new for new, old in enumerate(kept)}
    links = [
        {**link, "nodes": [position[end] for end in link["nodes"]]}
        for link in data.pop("links", [])
        if gone.isdisjoint(link["nodes"])
    ]
    nodes_data = [data["nodes"][index] for index in kept]
    return {**data, **({"links": links} if links else {}), "nodes": nodes_data}


def with_added(cluster: "Cluster", what: str) -> dict[str, Any]:
    """The data of `cluster` with one node more, such as `"2xA100-SXM-80GB"`. See `Cluster`."""
    match = _ADDED.fullmatch(what.strip())
    count = 0 if match is None else int(match[1] or 1)
    if match is None or not match[2] or not 1 <= count <= MAX_GPUS:
        raise ClusterError(
            f"the GPUs to add are {what!r}; expected NUMBERxTYPE, such as 2xA100-SXM-80GB, and "
            "their price per hour behind an @ if wanted"
        )
    kind = gpu_type_named(match[2], cluster.known_types)
    node = {
        **_links_for(cluster, kind, count),
        "name": _free_name(cluster),
        "gpu_type": kind.name,
        "num_gpus": count,
    }
    if match[3] is not None:
        node["price_per_hour"] = float(match[3])
    data = cluster.to_dict()
    return {**data, "nodes": [*data["nodes"], node]}


def _links_for(cluster: "Cluster", kind: GpuType, count: int) -> dict[str, Any]:
    """Of the fastest node of the same type; else the type's usual ones, behind the best NIC."""
    alike = [node for node in cluster.nodes if set(node.types) == {kind.name}]
    if alike:
        model = max(alike, key=lambda node: (node.nic_gb_per_s, node.intra_gb_per_s))
        copied = model.model_dump(
            mode="json",
            exclude_defaults=True,
            exclude={"name", "gpu_type", "num_gpus", "gpu_types"},
        )
        price = model.price_per_hour
        shared = {} if price is None else {"price_per_hour": price * count / len(model.types)}
        return {**copied, **shared}
    best = max(cluster.nodes, key=lambda node: node.nic_gb_per_s)
    links = {**typical_links(kind), "nic_gb_per_s": best.nic_gb_per_s}
    links["nic_latency_us"] = best.nic_latency_us
    return links if best.region is None else {**links, "region": best.region}


def _free_name(cluster: "Cluster") -> str:
    taken = {node.name for node in cluster.nodes}
    names = (f"added{index or ''}" for index in range(len(taken) + 1))
    return next(name for name in names if name not in taken)


def _index_of(cluster: "Cluster", node: int | str) -> int:
    """A node by its name, its index, or `node` with its index."""
    names = [each.name for each in cluster.nodes]
    if node in names:
        return names.index(str(node))
    digits = re.fullmatch(r"(?:node)?(\d+)", str(node))
    if digits and int(digits[1]) < len(names):
        return int(digits[1])
    choices = [name or f"node{index}" for index, name in enumerate(names)]
    known = ", ".join(choices[:MAX_LISTED]) + (", ..." if len(choices) > MAX_LISTED else "")
    near = suggestion(node, choices)
    raise ClusterError(f"there is no node {node!r}; expected one of {known}{near}")


def _words(nodes: Sequence[int | str]) -> str:
    return " and ".join(str(node) for node in nodes)


def price_of(nodes: Sequence[Node]) -> float | None:
    """Per hour of all nodes; None unless each has a price."""
    prices = [node.price_per_hour for node in nodes]
    known = [price for price in prices if price is not None]
    return sum(known) if known and len(known) == len(prices) else None
