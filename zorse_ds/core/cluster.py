"""The hardware: nodes of GPUs, and the links inside and between them.

A cluster file is written by hand or by `zorse probe`. Units in the file are those people use (GB/s
of 10⁹ bytes, GiB, µs, ms); in the program bytes and seconds.
"""

import json
from collections.abc import Hashable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path as FilePath
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, ValidationError

from zorse_ds.core.gpus import GB_PER_S, GIB, GpuType, gpu_type_named, gpu_types
from zorse_ds.core.strict import StrictModel, problems_of, suggestion
from zorse_ds.errors import ClusterError
from zorse_ds.files import read_json, write_text

INTRA_LATENCY_US = 10.0
NIC_LATENCY_US = 30.0
"""Where a file says nothing: one hop inside a node, and between nodes of one region."""


def _as_tuple(value: object) -> object:
    return tuple(value) if isinstance(value, list) else value


class Node(StrictModel):
    """One host with its GPUs, in rank order."""

    name: str | None = None
    """The host's name, as in a hostfile."""
    gpu_type: str | None = None
    num_gpus: Annotated[int, Field(ge=1, le=4096)] | None = None
    gpu_types: Annotated[tuple[str, ...], BeforeValidator(_as_tuple)] | None = None
    """Either `gpu_type` and `num_gpus`, or one type a GPU here."""
    intra_gb_per_s: float = Field(gt=0)
    """Between two GPUs of the node, each GPU one way."""
    intra_latency_us: float = Field(default=INTRA_LATENCY_US, ge=0)
    nic_gb_per_s: float = Field(gt=0)
    """Of the whole node to other nodes, one way."""
    nic_latency_us: float = Field(default=NIC_LATENCY_US, ge=0)
    host_gb_per_s: Annotated[float, Field(gt=0)] | None = None
    """Copies between a GPU and host memory, per GPU; default: by the type's PCIe."""
    host_memory_gib: Annotated[float, Field(gt=0)] | None = None
    usable_gib: Annotated[float, Field(gt=0)] | None = None
    """What a program can allocate on each GPU; default: the catalogue's figure."""
    region: str | None = None
    price_per_hour: Annotated[float, Field(ge=0)] | None = None
    """Of the whole node, in any one currency."""

    @property
    def types(self) -> tuple[str, ...]:
        """The GPU type of each GPU."""
        if self.gpu_types is not None:
            return self.gpu_types
        return (self.gpu_type or "",) * (self.num_gpus or 0)


class NodeLink(StrictModel):
    """A measured link between two nodes, better known than their NICs alone say."""

    nodes: Annotated[tuple[int, int], BeforeValidator(_as_tuple)]
    gb_per_s: float = Field(gt=0)
    """One way."""
    latency_us: float = Field(ge=0)
    direct: bool = True
    """False: GPUs of the two nodes can only talk through host memory."""


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU of a cluster; `rank` is its number in a plan for the whole cluster."""

    rank: int
    node: int
    type: GpuType
    usable_bytes: int
    host_bytes_per_s: float
    """To and from host memory."""


@dataclass(frozen=True, slots=True)
class Lane:
    """Something that messages share: they pass one after the other, or slow each other down."""

    key: Hashable
    bytes_per_s: float


@dataclass(frozen=True, slots=True)
class Path:
    """How a message gets from one GPU to another: `latency_s`, and the lanes it needs at once."""

    latency_s: float
    lanes: tuple[Lane, ...]

    @property
    def bytes_per_s(self) -> float:
        """Of a message that is alone."""
        return min(lane.bytes_per_s for lane in self.lanes)


class Cluster(StrictModel):
    """Nodes and links. Raises `ClusterError` on malformed input."""

    about: str = ""
    link_figures: str = ""
    """Where the links' figures come from: "measured", "assumed", …"""
    inter_region_gb_per_s: Annotated[float, Field(gt=0)] | None = None
    inter_region_latency_ms: float = Field(default=30.0, ge=0)
    inter_region_gb_per_s_is: Literal["per_node", "per_link"] | None = None
    """Whether each sending node has the figure, or all share it; needed where there is one."""
    links: Annotated[tuple[NodeLink, ...], BeforeValidator(_as_tuple)] = ()
    nodes: Annotated[tuple[Node, ...], BeforeValidator(_as_tuple)]

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> "Cluster":
        """Validate plain data. Raises `ClusterError` that tells all problems."""
        try:
            cluster = cls.model_validate(data)
        except ValidationError as error:
            raise ClusterError("\n".join(problems_of(error, cls))) from None
        problems = [*_problems(cluster)]
        if problems:
            raise ClusterError("\n".join(problems))
        return cluster

    @classmethod
    def load(cls, path: str | FilePath) -> "Cluster":
        """Read a cluster file. Raises `ClusterError`, each sentence with the path."""
        data = read_json(path, ClusterError)
        try:
            return cls.from_dict(data)
        except ClusterError as error:
            lines = str(error).splitlines()
            raise ClusterError("\n".join(f"{path}: {line}" for line in lines)) from None

    def to_dict(self) -> dict[str, Any]:
        """The cluster as plain data; what was left at its default is left out."""
        return self.model_dump(mode="json", exclude_defaults=True)

    def save(self, path: str | FilePath) -> None:
        """Write the cluster as JSON, atomically."""
        write_text(path, json.dumps(self.to_dict(), indent=2) + "\n")

    @cached_property
    def gpus(self) -> tuple[Gpu, ...]:
        """All GPUs in rank order: node by node."""
        gpus: list[Gpu] = []
        for index, node in enumerate(self.nodes):
            for name in node.types:
                kind = gpu_type_named(name)
                usable = kind.usable_bytes if node.usable_gib is None else node.usable_gib * GIB
                host = (
                    kind.pcie_bytes_per_s
                    if node.host_gb_per_s is None
                    else node.host_gb_per_s * GB_PER_S
                )
                gpus.append(Gpu(len(gpus), index, kind, int(usable), host))
        return tuple(gpus)

    def path(self, source: int, target: int) -> Path:
        """How a message gets from rank `source` to rank `target` (another one)."""
        a, b = self.gpus[source].node, self.gpus[target].node
        out = Lane(("gpu out", source), self.nodes[a].intra_gb_per_s * GB_PER_S)
        into = Lane(("gpu in", target), self.nodes[b].intra_gb_per_s * GB_PER_S)
        if a == b:
            return Path(self.nodes[a].intra_latency_us * 1e-6, (out, into))
        latency_s, lanes = self.between(a, b)
        return Path(latency_s, (out, *lanes, into))

    def between(self, a: int, b: int) -> tuple[float, tuple[Lane, ...]]:
        """Latency in seconds and lanes from node `a` to another node `b`."""
        source, target = self.nodes[a], self.nodes[b]
        latency_s = max(source.nic_latency_us, target.nic_latency_us) * 1e-6
        lanes = [
            Lane(("nic out", a), source.nic_gb_per_s * GB_PER_S),
            Lane(("nic in", b), target.nic_gb_per_s * GB_PER_S),
        ]
        if source.region != target.region and self.inter_region_gb_per_s is not None:
            latency_s = self.inter_region_latency_ms * 1e-3
            shared = self.inter_region_gb_per_s_is == "per_link"
            key = ("regions", source.region, target.region) if shared else ("region out", a)
            lanes.append(Lane(key, self.inter_region_gb_per_s * GB_PER_S))
        measured = self._links.get((a, b))
        if measured is not None:
            latency_s = measured.latency_us * 1e-6
            lanes.append(Lane(("link", a, b), measured.gb_per_s * GB_PER_S))
        return latency_s, tuple(lanes)

    @cached_property
    def _links(self) -> dict[tuple[int, int], NodeLink]:
        links: dict[tuple[int, int], NodeLink] = {}
        for link in self.links:
            links[link.nodes] = link
            links.setdefault((link.nodes[1], link.nodes[0]), link)
        return links


def _problems(cluster: Cluster) -> list[str]:
    problems = [] if cluster.nodes else ["nodes is empty; expected at least one node"]
    for i, node in enumerate(cluster.nodes):
        problems += _node_problems(i, node)
    regions = {node.region for node in cluster.nodes}
    if len(regions) > 1 and cluster.inter_region_gb_per_s is None:
        problems.append(
            f"nodes are in {len(regions)} regions, but inter_region_gb_per_s is missing; expected "
            "the GB/s between them"
        )
    if cluster.inter_region_gb_per_s is not None and cluster.inter_region_gb_per_s_is is None:
        problems.append(
            "inter_region_gb_per_s_is is missing beside inter_region_gb_per_s; expected "
            "'per_node' (each sending node has it) or 'per_link' (all share it)"
        )
    for i, link in enumerate(cluster.links):
        a, b = link.nodes
        if a == b or not all(0 <= end < len(cluster.nodes) for end in link.nodes):
            problems.append(
                f"links[{i}].nodes is [{a}, {b}]; expected two different nodes, each from 0 to "
                f"{len(cluster.nodes) - 1}"
            )
    return problems


def _node_problems(index: int, node: Node) -> list[str]:
    where = f"nodes[{index}]"
    if (node.gpu_types is None) == (node.gpu_type is None and node.num_gpus is None):
        return [
            f"{where} has its GPUs twice or not at all; expected gpu_type and num_gpus, or "
            "gpu_types"
        ]
    if node.gpu_types is None and (node.gpu_type is None or node.num_gpus is None):
        missing = "gpu_type" if node.gpu_type is None else "num_gpus"
        return [f"{where}.{missing} is missing; expected both gpu_type and num_gpus"]
    if not node.types:
        return [f"{where}.gpu_types is empty; expected at least one GPU"]
    return [
        f"{where} has GPU type {name!r}, which the catalogue does not know"
        f"{suggestion(name.upper(), gpu_types())}"
        for name in dict.fromkeys(node.types)
        if name not in gpu_types()
    ]
