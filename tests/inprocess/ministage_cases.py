"""Plans and jobs that the ministage tests share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn

from tests.inprocess.exact_cases import BATCH, CountedError, with_ties
from tests.inprocess.local_job import Job
from zorse_ds.core.plan import Plan

NUM_LAYERS = 7
GROUPS = {"a": [[2, 3, 1, 1], [4]], "b": [[3, 3, 5]], "c": [[1, 2], [4], [2, 2]]}
"""Micro-batches of the ranks of each group."""
HOSTS = {"round-robin": "abab", "uneven visits": "abaca", "one group": "aaa", "three": "abcabc"}
"""Which group hosts each stage."""


def ministage_plan(hosts: str, *, zero_levels: Sequence[int] = (3,), **options: Any) -> Plan:
    """`NUM_LAYERS` layers on the stages that `hosts` spells; `options` are each group's.

    Levels go round the groups; shard weights are uneven. `turnaround` is the plan's.
    """
    turnaround = options.pop("turnaround", True)
    groups: list[dict[str, Any]] = []
    rank = 0
    for index, name in enumerate(sorted(set(hosts))):
        gpus = [
            {"rank": rank + i, "micro_batches": sizes, "shard_weight": (1, 2.5, 0)[i]}
            for i, sizes in enumerate(GROUPS[name])
        ]
        rank += len(gpus)
        level = zero_levels[index % len(zero_levels)]
        groups.append({"name": name, "zero_level": level, "gpus": gpus, **options})
    bounds = [NUM_LAYERS * i // len(hosts) for i in range(len(hosts) + 1)]
    stages = [{"group": name, "layers": bounds[i : i + 2]} for i, name in enumerate(hosts)]
    return Plan.from_dict(
        {
            "global_batch_size": BATCH,
            "schedule": "ministage",
            "turnaround": turnaround,
            "groups": groups,
            "stages": stages,
        }
    )


def layers(*ties: Sequence[int]) -> list[nn.Module]:
    """Blocks, of which those of one tie are the same module."""
    return with_ties(NUM_LAYERS, *ties)


def job(*ties: Sequence[int], **options: Any) -> Job:
    """Blocks with a loss that counts its targets."""
    return Job(layers(*ties), CountedError(), **options)
