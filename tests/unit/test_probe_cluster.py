"""From measurements to a cluster file, on devices that this machine does not have."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from zorse_ds.cli.probe_launch import _read, launched_probe, print_in_lines
from zorse_ds.core.gpus import GIB
from zorse_ds.errors import ClusterError
from zorse_ds.profiler.probe_cluster import cluster_of, notes_of
from zorse_ds.profiler.probe_facts import (
    DeviceFacts,
    PairFigures,
    Pairing,
    ProbeResult,
    RankFacts,
)

A100 = DeviceFacts(
    kind="cuda",
    name="NVIDIA A100-SXM4-40GB",
    memory_bytes=int(39.4 * GIB),
    usable_bytes=39 * GIB,
    host_memory_bytes=512 * GIB,
    fp32_flops=19e12,
    half_flops=250e12,
    has_bf16=True,
    memory_bytes_per_s=1.4e12,
    host_bytes_per_s=22e9,
    reaches_peers=True,
)
MIG = replace(
    A100,
    name="NVIDIA A100-SXM4-40GB MIG 1g.5gb",
    memory_bytes=int(4.75 * GIB),
    usable_bytes=int(4.5 * GIB),
    half_flops=35e12,
    fp32_flops=2.5e12,
    reaches_peers=False,
)


def facts(*devices: tuple[str, DeviceFacts], **versions: str) -> tuple[RankFacts, ...]:
    return tuple(RankFacts(i, host, device, versions) for i, (host, device) in enumerate(devices))


def figures(*pairs: tuple[int, int], rate: float = 10e9, is_direct: bool = True) -> PairFigures:
    return PairFigures(Pairing(pairs), 20e-6, rate, rate * len(pairs), is_direct)


def test_known_devices_get_their_catalogue_name() -> None:
    ranks = facts(("x", A100), ("x", A100), ("y", A100))
    links = (figures((0, 1), rate=200e9), figures((0, 2), rate=9e9, is_direct=False))
    cluster = cluster_of(ProbeResult(ranks, links))
    assert cluster.types == {}
    x, y = cluster.nodes
    assert (x.gpu_type, x.num_gpus, y.num_gpus) == ("A100-SXM-40GB", 2, 1)
    assert (x.intra_gb_per_s, x.intra_latency_us, x.nic_gb_per_s) == (200, 20, 9)
    assert (x.usable_gib, x.host_memory_gib, x.host_gb_per_s) == (39, 512, 22)
    # Alone in its host, a GPU is limited by its way to the host.
    assert y.intra_gb_per_s == 22
    assert [(link.nodes, link.gb_per_s, link.direct) for link in cluster.links] == [
        ((0, 1), 9, False)
    ]
    assert notes_of(ProbeResult(ranks, links)) == []


def test_the_slowest_pair_speaks_for_a_node_and_the_fastest_link_for_its_nic() -> None:
    ranks = facts(*[("x", A100)] * 3, ("y", A100), ("z", A100))
    links = (
        *(figures((0, 1), rate=200e9), figures((0, 2), rate=50e9)),
        *(figures((0, 3), rate=3e9), figures((0, 4), rate=5e9), figures((3, 4), rate=4e9)),
    )
    nodes = cluster_of(ProbeResult(ranks, links)).nodes
    assert nodes[0].intra_gb_per_s == 50
    assert [node.nic_gb_per_s for node in nodes] == [5, 4, 5]


def test_an_unknown_device_is_described_by_what_was_measured_and_named() -> None:
    result = ProbeResult(facts(("x", A100), ("x", MIG)), (figures((0, 1)),))
    cluster = cluster_of(result)
    (node,) = cluster.nodes
    assert node.types == ("A100-SXM-40GB", MIG.name)
    mig = cluster.gpus[1].type
    assert (mig.tensor_flops, mig.fp32_flops, mig.has_bf16) == (35e12, 2.5e12, True)
    assert mig.memory_bytes == 4.75 * GIB
    assert not node.intra_direct
    assert node.usable_gib == 4.5
    (note,) = notes_of(result)
    assert "rank 1 has a 'NVIDIA A100-SXM4-40GB MIG 1g.5gb' of 4.8 GiB" in note
    assert "assumed" in cluster.link_figures


def test_a_known_name_with_other_memory_is_another_device() -> None:
    half = replace(A100, memory_bytes=20 * GIB, usable_bytes=19 * GIB)
    result = ProbeResult(facts(("x", A100), ("y", half)), (figures((0, 1)),))
    assert [gpu.type.name for gpu in cluster_of(result).gpus] == ["A100-SXM-40GB", A100.name]
    assert len(notes_of(result)) == 1


def test_all_versions_that_differ_are_told_with_a_rank() -> None:
    ranks = [
        RankFacts(0, "x", A100, {"torch": "2.13", "cuda": "13.0"}),
        RankFacts(1, "y", A100, {"torch": "2.14"}),
    ]
    assert notes_of(ProbeResult(tuple(ranks), ())) == [
        "versions of torch differ: 2.13 on rank 0 (x), 2.14 on rank 1 (y); expected the same on "
        "all",
        "versions of cuda differ: 13.0 on rank 0 (x), not there on rank 1 (y); expected the same "
        "on all",
    ]


def test_the_result_survives_a_launcher_that_marks_and_mixes_lines(
    capsys: pytest.CaptureFixture[str],
) -> None:
    text = '{"a": "' + "x y" * 1500 + '"}'
    print_in_lines(text)
    lines = [f"worker-0: {line}\n" for line in capsys.readouterr().out.splitlines()]
    noise = ["[INFO] spawned\n", "\n", "worker-0: zorse probe: devices\n"]
    read, others = _read([noise[0], *lines[2:], *noise[1:], *lines[:2]])
    assert read == text
    assert list(others) == ["[INFO] spawned"]
    assert capsys.readouterr().err == "zorse probe: devices\n"
    assert _read(lines[1:])[0] is None


def test_a_faulty_hostfile_is_told_before_anything_is_started(tmp_path: Path) -> None:
    path = tmp_path / "hosts"
    with pytest.raises(ClusterError, match="hosts cannot be read"):
        launched_probe(path, None)
    path.write_text("a slots=2\nb slot=2\n")
    with pytest.raises(ClusterError, match="hosts line 2: 'slot=2' is not understood") as caught:
        launched_probe(path, None)
    assert "\n" not in str(caught.value)
