"""Random valid plans for tests: ragged groups, sizes, weights and layers, from a seed alone."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

from zorse_ds.core.plan import Plan

SHARD_WEIGHTS = (0, 1, 1, 2, 2.5)


def random_plan(
    seed: int,
    *,
    max_groups: int = 4,
    max_width: int = 3,
    max_batch: int = 17,
    zero_levels: Sequence[int] = (0, 1, 2),
    schedules: Sequence[str] = ("1f1b", "gpipe"),
    num_layers: int | None = None,
) -> Plan:
    """A valid plan, the same for the same arguments.

    1 to `max_groups` groups of 1 to `max_width` ranks share a batch of `max_width` to `max_batch`
    samples. `num_layers` layers (default: one to five a group) are cut unevenly; with fewer layers
    than groups there are fewer groups.
    """
    return Plan.from_dict(
        random_plan_dict(
            seed,
            max_groups=max_groups,
            max_width=max_width,
            max_batch=max_batch,
            zero_levels=zero_levels,
            schedules=schedules,
            num_layers=num_layers,
        )
    )


def random_plan_dict(
    seed: int,
    *,
    max_groups: int = 4,
    max_width: int = 3,
    max_batch: int = 17,
    zero_levels: Sequence[int] = (0, 1, 2),
    schedules: Sequence[str] = ("1f1b", "gpipe"),
    num_layers: int | None = None,
) -> dict[str, Any]:
    """What `random_plan` parses: the same plan as JSON-like data, to be changed by a test."""
    rng = random.Random(seed)
    num_groups = rng.randint(1, min(max_groups, num_layers or max_groups))
    batch_size = rng.randint(max_width, max_batch)
    layers = num_layers or num_groups + rng.randint(0, 4 * num_groups)
    groups, stages = [], []
    first_rank = first_layer = 0
    for index, depth in enumerate(_cut(rng, layers, num_groups)):
        gpus = _gpus(rng, first_rank, rng.randint(1, max_width), batch_size)
        groups.append({"name": f"g{index}", "zero_level": rng.choice(zero_levels), "gpus": gpus})
        stages.append({"group": f"g{index}", "layers": [first_layer, first_layer + depth]})
        first_rank += len(gpus)
        first_layer += depth
    return {
        "version": 1,
        "global_batch_size": batch_size,
        "schedule": rng.choice(schedules),
        "groups": groups,
        "stages": stages,
    }


def uniform_plan(
    num_stages: int, width: int, micro_batches_a_rank: int, schedule: str = "1f1b"
) -> Plan:
    """A textbook pipeline: `num_stages` groups of `width` ranks, micro-batches of one sample."""
    gpus = [
        [
            {"rank": stage * width + i, "micro_batches": [1] * micro_batches_a_rank}
            for i in range(width)
        ]
        for stage in range(num_stages)
    ]
    return Plan.from_dict(
        {
            "version": 1,
            "global_batch_size": width * micro_batches_a_rank,
            "schedule": schedule,
            "groups": [{"name": f"g{i}", "gpus": own} for i, own in enumerate(gpus)],
            "stages": [{"group": f"g{i}", "layers": [i, i + 1]} for i in range(num_stages)],
        }
    )


def _gpus(rng: random.Random, first_rank: int, width: int, batch_size: int) -> list[dict[str, Any]]:
    gpus = []
    for i, share in enumerate(_cut(rng, batch_size, width)):
        sizes = _cut(rng, share, rng.randint(1, share))
        weight = rng.choice(SHARD_WEIGHTS)
        gpus.append({"rank": first_rank + i, "micro_batches": sizes, "shard_weight": weight})
    if not any(gpu["shard_weight"] for gpu in gpus):
        gpus[0]["shard_weight"] = 1
    return gpus


def _cut(rng: random.Random, total: int, parts: int) -> list[int]:
    """`total` as a sum of `parts` numbers of at least 1."""
    cuts = sorted(rng.sample(range(1, total), parts - 1))
    return [stop - start for start, stop in zip([0, *cuts], [*cuts, total], strict=True)]
