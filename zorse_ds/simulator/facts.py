"""A simulation as plain data, for people and machines."""

from dataclasses import asdict
from typing import Any

from zorse_ds.cost.setting import Setting
from zorse_ds.simulator.simulate import Simulation, ceiling_samples_per_s


def facts_of(simulation: Simulation, setting: Setting) -> dict[str, Any]:
    """Everything `zorse simulate` tells, as JSON-like data; shares are 0–1."""
    resource, share = simulation.limit
    return {
        "step_s": simulation.step_s,
        "tokens_per_s": simulation.tokens_per_s,
        "achieved_flops_per_s": simulation.achieved_flops_per_s,
        "ceiling_share": simulation.ceiling_share,
        "ceiling_samples_per_s": ceiling_samples_per_s(setting),
        "bubble_share": simulation.bubble_share,
        "limit": {"resource": resource, "busy_share": share},
        "fits": all(own.fits for own in simulation.memory.values()),
        "ranks": [_rank(simulation, setting, rank) for rank in simulation.memory],
        "lanes": [
            {"lane": name, "busy_share": busy} for name, busy in simulation.lane_share.items()
        ],
    }


def _rank(simulation: Simulation, setting: Setting, rank: int) -> dict[str, Any]:
    gpu = setting.cluster.gpus[rank]
    memory = simulation.memory[rank]
    busy = simulation.busy_share[rank]
    return {
        "rank": rank,
        "gpu_type": gpu.type.name,
        "node": gpu.node,
        "group": simulation.plan.group_of_rank(rank).name,
        "busy_share": busy,
        "idle_share": 1 - busy,
        "peak_bytes": memory.total_bytes,
        "fits": memory.fits,
        "memory": asdict(memory),
    }
