"""The cluster file: what it means, and one sentence for each mistake in it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from zorse_ds.core.cluster import Cluster
from zorse_ds.core.gpus import GIB
from zorse_ds.errors import ClusterError

T4S = {"gpu_type": "T4", "num_gpus": 2, "intra_gb_per_s": 12, "nic_gb_per_s": 3}
MIXED = {"gpu_types": ["RTX4090", "RTX3090"], "intra_gb_per_s": 10, "nic_gb_per_s": 1.2}


def cluster(*nodes: dict[str, Any], **more: Any) -> Cluster:
    return Cluster.from_dict({"nodes": list(nodes), **more})


def problems(*nodes: Any, **more: Any) -> list[str]:
    with pytest.raises(ClusterError) as caught:
        cluster(*nodes, **more)
    return str(caught.value).splitlines()


def test_ranks_run_through_the_nodes_in_order() -> None:
    gpus = cluster(T4S, MIXED).gpus
    assert [(gpu.rank, gpu.node, gpu.type.name) for gpu in gpus] == [
        (0, 0, "T4"), (1, 0, "T4"), (2, 1, "RTX4090"), (3, 1, "RTX3090"),
    ]  # fmt: skip
    assert gpus[0].usable_bytes == 15 * GIB
    assert gpus[0].host_bytes_per_s == 12e9


def test_a_node_may_know_its_memory_and_copies_better() -> None:
    gpu = cluster({**T4S, "usable_gib": 14.5, "host_gb_per_s": 6}).gpus[0]
    assert (gpu.usable_bytes, gpu.host_bytes_per_s) == (14.5 * GIB, 6e9)


def test_types_of_the_file_stand_beside_the_catalogue_and_over_it() -> None:
    odd = {"fp32_tflops": 0.2, "memory_gib": 16, "usable_gib": 12, "bf16": True}
    slow = {"tensor_tflops": 30, "memory_gib": 16, "nvlink_gb_per_s": 50, "host_gb_per_s": 3}
    node = {"gpu_types": ["CPU", "T4", "L4"], "intra_gb_per_s": 1, "nic_gb_per_s": 1}
    cpu, t4, l4 = (gpu.type for gpu in cluster(node, types={"CPU": odd, "T4": slow}).gpus)
    assert (cpu.tensor_flops, cpu.fp32_flops, cpu.has_bf16) == (0.2e12, 0.2e12, True)
    assert (cpu.memory_bytes, cpu.usable_bytes) == (16 * GIB, 12 * GIB)
    assert (t4.tensor_flops, t4.fp32_flops, t4.usable_bytes) == (30e12, None, 16 * GIB)
    assert (t4.nvlink_bytes_per_s, t4.pcie_bytes_per_s) == (50e9, 3e9)
    assert l4.tensor_flops == 121e12


def test_a_message_inside_a_node_needs_both_gpus_lanes() -> None:
    path = cluster(T4S, MIXED).path(0, 1)
    assert path.latency_s == pytest.approx(10e-6)
    assert [lane.key for lane in path.lanes] == [("gpu out", 0), ("gpu in", 1)]
    assert path.bytes_per_s == 12e9


def test_a_message_between_nodes_needs_their_nics_too() -> None:
    path = cluster(T4S, {**MIXED, "nic_latency_us": 50}).path(1, 2)
    keys = [lane.key for lane in path.lanes]
    assert keys == [("gpu out", 1), ("nic out", 0), ("nic in", 1), ("gpu in", 2)]
    assert path.latency_s == pytest.approx(50e-6)
    assert path.bytes_per_s == 1.2e9


REGIONS = {"inter_region_gb_per_s": 0.5, "inter_region_latency_ms": 20}


def test_regions_share_a_link_or_each_node_has_its_own() -> None:
    nodes = [{**T4S, "region": name} for name in ("east", "east", "west")]
    a_link = cluster(*nodes, **REGIONS, inter_region_gb_per_s_is="per_link")
    a_node = cluster(*nodes, **REGIONS, inter_region_gb_per_s_is="per_node")
    for each in (a_link, a_node):
        assert each.path(0, 4).latency_s == pytest.approx(20e-3)
        assert each.path(0, 4).bytes_per_s == 0.5e9
        assert each.path(0, 2).bytes_per_s == 3e9
    assert shared(a_link, (0, 4), (2, 5)) == {("regions", "east", "west")}
    assert shared(a_node, (0, 4), (2, 5)) == {("nic in", 2)} - {("nic in", 1)}
    assert ("region out", 0) in {lane.key for lane in a_node.path(0, 4).lanes}


def shared(cluster: Cluster, one: tuple[int, int], other: tuple[int, int]) -> set[Any]:
    """Lanes of between-region kind, or NICs, that two messages have in common."""
    keys = [{lane.key for lane in cluster.path(*pair).lanes} for pair in (one, other)]
    both = keys[0] & keys[1]
    regional = {key for key in both if key[0] == "regions"}  # type: ignore[index]
    return regional or both


def test_a_measured_link_counts_both_ways_unless_each_is_given() -> None:
    link = {"nodes": [0, 1], "gb_per_s": 0.7, "latency_us": 90}
    both = cluster(T4S, MIXED, links=[link])
    assert both.path(0, 2).bytes_per_s == both.path(2, 0).bytes_per_s == 0.7e9
    assert both.path(3, 1).latency_s == pytest.approx(90e-6)
    back = {"nodes": [1, 0], "gb_per_s": 0.2, "latency_us": 100}
    each = cluster(T4S, MIXED, links=[link, back])
    assert (each.path(0, 2).bytes_per_s, each.path(2, 0).bytes_per_s) == (0.7e9, 0.2e9)


def test_a_cluster_survives_its_file(tmp_path: Path) -> None:
    link = {"nodes": [0, 1], "gb_per_s": 0.7, "latency_us": 90, "direct": False}
    types = {"ODD": {"tensor_tflops": 1, "memory_gib": 2}}
    node = {**MIXED, "gpu_types": ["ODD", "T4"], "price_per_hour": 1.5, "name": "n"}
    before = cluster(T4S, node, links=[link], types=types)
    before.save(tmp_path / "c.json")
    after = Cluster.load(tmp_path / "c.json")
    assert after == before
    assert after.gpus == before.gpus


@pytest.mark.parametrize(
    ("node", "words"),
    [
        ({"gpu_type": "a100"}, "nodes[0] has GPU type 'a100'"),
        ({"gpu_type": "a100"}, "did you mean 'A100-SXM-40GB' or 'A100-SXM-80GB'"),
        ({"num_gpu": 2}, "nodes[0].num_gpu is not a known key"),
        ({"num_gpu": 2}, "did you mean 'num_gpus'?"),
        ({"num_gpus": 0}, "nodes[0].num_gpus is 0; expected at least 1"),
        ({"num_gpus": None}, "nodes[0].num_gpus is missing; expected both"),
        ({"gpu_types": ["T4"]}, "nodes[0] has its GPUs twice"),
        ({"gpu_type": None, "num_gpus": None}, "nodes[0] has its GPUs not at all"),
        ({"gpu_type": None, "num_gpus": None, "gpu_types": []}, "nodes[0].gpu_types is empty"),
        ({"nic_gb_per_s": 0}, "nodes[0].nic_gb_per_s is 0"),
        ({"nic_gb_per_s": "3"}, "nodes[0].nic_gb_per_s is '3'; expected a number"),
        ({"region": "west"}, "nodes are in 2 regions, but inter_region_gb_per_s is missing"),
    ],
)
def test_a_mistake_in_a_node_is_one_sentence(node: dict[str, Any], words: str) -> None:
    found = problems({**T4S, **node}, T4S)
    assert len(found) == 1
    assert words in found[0]


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"links": [{"nodes": [0, 2], "gb_per_s": 1, "latency_us": 1}]}, "each from 0 to 1"),
        ({"links": [{"nodes": [1, 1], "gb_per_s": 1, "latency_us": 1}]}, "two different nodes"),
        ({"links": [{"nodes": [0, 1], "gb_per_s": 1, "latency_us": 1}] * 2}, "links[0] has too"),
        ({"inter_region_gb_per_s": 1.0}, "inter_region_gb_per_s_is is missing"),
        ({"inter_region_gb_per_s_is": "per_nod"}, "'per_node'"),
        ({"types": {"X": {"memory_gib": 1}}}, "types.X has no TFLOPS"),
        ({"types": {"X": {"memory_gb": 1}}}, "types.X.memory_gb is not a known key"),
        (
            {"types": {"X": {"fp32_tflops": 1, "memory_gib": 1, "usable_gib": 2}}},
            "types.X.usable_gib is 2; expected at most its memory_gib of 1",
        ),
    ],
)
def test_a_mistake_beside_the_nodes_is_named(more: dict[str, Any], words: str) -> None:
    assert words in "\n".join(problems(T4S, T4S, **more))


def test_all_mistakes_are_told_with_the_file(tmp_path: Path) -> None:
    path = tmp_path / "c.json"
    nodes = [{**T4S, "name": "n", "gpu_type": "T5"}, {**T4S, "name": "n"}]
    path.write_text(json.dumps({"nodes": nodes}))
    with pytest.raises(ClusterError) as caught:
        Cluster.load(path)
    lines = str(caught.value).splitlines()
    assert len(lines) == 2
    assert all(line.startswith(f"{path}: nodes[") for line in lines)
    assert "nodes[1].name is 'n', which nodes[0] has too" in lines[1]


def test_no_node_is_a_mistake() -> None:
    assert problems() == ["nodes is empty; expected at least one node"]
