"""Settings for tests of cost and simulator: seconds and bytes that can be worked out by hand."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from zorse_ds.core.cluster import Cluster
from zorse_ds.core.model import LayerShape, ModelShape, llama_block
from zorse_ds.core.plan import Dtype, Plan
from zorse_ds.cost.setting import PassTimes, Setting

FAST = 1e12
"""GB/s and TFLOPS that take no time."""
HIDDEN, LENGTH = 250, 1000
SAMPLE_BYTES = 4 * HIDDEN * LENGTH
"""What a float32 sample of a hidden state takes: a megabyte."""


def cluster(*nodes: int, **figures: Any) -> Cluster:
    """Nodes of so many GPUs of type X, with links that take no time unless `figures` say so."""
    links = {
        "intra_gb_per_s": FAST,
        "intra_latency_us": 0.0,
        "nic_gb_per_s": FAST,
        "nic_latency_us": 0.0,
    }
    kind = {"fp32_tflops": 1.0, "memory_gib": 16.0, "memory_gb_per_s": FAST, "bf16": True}
    return Cluster.from_dict(
        {
            "types": {"X": kind},
            "nodes": [{"gpu_type": "X", "num_gpus": count, **links, **figures} for count in nodes],
        }
    )


def equal_blocks(count: int) -> ModelShape:
    """A model whose pipeline layers are all alike."""
    kinds = {"block": llama_block(HIDDEN, 500, 5)}
    return ModelShape(name="blocks", kinds=kinds, layers=("block",) * count)


def layers_for(plan: Plan) -> ModelShape:
    """Equal blocks, as many as a plan wants."""
    return equal_blocks(plan.num_layers)


def linear(forward_s: float, backward_s: float) -> Callable[..., PassTimes]:
    """A timer: seconds of a layer per sample."""

    def timer(
        gpu_type: str, kind: str, shape: LayerShape, dtype: Dtype, seq_len: int, size: int
    ) -> PassTimes:
        return PassTimes(forward_s * size, backward_s * size, "measured")

    return timer


def setting_for(
    plan: Plan, hardware: Cluster, timer: Callable[..., PassTimes] | None = None, **more: Any
) -> Setting:
    """A float32 setting of equal blocks; a layer takes 1 s forward and 2 s backward a sample."""
    model = more.pop("model", None) or layers_for(plan)
    own: dict[str, Any] = {"dtype": "float32", "reserve_bytes": 0, **more}
    return Setting(hardware, model, timer or linear(1.0, 2.0), LENGTH, **own)


def random_cluster(seed: int, ranks: int) -> Cluster:
    """One to four GPUs a node, unlike links, for so many ranks."""
    rng = random.Random(seed)
    nodes: list[dict[str, Any]] = []
    left = ranks
    while left:
        count = rng.randint(1, min(4, left))
        left -= count
        nodes.append(
            {
                "gpu_type": "X",
                "num_gpus": count,
                "intra_gb_per_s": rng.uniform(0.002, 0.02),
                "intra_latency_us": rng.uniform(0, 1e5),
                "nic_gb_per_s": rng.uniform(0.0005, 0.01),
                "nic_latency_us": rng.uniform(0, 3e5),
                "host_gb_per_s": rng.uniform(0.001, 0.01),
            }
        )
    kind = {"fp32_tflops": 1.0, "memory_gib": 16.0, "memory_gb_per_s": 0.05}
    return Cluster.from_dict({"types": {"X": kind}, "nodes": nodes})


def plan_of(
    groups: Mapping[str, Mapping[int, Sequence[int]]],
    stages: Sequence[tuple[str, int]],
    schedule: str = "1f1b",
    **settings: Any,
) -> Plan:
    """Groups as rank → micro-batch sizes; stages as (group, number of layers)."""
    cuts, first = [], 0
    for group, size in stages:
        cuts.append({"group": group, "layers": [first, first + size]})
        first += size
    some = next(iter(groups.values()))
    return Plan.from_dict(
        {
            "global_batch_size": sum(sum(sizes) for sizes in some.values()),
            "schedule": schedule,
            "groups": [
                {
                    "name": name,
                    "gpus": [{"rank": r, "micro_batches": [*s]} for r, s in ranks.items()],
                    **settings,
                }
                for name, ranks in groups.items()
            ],
            "stages": cuts,
        }
    )
