"""`zorse probe`: measure the GPUs and links that are there, and write them as a cluster file."""

import json
import os
import socket
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from zorse_ds.cli.probe_launch import PROGRESS, launched_probe, print_in_lines
from zorse_ds.core.cluster import Cluster

if TYPE_CHECKING:
    from zorse_ds.profiler.probe_facts import ProbeResult

TIMEOUT_S = 180.0
"""How long a rank waits for another."""
_VERSIONED = ("zorse_ds", "torch", "deepspeed", "transformers")


def probe(
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Write the cluster here, as JSON.")
    ] = None,
    hostfile: Annotated[
        Path | None, typer.Option(help="DeepSpeed's hostfile; default: this machine alone.")
    ] = None,
    num_ranks: Annotated[
        int | None, typer.Option("--ranks", min=1, help="Ranks on each host; default: its GPUs.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON for machines.")] = False,
    as_lines: Annotated[bool, typer.Option("--lines", hidden=True)] = False,
) -> None:
    """Measure the GPUs here, or on all hosts of a hostfile, and the links between them.

    Starts DeepSpeed's launcher. Under a launcher it is one of the ranks:
    deepspeed --hostfile HOSTS --no_local_rank --module zorse_ds.cli probe -o cluster.json
    """
    if "RANK" in os.environ:
        found = _probe_as_rank()
        if found is None:
            return
        if as_lines:
            print_in_lines(json.dumps(found))
            return
    else:
        found = launched_probe(hostfile, num_ranks)
    cluster = Cluster.from_dict(found["cluster"])
    if output is not None:
        cluster.save(output)
    if as_json:
        print(json.dumps(found))
        return
    _print_tables(cluster, found)


def _probe_as_rank() -> dict[str, Any] | None:
    """Take part as the launcher's environment says. What was found, on rank 0; None elsewhere."""
    from datetime import timedelta

    import torch
    import torch.distributed as dist

    from zorse_ds.profiler.probe import probe as probe_ranks

    rank = int(os.environ["RANK"])
    has_cuda = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0))) if has_cuda else None
    if device is not None:
        # A pair that cannot talk shall be an error here, not the end of the process.
        os.environ.setdefault("TORCH_NCCL_BLOCKING_WAIT", "1")
        torch.cuda.set_device(device)
    backend = "cpu:gloo,cuda:nccl" if has_cuda else "gloo"
    dist.init_process_group(backend, timeout=timedelta(seconds=TIMEOUT_S))
    result = probe_ranks(
        rank, device or torch.device("cpu"), socket.gethostname(), _versions(), _reporter(rank)
    )
    dist.destroy_process_group()
    return _found(result) if rank == 0 else None


def _found(result: "ProbeResult") -> dict[str, Any]:
    """What is printed, as plain data."""
    from dataclasses import asdict

    from zorse_ds.profiler.probe_cluster import cluster_of, notes_of

    return {
        "cluster": cluster_of(result).to_dict(),
        "notes": notes_of(result),
        "ranks": [asdict(each) for each in result.ranks],
        "links": [asdict(each) for each in result.links],
    }


def _versions() -> dict[str, str]:
    """Of what has to agree between ranks."""
    import platform

    import torch

    from zorse_ds.profiler.probe_cuda import driver_version

    found: dict[str, str | None] = {"python": platform.python_version()}
    for name in _VERSIONED:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = None
    found |= {"cuda": torch.version.cuda, "hip": torch.version.hip, "driver": driver_version()}
    return {name: version for name, version in found.items() if version is not None}


def _reporter(rank: int) -> Any:
    def report(done: int, total: int, what: str) -> None:
        if rank == 0:
            number = f"link {done} of {total}, " if done else ""
            typer.echo(f"{PROGRESS}{number}{what}", err=True)

    return report


def _print_tables(cluster: Cluster, found: dict[str, Any]) -> None:
    console = Console(highlight=False)
    console.print(cluster.about)
    console.print(_nodes_table(cluster))
    if cluster.links:
        console.print(_links_table(cluster))
    versions = found["ranks"][0]["versions"]
    console.print("Versions: " + ", ".join(f"{name} {text}" for name, text in versions.items()))
    for note in found["notes"]:
        console.print(f"Note: {note}", markup=False)


def _table(title: str, heads: list[str]) -> Table:
    table = Table(*heads, title=title, title_justify="left", title_style="bold", box=None)
    table.pad_edge = False
    return table


def _nodes_table(cluster: Cluster) -> Table:
    heads = ["host", "GPUs", "GiB each", "inside GB/s", "µs", "direct", "host copy GB/s"]
    table = _table("Nodes", heads)
    for node in cluster.nodes:
        counts = {name: node.types.count(name) for name in dict.fromkeys(node.types)}
        table.add_row(
            str(node.name),
            ", ".join(f"{count} x {name}" for name, count in counts.items()),
            f"{node.usable_gib:g}",
            f"{node.intra_gb_per_s:g}",
            f"{node.intra_latency_us:g}",
            "yes" if node.intra_direct else "no",
            f"{node.host_gb_per_s:g}",
        )
    return table


def _links_table(cluster: Cluster) -> Table:
    table = _table("Links between nodes, one way", ["nodes", "GB/s", "µs", "direct"])
    for link in cluster.links:
        names = " - ".join(cluster.node_name(node) for node in link.nodes)
        direct = "yes" if link.direct else "no"
        table.add_row(names, f"{link.gb_per_s:g}", f"{link.latency_us:g}", direct)
    return table
