"""The simulator agrees with a brute-force reference on random plans and clusters."""

from __future__ import annotations

import pytest

from tests.random_plans import random_ministage_plan, random_plan
from tests.unit.naive_simulator import NaiveRun
from tests.unit.simulated import SAMPLE_BYTES, linear, random_cluster, setting_for
from zorse_ds.core.cluster import Cluster
from zorse_ds.core.plan import Plan
from zorse_ds.cost.setting import Setting
from zorse_ds.schedule.compile import compile_trace
from zorse_ds.simulator.simulate import simulate

# With round numbers passes end at one instant, and who is first on a link is anybody's guess.
FORWARD_S, BACKWARD_S = 0.331123, 0.717931
MEMORY_BYTES_PER_S = 0.05e9
HOST_BYTES_PER_S = 20e9


def naive_step_s(plan: Plan, hardware: Cluster, setting: Setting, interleaved: bool) -> float:
    params = setting.model.shapes[0].num_params
    numel = [params * stage.layers.size for stage in plan.stages]

    def pass_s(kind: str, stage: int, size: int) -> float:
        layers, again = plan.stages[stage].layers.size, 0
        if plan.recompute_of(stage) == "full":
            again = min(layers, plan.group_of_stage(stage).recompute_layers or layers)
        if kind == "ForwardPass":
            return FORWARD_S * size * layers
        return (BACKWARD_S * layers + FORWARD_S * again) * size

    def update_s(kind: str, rank: int, stage: int) -> float:
        group = plan.group_of_stage(stage)
        weight = next(gpu.shard_weight for gpu in group.gpus if gpu.rank == rank)
        share = weight / sum(gpu.shard_weight for gpu in group.gpus)
        if kind == "open":
            return numel[stage] * 4 / MEMORY_BYTES_PER_S
        host = hardware.gpus[rank].host_bytes_per_s
        if kind == "Prefetch":
            return numel[stage] * share * 4 / host
        stepped = numel[stage] * (share if group.zero_level else 1)
        on_host = group.offload != "none"
        if kind == "OptimizerStep":
            # Gradient read and scaled, read again; parameter and both moments read and written.
            touched = stepped * (3 + 2 * 3) * 4
            if not on_host:
                return touched / MEMORY_BYTES_PER_S
            up = stepped * 4 / host if group.zero_level < 3 else 0.0
            return touched / HOST_BYTES_PER_S + up
        width = len(group.gpus)
        touched = numel[stage] * (1 if width == 1 else 2 + (3 * width + 1) * share) * 4
        return touched / MEMORY_BYTES_PER_S + (stepped * 4 / host if on_host else 0.0)

    trace = compile_trace(plan, interleaved=interleaved)
    stage_bytes = [4.0 * each for each in numel]
    return NaiveRun(trace, hardware, SAMPLE_BYTES, stage_bytes, pass_s, update_s).run()


def compared(plan: Plan, seed: int, interleaved: bool = False) -> None:
    hardware = random_cluster(seed, plan.world_size)
    setting = setting_for(plan, hardware, linear(FORWARD_S, BACKWARD_S))
    found = simulate(compile_trace(plan, interleaved=interleaved), setting, record=False)
    wanted = naive_step_s(plan, hardware, setting, interleaved)
    assert found.step_s == pytest.approx(wanted, rel=1e-9)


@pytest.mark.parametrize("seed", range(60))
def test_plans_with_a_stage_a_group(seed: int) -> None:
    compared(random_plan(seed, zero_levels=(0, 1, 2)), seed)


@pytest.mark.parametrize("interleaved", [False, True], ids=["delayed", "interleaved"])
@pytest.mark.parametrize("seed", range(60))
def test_ministages(seed: int, interleaved: bool) -> None:
    compared(random_ministage_plan(seed, offloads=("none", "params")), seed, interleaved)
