"""Plans rehearsed by the real engine: exact, as simulated, refused where they do not fit."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.ranks.launched import environment
from zorse_ds.core.cluster import Cluster
from zorse_ds.core.model import ModelShape
from zorse_ds.core.plan import Plan
from zorse_ds.cost.layer_times import timer_of
from zorse_ds.cost.setting import Setting
from zorse_ds.errors import RehearsalError
from zorse_ds.integrations.deepspeed.module import init_distributed
from zorse_ds.integrations.deepspeed.rehearsal_plan import (
    PlanRun,
    RankRun,
    check_rehearsable,
    make_engine,
    rehearse_rank,
)
from zorse_ds.rehearsal.clock import Pace
from zorse_ds.rehearsal.figures import compared
from zorse_ds.rehearsal.miniature import Miniature
from zorse_ds.rehearsal.pool import VirtualMemoryError
from zorse_ds.rehearsal.processes import run_processes
from zorse_ds.schedule.compile import compile_trace
from zorse_ds.simulator.simulate import simulate

CLUSTER = {
    "nodes": [
        {"gpu_type": "A10G", "num_gpus": 1, "intra_gb_per_s": 16, "nic_gb_per_s": 1},
        {"gpu_type": "T4", "num_gpus": 2, "intra_gb_per_s": 12, "nic_gb_per_s": 1},
    ]
}
MODEL = ModelShape.llama("small", 4, 2048, 5632, 16)
SETTING = Setting(Cluster.from_dict(CLUSTER), MODEL, timer_of(None), 1024, dtype="float16")
FAST = {"name": "fast", "gpus": [{"rank": 0, "micro_batches": [3, 3, 3, 3]}]}
SLOW = {
    "name": "slow",
    "gpus": [
        {"rank": 1, "micro_batches": [2, 2, 2, 1], "shard_weight": 2.0},
        {"rank": 2, "micro_batches": [1, 2, 2]},
    ],
}


def plan_of(schedule: str, level: int, cuts: list[tuple[str, int]], **fast: Any) -> Plan:
    stages, first = [], 0
    for name, size in cuts:
        stages.append({"group": name, "layers": [first, first + size]})
        first += size
    groups = [{**FAST, **fast}, {**SLOW, "zero_level": level}]
    return Plan.from_dict(
        {"global_batch_size": 12, "schedule": schedule, "groups": groups, "stages": stages}
    )


OFTEN = {
    "name": "all",
    "zero_level": 2,
    "reduce_after": "micro_batch",
    "gpus": [
        {"rank": 0, "micro_batches": [3, 2, 2], "shard_weight": 2.0},
        {"rank": 1, "micro_batches": [1, 1]},
        {"rank": 2, "micro_batches": [1, 1, 1]},
    ],
}
PLANS = {
    "1f1b": plan_of("1f1b", 2, [("fast", 4), ("slow", 2)]),
    "gpipe": plan_of("gpipe", 1, [("fast", 4), ("slow", 2)], recompute="full"),
    "ministage": plan_of("ministage", 3, [("fast", 2), ("slow", 1), ("fast", 2), ("slow", 1)]),
    "one stage, summed often": Plan.from_dict(
        {
            "global_batch_size": 12,
            "groups": [OFTEN],
            "stages": [{"group": "all", "layers": [0, 6]}],
        }
    ),
}


def bare_losses(run: PlanRun, rank: int, tell: Any) -> list[float]:
    """The same training with no virtual GPU in sight."""
    torch.set_num_threads(1)
    init_distributed()
    engine = make_engine(run, Miniature(run.setting))
    return [float(engine.train_batch()) for _ in range(run.num_steps)]


def rehearsed(plan: Plan, scale: float, steps: int = 3) -> list[RankRun]:
    run = PlanRun(plan, SETTING, Pace(scale), steps)
    return run_processes(plan.world_size, partial(rehearse_rank, run))


@pytest.mark.parametrize("name", PLANS)
def test_a_rehearsal_is_exact_and_as_simulated(name: str) -> None:
    plan = PLANS[name]
    simulation = simulate(compile_trace(plan), SETTING, record=False)
    runs = rehearsed(plan, 0)
    comparison = compared([own.steps[-1] for own in runs], simulation)
    assert comparison.worst_share < 0.05, comparison
    bare_run = PlanRun(plan, SETTING, Pace(0), 3)
    bare = run_processes(plan.world_size, partial(bare_losses, bare_run))
    assert list(runs[0].losses) == bare[0]
    assert len(set(bare[0])) == 3


def test_real_time_follows_and_changes_nothing() -> None:
    quick, timed = (rehearsed(PLANS["ministage"], scale) for scale in (0, 3.0))
    for step in range(3):
        for own, same in zip(timed, quick, strict=True):
            assert own.steps[step].virtual_s == same.steps[step].virtual_s
            assert own.steps[step].timeline == same.steps[step].timeline
    walls = [max(own.steps[i].wall_s / own.steps[i].virtual_s for own in timed) for i in (1, 2)]
    assert 1.0 <= min(walls) < 1.05


def test_a_plan_that_does_not_fit_ends_as_on_a_gpu() -> None:
    nodes = [
        {**node, "usable_gib": 3.0 if "T4" in str(node) else 22.0} for node in CLUSTER["nodes"]
    ]
    setting = replace(SETTING, cluster=Cluster.from_dict({"nodes": nodes}))
    # In its first step an optimizer has no moments yet.
    run = PlanRun(PLANS["1f1b"], setting, Pace(0), 2)
    with pytest.raises(VirtualMemoryError, match=r"out of memory .*rank [12] \(T4\) .*of 3.00 GiB"):
        run_processes(3, partial(rehearse_rank, run))


def test_what_virtual_gpus_lack_is_refused() -> None:
    plan = plan_of("1f1b", 2, [("fast", 4), ("slow", 2)], offload="params", zero_level=2)
    with pytest.raises(RehearsalError, match="group 'fast' has offload 'params'"):
        check_rehearsable(plan, SETTING)
    tied = replace(SETTING, model=ModelShape.llama("t", 4, 2048, 5632, 16, tied=True))
    with pytest.raises(RehearsalError, match="ties its head"):
        check_rehearsable(PLANS["1f1b"], tied)


def test_the_command_tells_measured_beside_simulated(tmp_path: Path) -> None:
    PLANS["1f1b"].save(tmp_path / "plan.json")
    Cluster.from_dict(CLUSTER).save(tmp_path / "cluster.json")
    MODEL.save(tmp_path / "shape.json")
    command = [sys.executable, "-m", "zorse_ds.cli", "rehearse", "plan.json", "--json"]
    command += ["--cluster", "cluster.json", "--shape", "shape.json", "--seq-len", "1024"]
    command += ["--dtype", "float16", "--trace", "trace.json", "--time-scale", "0"]

    def rehearse(*more: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*command, *more], cwd=tmp_path, env=environment(), capture_output=True, text=True,
            timeout=240, check=False,
        )  # fmt: skip

    mistake = rehearse("--picture", "step.gif")
    assert mistake.returncode == 2
    assert mistake.stderr.count("\n") == 1 and "ends in .png or .svg" in mistake.stderr
    result = rehearse("--tolerance", "0")
    assert result.returncode == 1, result.stderr
    facts = json.loads(result.stdout)
    assert [rank["gpu_type"] for rank in facts["ranks"]] == ["A10G", "T4", "T4"]
    assert facts["step_s"]["measured"] == pytest.approx(facts["step_s"]["simulated"], rel=0.05)
    assert 0 < facts["worst_share"] < 0.05
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert sum(event["name"] == "ForwardPass" for event in events) == 4 + 4 + 3
