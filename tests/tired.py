"""An A10G beside a group of T4s, one of which may be tired: slow, and nothing else."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import product
from typing import Any

from zorse_ds.core.cluster import Cluster
from zorse_ds.core.model import ModelShape
from zorse_ds.core.plan import Plan
from zorse_ds.cost.layer_times import timer_of
from zorse_ds.cost.setting import PassTimes, Setting

MODEL = ModelShape.llama("small", 4, 2048, 5632, 16)
TIRED = "T4-tired"
_NODE = {"intra_gb_per_s": 12, "nic_gb_per_s": 1}
_FIGURES = {"tensor_tflops": 65, "fp32_tflops": 8.1, "memory_gib": 16, "usable_gib": 15}


def setting_of(num_t4s: int, tired: int | None = None, factor: float = 1.0) -> Setting:
    """Rank 0 is the A10G; passes of rank `tired` take `factor` times as long."""
    names = ["A10G", *["T4"] * num_t4s]
    if tired is not None:
        names[tired] = TIRED
    nodes = [{"gpu_type": name, "num_gpus": 1, **_NODE} for name in names]
    types = {TIRED: {**_FIGURES, "memory_gb_per_s": 320}} if tired is not None else {}
    timer = timer_of(None)

    def times(gpu_type: str, *where: Any) -> PassTimes:
        if gpu_type != TIRED:
            return timer(gpu_type, *where)
        found = timer("T4", *where)
        return replace(
            found, forward_s=found.forward_s * factor, backward_s=found.backward_s * factor
        )

    cluster = Cluster.from_dict({"types": types, "nodes": nodes})
    return Setting(cluster, MODEL, times, 1024, dtype="float16")


def plan_of(
    schedule: str,
    stages: Sequence[tuple[str, int]],
    sizes: Sequence[int],
    counts: Sequence[int],
    zero_level: int = 2,
) -> Plan:
    """`stages`: "fast" (the A10G, in micro-batches of 2) or "slow", and how many layers.

    `sizes` and `counts` of micro-batches: of each T4.
    """
    batch = sum(size * number for size, number in zip(sizes, counts, strict=True))
    gpus = [
        {"rank": 1 + i, "micro_batches": [size] * number}
        for i, (size, number) in enumerate(zip(sizes, counts, strict=True))
    ]
    made, first = [], 0
    for name, size in stages:
        made.append({"group": name, "layers": [first, first + size]})
        first += size
    fast = {"name": "fast", "gpus": [{"rank": 0, "micro_batches": [2] * (batch // 2)}]}
    slow = {"name": "slow", "zero_level": zero_level, "gpus": gpus}
    return Plan.from_dict(
        {
            "global_batch_size": batch,
            "schedule": schedule,
            "groups": [fast, slow],
            "stages": made,
        }
    )


def splits(batch: int, sizes: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """Every way to share a batch in micro-batches of these sizes, at least one each."""
    for counts in product(*(range(1, batch // size + 1) for size in sizes)):
        if sum(number * size for number, size in zip(counts, sizes, strict=True)) == batch:
            yield counts
