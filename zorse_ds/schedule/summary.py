"""The facts of a plan that follow from its compiled step, as plain data for people and machines."""

from collections import Counter
from typing import Any, cast

from zorse_ds.core.layout import Transfer
from zorse_ds.core.plan import Dtype, GpuGroup, GpuShare, Plan
from zorse_ds.schedule.grid import Grid, grid_of
from zorse_ds.schedule.trace import Trace

SHARDED_FROM = {"optimizer": 1, "gradients": 2, "parameters": 3}
"""State → the lowest `zero_level` that cuts it over the ranks of a group."""

CONFIGS_DTYPE = "config's"
"""Stands for the dtype of a group that the plan leaves to the DeepSpeed JSON."""


def summary_of(trace: Trace) -> dict[str, Any]:
    """Everything `zorse show` tells, as JSON-like data; shares are 0–1, times are ticks."""
    plan = trace.plan
    grid = grid_of(trace)
    return {
        "global_batch_size": plan.global_batch_size,
        "schedule": plan.schedule,
        "world_size": plan.world_size,
        "num_layers": plan.num_layers,
        "num_instructions": len(trace.instructions),
        "digest": trace.digest,
        "bubble_share": grid.bubble_share,
        "stages": [_stage(trace, stage) for stage in range(len(plan.stages))],
        "ranks": [_rank(trace, grid, group, gpu) for group in plan.groups for gpu in group.gpus],
        "boundaries": [_boundary(plan, transfers) for transfers in trace.layout.transfers],
        "ticks": grid.ticks,
        "order": [
            {
                "rank": compute.rank,
                "stage": compute.stage,
                "micro_batch": compute.micro_batch,
                "phase": compute.phase,
                "start": compute.start,
                "stop": compute.stop,
            }
            for compute in trace.order
        ],
    }


def held_shares(group: GpuGroup, gpu: GpuShare) -> dict[str, float]:
    """Which share of each state of its stages a rank holds, by its weight and the zero level."""
    whole = sum(each.shard_weight for each in group.gpus)
    return {
        state: gpu.shard_weight / whole if group.zero_level >= level else 1.0
        for state, level in SHARDED_FROM.items()
    }


def _stage(trace: Trace, stage: int) -> dict[str, Any]:
    group, recomputed = trace.plan.group_of_stage(stage), trace.plan.recomputed(stage)
    return {
        "stage": stage,
        "layers": list(trace.plan.stages[stage].layers),
        "group": group.name,
        "ranks": list(group.ranks),
        "num_micro_batches": len(trace.layout.micro_batches[stage]),
        "zero_level": group.zero_level,
        "reduce_after": group.reduce_after,
        "recompute": trace.plan.recompute_of(stage),
        "recompute_every": recomputed.every if recomputed else 0,
        "recompute_layers": recomputed.layers.size,
        "offload": group.offload,
        "dtype": group.dtype or CONFIGS_DTYPE,
    }


def _rank(trace: Trace, grid: Grid, group: GpuGroup, gpu: GpuShare) -> dict[str, Any]:
    stages = [i for i, stage in enumerate(trace.plan.stages) if stage.group == group.name]
    return {
        "rank": gpu.rank,
        "group": group.name,
        "stages": stages,
        "micro_batches": list(gpu.micro_batches),
        "num_samples": gpu.num_samples,
        "in_flight_limits": [trace.limits.get((gpu.rank, stage), 0) for stage in stages],
        "shard_weight": gpu.shard_weight,
        "held_shares": held_shares(group, gpu),
        "idle_share": grid.idle_share(gpu.rank),
    }


def _boundary(plan: Plan, transfers: tuple[Transfer, ...]) -> dict[str, Any]:
    sends = Counter(transfer.source for transfer in transfers)
    receives = Counter(transfer.target for transfer in transfers)
    # The sender converts: activations to the dtype of the stage after, gradients to that before.
    unlike = plan.boundary_dtypes(cast(Dtype, CONFIGS_DTYPE))
    own = plan.group_of_stage(transfers[0].boundary).dtype or CONFIGS_DTYPE
    gradients, activations = unlike.get(transfers[0].boundary, (own, own))
    return {
        "activations_dtype": activations,
        "gradients_dtype": gradients,
        "from_stage": transfers[0].boundary,
        "to_stage": transfers[0].boundary + 1,
        "num_transfers": len(transfers),
        "num_local": sum(transfer.is_local for transfer in transfers),
        "most_targets": max(sends.values()),
        "most_sources": max(receives.values()),
    }
