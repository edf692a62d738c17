"""What must hold between the parts of a cluster; one function a rule, one sentence a problem."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from zorse_ds.core.gpus import gpu_types, type_suggestion
from zorse_ds.core.nodes import Node

if TYPE_CHECKING:
    from zorse_ds.core.cluster import Cluster


def cluster_problems(cluster: "Cluster") -> list[str]:
    """Every contradiction between the parts of a cluster whose parts are well-formed."""
    rules = (_nodes, _names, _types, _regions, _links)
    return [problem for rule in rules for problem in rule(cluster)]


def _nodes(cluster: "Cluster") -> Iterator[str]:
    if not cluster.nodes:
        yield "nodes is empty; expected at least one node"
    known = [*cluster.types, *(name for name in gpu_types() if name not in cluster.types)]
    for index, node in enumerate(cluster.nodes):
        yield from _node_problems(f"nodes[{index}]", node, known)


def _node_problems(where: str, node: Node, known: list[str]) -> Iterator[str]:
    has_pair = node.gpu_type is not None or node.num_gpus is not None
    if (node.gpu_types is not None) == has_pair:
        how = "twice" if has_pair else "not at all"
        yield f"{where} has its GPUs {how}; expected gpu_type and num_gpus, or gpu_types"
    elif has_pair and (node.gpu_type is None or node.num_gpus is None):
        missing = "gpu_type" if node.gpu_type is None else "num_gpus"
        yield f"{where}.{missing} is missing; expected both gpu_type and num_gpus"
    elif not node.types:
        yield f"{where}.gpu_types is empty; expected at least one GPU"
    else:
        for name in dict.fromkeys(node.types):
            if name not in known:
                yield (
                    f"{where} has GPU type {name!r}, which neither the catalogue nor this file's "
                    f"types know{type_suggestion(name, known)}"
                )


def _names(cluster: "Cluster") -> Iterator[str]:
    first: dict[str, int] = {}
    for index, node in enumerate(cluster.nodes):
        if node.name is not None and node.name in first:
            yield (
                f"nodes[{index}].name is {node.name!r}, which nodes[{first[node.name]}] has too; "
                "expected a name of its own"
            )
        elif node.name is not None:
            first[node.name] = index


def _types(cluster: "Cluster") -> Iterator[str]:
    for name, figures in cluster.types.items():
        if figures.tensor_tflops is None and figures.fp32_tflops is None:
            yield f"types.{name} has no TFLOPS; expected tensor_tflops, fp32_tflops or both"
        if figures.usable_gib is not None and figures.usable_gib > figures.memory_gib:
            yield (
                f"types.{name}.usable_gib is {figures.usable_gib:g}; expected at most its "
                f"memory_gib of {figures.memory_gib:g}"
            )


def _regions(cluster: "Cluster") -> Iterator[str]:
    regions = {node.region for node in cluster.nodes}
    if len(regions) > 1 and cluster.inter_region_gb_per_s is None:
        yield (
            f"nodes are in {len(regions)} regions, but inter_region_gb_per_s is missing; expected "
            "the GB/s between them"
        )
    if cluster.inter_region_gb_per_s is not None and cluster.inter_region_gb_per_s_is is None:
        yield (
            "inter_region_gb_per_s_is is missing beside inter_region_gb_per_s; expected "
            "'per_node' (each sending node has it) or 'per_link' (all share it)"
        )


def _links(cluster: "Cluster") -> Iterator[str]:
    first: dict[tuple[int, int], int] = {}
    for index, link in enumerate(cluster.links):
        a, b = link.nodes
        if a == b or not all(0 <= end < len(cluster.nodes) for end in link.nodes):
            yield (
                f"links[{index}].nodes is [{a}, {b}]; expected two different nodes, each from 0 to "
                f"{len(cluster.nodes) - 1}"
            )
        elif (a, b) in first:
            yield (
                f"links[{index}].nodes is [{a}, {b}], which links[{first[a, b]}] has too; expected "
                "each pair once, or once a direction"
            )
        first.setdefault((a, b), index)
