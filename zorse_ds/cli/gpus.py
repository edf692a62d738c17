"""`zorse gpus`: the GPU types and example clusters that ship with the package."""

import json
from dataclasses import asdict
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from zorse_ds.core.cluster_files import cluster_from, example_clusters
from zorse_ds.core.gpus import GB_PER_S, GIB, gpu_types


def gpus(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON for machines.")] = False,
) -> None:
    """List the GPU types and the example clusters that can be named in files and options."""
    clusters = {name: cluster_from(name) for name in example_clusters()}
    if as_json:
        types = {name: asdict(kind) for name, kind in gpu_types().items()}
        abouts = {name: cluster.about for name, cluster in clusters.items()}
        print(json.dumps({"gpu_types": types, "clusters": abouts}))
        return
    console = Console(highlight=False)
    heads = ["GPU type", "16-bit TFLOPS", "GiB", "usable", "GB/s", "bf16", "NVLink GB/s"]
    table = Table(*heads, box=None, pad_edge=False)
    for kind in gpu_types().values():
        rate = kind.memory_bytes_per_s
        table.add_row(
            kind.name,
            f"{kind.tensor_flops / 1e12:g}",
            f"{kind.memory_bytes / GIB:g}",
            f"{kind.usable_bytes / GIB:g}",
            "" if rate is None else f"{rate / GB_PER_S:g}",
            "yes" if kind.has_bf16 else "no",
            f"{kind.nvlink_bytes_per_s / GB_PER_S:g}" if kind.nvlink_bytes_per_s else "",
        )
    console.print(table)
    console.print("\nExample clusters")
    for name, cluster in clusters.items():
        console.print(f"{name}: {cluster.about}", markup=False)
