"""`zorse run --cluster`: a job that lost a GPU goes on under a plan that the planner makes then."""

from __future__ import annotations

import math
from pathlib import Path

from tests.ranks.checkpoint_jobs import PLANS, SIZE, world_size
from tests.ranks.harness import run_ranks
from tests.ranks.test_run import (
    JOB,
    KILL,
    KILLED_IN,
    PLAN,
    deepspeed,
    losses_in,
    uninterrupted,
    zorse_run,
)
from zorse_ds.core.cluster import Cluster
from zorse_ds.core.model import ModelShape
from zorse_ds.core.plan import Plan

NODE = {"gpu_types": ["A100-PCIE-40GB", "T4", "T4"], "intra_gb_per_s": 12, "nic_gb_per_s": 1}


def test_the_planner_plans_for_the_gpus_that_answer(tmp_path: Path) -> None:
    """The third GPU is lost; the first two are unlike, and so are their shares."""
    whole = run_ranks(world_size(PLAN), uninterrupted, PLAN)[0]
    Cluster.from_dict({"nodes": [NODE]}).save(tmp_path / "cluster.json")
    shape = ModelShape.llama("six layers", 4, 1024, 2816, 16)
    assert shape.num_layers == Plan.from_dict(PLANS[PLAN]).num_layers
    shape.save(tmp_path / "shape.json")
    options = ["--cluster", "cluster.json", "--shape", "shape.json", "--seq-len", "512"]
    options += ["--dtype", "float32", "--check", "echo 0 1"]
    told, text = zorse_run(tmp_path, *options, "--", *deepspeed(3), str(JOB), ".", *KILL)
    first, second = told["attempts"]
    assert told["exit_code"] == 0, text
    assert (first["ranks"], second["ranks"]) == (3, 2)
    assert (first["last_step"], second["first_step"]) == (KILLED_IN - 1, KILLED_IN), text
    assert "2 of 3 GPUs answer; planned anew" in text
    new = Plan.load(second["plan"])
    assert (new.world_size, new.global_batch_size, new.num_layers) == (2, SIZE, 6)
    work = {
        rank: sum(new.stages[at].layers.size for at in new.stages_of_rank(rank))
        * next(gpu.num_samples for gpu in new.group_of_rank(rank).gpus if gpu.rank == rank)
        for rank in range(2)
    }
    assert work[0] > 1.5 * work[1], "an A100 does more than a T4"
    losses = losses_in(tmp_path)
    for step, expected in enumerate(whole, start=1):
        tolerance = 0.0 if step < KILLED_IN else 1e-6
        assert math.isclose(losses[step], expected, rel_tol=tolerance), f"step {step}"
