"""From what probing found to a cluster file, and to what a person should know beside it."""

from collections.abc import Sequence
from itertools import groupby
from typing import Any

from zorse_ds.core.cluster import Cluster
from zorse_ds.core.gpus import GB_PER_S, GIB, type_of_device
from zorse_ds.core.typical import PLAIN_NIC_GB_PER_S
from zorse_ds.errors import ClusterError
from zorse_ds.profiler.probe_facts import DeviceFacts, PairFigures, ProbeResult, RankFacts

_SAME_MEMORY = 0.1
"""Share by which a device's memory may differ from the catalogue's: drivers keep some."""

Nodes = Sequence[tuple[str, Sequence[RankFacts]]]
"""Each host with its ranks."""


def cluster_of(result: ProbeResult) -> Cluster:
    """The cluster that was probed, rank by rank in order.

    Devices that the catalogue does not know, CPUs among them, are described under `types` by what
    was measured. Raises `ClusterError` when the ranks of a host do not follow each other.
    """
    nodes = _nodes(result.ranks)
    names, types = _types(result.ranks)
    lone = "" if len(nodes) > 1 else "; the NIC of the only node is assumed"
    hosts = "1 host" if len(nodes) == 1 else f"{len(nodes)} hosts"
    return Cluster.from_dict(
        {
            "about": f"probed: {len(result.ranks)} ranks on {hosts}",
            "link_figures": f"measured{lone}",
            "types": types,
            "links": _links(result, nodes),
            "nodes": [_node(host, ranks, names, result) for host, ranks in nodes],
        }
    )


def notes_of(result: ProbeResult) -> list[str]:
    """Sentences about versions that differ and devices the catalogue does not know."""
    notes = []
    names = dict.fromkeys(name for each in result.ranks for name in each.versions)
    for name in names:
        ranks_by_version: dict[str, list[str]] = {}
        for each in result.ranks:
            version = each.versions.get(name, "not there")
            ranks_by_version.setdefault(version, []).append(f"{each.rank} ({each.host})")
        if len(ranks_by_version) > 1:
            told = (f"{version} on rank {ranks[0]}" for version, ranks in ranks_by_version.items())
            notes.append(f"versions of {name} differ: {', '.join(told)}; expected the same on all")
    first = {_kind_of(each.device): each for each in reversed(result.ranks)}
    for each in sorted(first.values(), key=lambda each: each.rank):
        if each.device.kind != "cpu" and _catalogue_name(each.device) is None:
            notes.append(
                f"rank {each.rank} has a {each.device.name!r} of "
                f"{each.device.memory_bytes / GIB:.1f} GiB, which is no type of the catalogue; it "
                "is described by what was measured"
            )
    return notes


def _nodes(ranks: Sequence[RankFacts]) -> Nodes:
    runs = [(host, list(run)) for host, run in groupby(ranks, key=lambda each: each.host)]
    seen: dict[str, list[RankFacts]] = {}
    for host, run in runs:
        if host in seen:
            raise ClusterError(
                f"host {host!r} has ranks {seen[host][-1].rank} and {run[0].rank}, and others lie "
                "between; expected ranks to be given out host by host"
            )
        seen[host] = run
    return runs


def _catalogue_name(device: DeviceFacts) -> str | None:
    kind = type_of_device(device.name)
    if kind is None or abs(device.memory_bytes / kind.memory_bytes - 1) > _SAME_MEMORY:
        return None
    return kind.name


def _kind_of(device: DeviceFacts) -> tuple[str, int]:
    """What devices of one type have in common.

    Ranks on the CPUs of a host share its memory, so its size tells only other devices apart.
    """
    return device.name, 0 if device.kind == "cpu" else round(device.memory_bytes / GIB)


def _types(ranks: Sequence[RankFacts]) -> tuple[dict[int, str], dict[str, Any]]:
    """The GPU type of each rank, and the types that the catalogue lacks."""
    names: dict[int, str] = {}
    own: dict[tuple[str, int], str] = {}
    types: dict[str, Any] = {}
    for each in ranks:
        known = _catalogue_name(each.device)
        key = _kind_of(each.device)
        if known is None and key not in own:
            own[key] = _free_name("CPU" if each.device.kind == "cpu" else each.device.name, types)
            alike = [e for e in ranks if _kind_of(e.device) == key]
            types[own[key]] = _figures(each, alike)
        names[each.rank] = known or own[key]
    return names, types


def _free_name(name: str, taken: dict[str, Any]) -> str:
    names = (name if number == 1 else f"{name}-{number}" for number in range(1, len(taken) + 2))
    return next(each for each in names if each not in taken)


def _figures(first: RankFacts, alike: Sequence[RankFacts]) -> dict[str, Any]:
    """A type as measured on its slowest rank."""
    fp32 = min(each.device.fp32_flops for each in alike)
    half = [each.device.half_flops for each in alike if each.device.half_flops is not None]
    rate = min(each.device.memory_bytes_per_s for each in alike)
    sharing = sum(each.host == first.host for each in alike) if first.device.kind == "cpu" else 1
    tensor = {"tensor_tflops": _rounded(min(half) / 1e12)} if half else {}
    return {
        **tensor,
        "fp32_tflops": _rounded(fp32 / 1e12),
        "memory_gib": _rounded(first.device.memory_bytes / sharing / GIB),
        "memory_gb_per_s": _rounded(rate / GB_PER_S),
        "bf16": first.device.has_bf16,
        "host_gb_per_s": _rounded(min(each.device.host_bytes_per_s for each in alike) / GB_PER_S),
        "device_name": first.device.name,
    }


def _node(
    host: str, ranks: Sequence[RankFacts], names: dict[int, str], result: ProbeResult
) -> dict[str, Any]:
    devices = [each.device for each in ranks]
    own = {each.rank for each in ranks}
    inside = [link for link in result.links if own >= set(link.pairing.pairs[0])]
    outside = [link for link in result.links if len(own & set(link.pairing.pairs[0])) == 1]
    sharing = len(ranks) if devices[0].kind == "cpu" else 1
    copy = min(device.host_bytes_per_s for device in devices)
    # A single device has no inner link, and is then limited by its way to the host alone.
    intra = min((link.bytes_per_s for link in inside), default=copy)
    nic = max((link.total_bytes_per_s for link in outside), default=PLAIN_NIC_GB_PER_S * GB_PER_S)
    usable = min(device.usable_bytes for device in devices) / sharing
    node = {
        "name": host,
        **_gpus([names[each.rank] for each in ranks]),
        "intra_gb_per_s": _rounded(intra / GB_PER_S),
        "intra_direct": all(each.reaches_peers for each in devices)
        and all(link.is_direct for link in inside),
        "nic_gb_per_s": _rounded(nic / GB_PER_S),
        "host_gb_per_s": _rounded(copy / GB_PER_S),
        "host_memory_gib": _rounded(devices[0].host_memory_bytes / GIB),
        "usable_gib": _rounded(usable / GIB),
    }
    if inside:
        node["intra_latency_us"] = _rounded(max(link.latency_s for link in inside) * 1e6)
    if outside:
        node["nic_latency_us"] = _rounded(min(link.latency_s for link in outside) * 1e6)
    return node


def _gpus(names: list[str]) -> dict[str, Any]:
    if len(set(names)) == 1:
        return {"gpu_type": names[0], "num_gpus": len(names)}
    return {"gpu_types": names}


def _links(result: ProbeResult, nodes: Nodes) -> list[dict[str, Any]]:
    index = {each.rank: i for i, (_, ranks) in enumerate(nodes) for each in ranks}
    return [_link(link, index) for link in result.links if _is_between(link, index)]


def _is_between(link: PairFigures, node_of: dict[int, int]) -> bool:
    a, b = link.pairing.pairs[0]
    return node_of[a] != node_of[b]


def _link(link: PairFigures, node_of: dict[int, int]) -> dict[str, Any]:
    return {
        "nodes": [node_of[rank] for rank in link.pairing.pairs[0]],
        "gb_per_s": _rounded(link.total_bytes_per_s / GB_PER_S),
        "latency_us": _rounded(link.latency_s * 1e6),
        "direct": link.is_direct,
    }


def _rounded(value: float) -> float:
    """Four digits: more than a measurement is worth, and easy to read."""
    return float(f"{value:.4g}")
