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
        **_with_ahead(seed, {"schedule": rng.choice(schedules)}, groups),
        "groups": groups,
        "stages": stages,
    }


def _with_ahead(
    seed: int, chosen: dict[str, Any], groups: Sequence[dict[str, Any]]
) -> dict[str, Any]:
    """What was chosen of a plan; where it turns around, stages may be further ahead."""
    if chosen["schedule"] == "gpipe" or not chosen.get("turnaround", True):
        return chosen
    most = max(len(gpu["micro_batches"]) for group in groups for gpu in group["gpus"])
    ahead = random.Random(f"ahead {seed}").choice((0, 0, 1, 2))
    return {**chosen, "ahead": min(ahead, most)}


def random_ministage_plan(
    seed: int,
    *,
    max_groups: int = 4,
    max_width: int = 3,
    max_stages_a_group: int = 4,
    max_batch: int = 14,
    zero_levels: Sequence[int] = (0, 1, 2, 3),
    turnaround: bool | None = None,
    recompute: bool = True,
    offloads: Sequence[str] = ("none",),
) -> Plan:
    """A valid plan of schedule "ministage", the same for the same arguments.

    1 to `max_groups` groups visit 1 to `max_stages_a_group` stages each, round-robin or in any
    order and with unlike numbers of stages; 1 to 4 layers more than stages are cut unevenly.
    `turnaround`: None leaves it to the seed; so does `recompute`, else nothing is recomputed.
    """
    rng = random.Random(seed)
    num_groups = rng.randint(1, max_groups)
    hosts = _hosts(rng, num_groups, max_stages_a_group)
    batch_size = rng.randint(max_width, max_batch)
    groups: list[dict[str, Any]] = []
    first_rank = 0
    for index in range(num_groups):
        gpus = _gpus(rng, first_rank, rng.randint(1, max_width), batch_size)
        again = _recompute(rng) if recompute else {}
        own = {"zero_level": rng.choice(zero_levels), "offload": rng.choice(offloads)}
        groups.append({"name": f"g{index}", "gpus": gpus, **own, **again})
        first_rank += len(gpus)
    depths = _cut(rng, len(hosts) + rng.randint(0, 4), len(hosts))
    bounds = [sum(depths[:i]) for i in range(len(depths) + 1)]
    stages = [
        {"group": f"g{host}", "layers": [bounds[i], bounds[i + 1]]} for i, host in enumerate(hosts)
    ]
    turns = rng.random() < 0.75
    turns = turns if turnaround is None else turnaround
    return Plan.from_dict(
        {
            "global_batch_size": batch_size,
            **_with_ahead(seed, {"schedule": "ministage", "turnaround": turns}, groups),
            "groups": groups,
            "stages": stages,
        }
    )


def _hosts(rng: random.Random, num_groups: int, max_stages: int) -> list[int]:
    """The group of each stage: round-robin in two of three cases, else any order."""
    if rng.random() < 2 / 3:
        return [i % num_groups for i in range(num_groups * rng.randint(1, max_stages))]
    hosts = [group for group in range(num_groups) for _ in range(rng.randint(1, max_stages))]
    rng.shuffle(hosts)
    return hosts


def _recompute(rng: random.Random) -> dict[str, Any]:
    mode = rng.choice(["none", "none", "full"])
    every, number = rng.choice([1, 2]), rng.choice([None, 1, 2])
    if mode == "none":
        return {}
    some = {} if number is None else {"recompute_layers": number}
    return {"recompute": mode, "recompute_every": every, **some}


def uniform_ministage_plan(
    num_groups: int,
    width: int,
    micro_batches_a_rank: int,
    stages_a_group: int,
    *,
    turnaround: bool = True,
    zero_level: int = 3,
) -> Plan:
    """Equal groups visit equal stages round-robin; micro-batches of one sample."""
    plan = uniform_plan(num_groups, width, micro_batches_a_rank).to_dict()
    groups = [{**group, "zero_level": zero_level} for group in plan["groups"]]
    stages = [
        {"group": f"g{i % num_groups}", "layers": [i, i + 1]}
        for i in range(num_groups * stages_a_group)
    ]
    ministage = {"schedule": "ministage", "turnaround": turnaround}
    return Plan.from_dict({**plan, **ministage, "groups": groups, "stages": stages})


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
