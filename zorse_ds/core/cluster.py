"""The hardware: nodes of GPUs, and the links inside and between them.

A cluster file is written by hand or by `zorse probe`. Units in the file are those people use (GB/s
of 10⁹ bytes, GiB, µs, ms); in the program bytes and seconds.
"""

import json
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path as FilePath
from types import MappingProxyType
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, ValidationError

from zorse_ds.core import cluster_edit
from zorse_ds.core.cluster_checks import cluster_problems
from zorse_ds.core.gpus import GB_PER_S, GIB, GpuType, TypeFigures, gpu_type_named, gpu_types
from zorse_ds.core.nodes import Node, NodeLink, as_tuple
from zorse_ds.core.strict import StrictModel, problems_of
from zorse_ds.errors import ClusterError
from zorse_ds.files import read_json, write_text

__all__ = ["Cluster", "Gpu", "Lane", "Node", "NodeLink", "Path"]


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
    links: Annotated[tuple[NodeLink, ...], BeforeValidator(as_tuple)] = ()
    types: dict[str, TypeFigures] = Field(default_factory=dict)
    """GPU types of this file: those that the catalogue lacks, or knows with other figures."""
    nodes: Annotated[tuple[Node, ...], BeforeValidator(as_tuple)]

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> "Cluster":
        """Validate plain data. Raises `ClusterError` that tells all problems."""
        try:
            cluster = cls.model_validate(data)
        except ValidationError as error:
            raise ClusterError("\n".join(problems_of(error, cls))) from None
        problems = cluster_problems(cluster)
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

    def without(self, nodes: Sequence[int | str]) -> "Cluster":
        """The cluster without these nodes, each given by name, by index, or as `node3`.

        Raises `ClusterError` for one that is not there, or when none would be left.
        """
        return self.from_dict(cluster_edit.without(self, nodes))

    def with_added(self, what: str) -> "Cluster":
        """The cluster with one node more: `"2xA100-SXM-80GB"`, or `"2xT4@1.2"` with its price.

        Its links and price are those of the fastest node of the same type; without one, inside
        what is usual for the type, and a NIC as the best node has. Raises `ClusterError`.
        """
        return self.from_dict(cluster_edit.with_added(self, what))

    @property
    def price_per_hour(self) -> float | None:
        """Of all nodes; None unless each has a price."""
        return cluster_edit.price_of(self.nodes)

    def node_name(self, index: int) -> str:
        """The name of a node, or `node3` where it has none."""
        return self.nodes[index].name or f"node{index}"

    @cached_property
    def known_types(self) -> Mapping[str, GpuType]:
        """The catalogue, and this file's own types over it."""
        own = {name: figures.as_type(name) for name, figures in self.types.items()}
        return MappingProxyType({**gpu_types(), **own})

    @cached_property
    def gpus(self) -> tuple[Gpu, ...]:
        """All GPUs in rank order: node by node."""
        gpus: list[Gpu] = []
        for index, node in enumerate(self.nodes):
            for name in node.types:
                kind = gpu_type_named(name, self.known_types)
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
