"""Probing real ranks: who is where, and links of known speed; and through the real launcher."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from deepspeed.launcher.runner import _parse_hostfile

from tests.ranks.harness import run_ranks
from tests.ranks.launched import environment
from zorse_ds.core.cluster import Cluster
from zorse_ds.core.hostfile import parse_hostfile
from zorse_ds.errors import ClusterError
from zorse_ds.profiler.probe import probe
from zorse_ds.profiler.probe_cluster import cluster_of, notes_of

HOSTS = ("a", "a", "b", "b", "b")
RATE, LATENCY_S = 30e6, 8e-3
"""Imposed on each message between the hosts: far slower than what this machine does itself."""


def probed(rank: int, hosts: tuple[str, ...], with_slow_link: bool) -> dict[str, Any]:
    dist.init_process_group("gloo")
    if with_slow_link:
        impose(rank, hosts)
    versions = {"torch": "1", "zorse_ds": "2" if hosts[rank] == "b" else "1"}
    told: list[str] = []
    result = probe(
        rank, torch.device("cpu"), hosts[rank], versions, lambda *words: told.append(str(words))
    )
    facts = {"told": told, "notes": notes_of(result), "ranks": result.ranks}
    try:
        return {**facts, "cluster": cluster_of(result).to_dict()}
    except ClusterError as error:
        return {**facts, "error": str(error)}


def impose(rank: int, hosts: tuple[str, ...]) -> None:
    """Make this forked rank's messages to another host take their time."""
    send = dist.send

    def slow(tensor: torch.Tensor, peer: int, **options: Any) -> None:
        if hosts[peer] != hosts[rank]:
            time.sleep(LATENCY_S + tensor.numel() * tensor.element_size() / RATE)
        send(tensor, peer, **options)

    dist.send = slow


def test_ranks_tell_where_they_are_and_links_are_measured() -> None:
    results = run_ranks(5, probed, HOSTS, True, timeout_s=200)
    assert all(result["cluster"] == results[0]["cluster"] for result in results)
    cluster = Cluster.from_dict(results[0]["cluster"])
    assert [(node.name, node.types) for node in cluster.nodes] == [
        ("a", ("CPU",) * 2),
        ("b", ("CPU",) * 3),
    ]
    assert [gpu.node for gpu in cluster.gpus] == [0, 0, 1, 1, 1]
    (link,) = cluster.links
    assert link.nodes == (0, 1)
    # Two pairs at once carry twice what one does: the slow part is each message's own.
    assert 0.5 * RATE < link.gb_per_s * 1e9 / 2 < 1.1 * RATE
    assert 0.9 * LATENCY_S < link.latency_us * 1e-6 < 4 * LATENCY_S
    for node in cluster.nodes:
        assert node.intra_gb_per_s * 1e9 > 2 * RATE
        assert node.intra_latency_us * 1e-6 < LATENCY_S
        assert node.nic_gb_per_s == link.gb_per_s
    # The host's memory is shared by the ranks on it.
    a, b = (node.usable_gib or 0 for node in cluster.nodes)
    assert a * 2 == pytest.approx(b * 3, rel=1e-3)


def test_progress_and_unlike_versions_are_told() -> None:
    result, *_ = run_ranks(3, probed, ("a", "b", "b"), False, timeout_s=120)
    assert result["told"] == [
        "(0, 0, 'devices')",
        "(1, 2, 'b, ranks 1 and 2')",
        "(2, 2, 'a and b')",
    ]
    assert result["notes"] == [
        "versions of zorse_ds differ: 1 on rank 0 (a), 2 on rank 1 (b); expected the same on all"
    ]
    assert [facts.host for facts in result["ranks"]] == ["a", "b", "b"]


def test_ranks_of_a_host_must_follow_each_other() -> None:
    for result in run_ranks(3, probed, ("a", "b", "a"), False, timeout_s=120):
        assert "host 'a' has ranks 0 and 2, and others lie between" in result["error"]


def test_the_command_starts_its_ranks_through_deepspeed(tmp_path: Path) -> None:
    output = tmp_path / "cluster.json"
    command = [sys.executable, "-m", "zorse_ds.cli", "probe", "--ranks", "2", "--json"]
    result = subprocess.run(
        [*command, "-o", str(output)],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    found = json.loads(result.stdout)
    cluster = Cluster.load(output)
    assert cluster == Cluster.from_dict(found["cluster"])
    assert [gpu.type.name for gpu in cluster.gpus] == ["CPU", "CPU"]
    assert {"torch", "deepspeed", "zorse_ds", "python"} <= set(found["ranks"][1]["versions"])
    assert found["notes"] == []
    progress = result.stderr.splitlines()
    assert progress[0] == "zorse probe: devices"
    assert progress[1].startswith("zorse probe: link 1 of 1, ")


def test_deepspeed_reads_our_hostfiles() -> None:
    text = """\
# two generations
big slots=2 gpu_type=A100-SXM-40GB region=east  # the new one

desk-1 slots=3  gpu_type=RTX4090,RTX3090,RTX3090 region=west nic_gb_per_s=1.2
"""
    assert dict(_parse_hostfile(text.splitlines(keepends=True))) == {"big": 2, "desk-1": 3}
    nodes = parse_hostfile(text, "hosts").nodes
    assert {node.name: len(node.types) for node in nodes} == {"big": 2, "desk-1": 3}
