"""Every kind of optimizer state comes back: moments, momentum, counts and products."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.inprocess.checkpoint_cases import PLANS, SAVED_AT, STEPS, differ, job, loading, saving
from tests.inprocess.exact_cases import plainly
from tests.inprocess.local_job import run
from zorse_ds.errors import CheckpointError
from zorse_ds.runtime.optimizer import ShardedOptimizer

OPTIMIZERS = {
    "SGD": partial(torch.optim.SGD, lr=0.05),
    "momentum": partial(torch.optim.SGD, lr=0.05, momentum=0.9, nesterov=True),
    "Adagrad": partial(torch.optim.Adagrad, lr=0.02, eps=1e-2),
    "RMSprop": partial(torch.optim.RMSprop, lr=0.005, momentum=0.5, centered=True, eps=1e-1),
    "NAdam": partial(torch.optim.NAdam, lr=0.01, eps=1e-2),
    "AMSGrad": partial(torch.optim.Adam, lr=0.01, amsgrad=True, eps=1e-2),
    "RAdam": partial(torch.optim.RAdam, lr=0.01, eps=1e-2),
    "Adadelta": partial(torch.optim.Adadelta, lr=0.1, eps=1e-2),
    "ASGD": partial(torch.optim.ASGD, lr=0.05),
    "Adamax": partial(torch.optim.Adamax, lr=0.01, eps=1e-2),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_any_elementwise_optimizer_resumes(name: str, tmp_path: Path) -> None:
    own = job(make_optimizer=OPTIMIZERS[name], options=({}, {"lr": 0.004}))
    run(own, PLANS["abaca"], STEPS[:SAVED_AT], after=saving(tmp_path))
    resumed = run(own, PLANS["2-1-2"], STEPS[SAVED_AT:], before=loading(tmp_path))
    _, plain = plainly(own, STEPS)
    assert differ(resumed.losses, plain.losses[SAVED_AT:]) < 1e-6


def test_two_interruptions_under_three_plans(tmp_path: Path) -> None:
    run(job(), PLANS["3-1"], STEPS[:2], after=saving(tmp_path / "a"))
    middle = run(
        job(), PLANS["aaa"], STEPS[2:4], before=loading(tmp_path / "a"), after=saving(tmp_path)
    )
    last = run(job(), PLANS["1-3"], STEPS[4:], before=loading(tmp_path))
    _, plain = plainly(job(), STEPS)
    assert differ([*middle.losses, *last.losses], plain.losses[2:]) < 1e-6


def test_a_run_that_never_stepped_can_be_saved(tmp_path: Path) -> None:
    run(job(), PLANS["1-3"], [], after=saving(tmp_path))
    found = run(job(), PLANS["abab"], STEPS, before=loading(tmp_path))
    assert differ(found.losses, plainly(job(), STEPS)[1].losses) < 1e-6


def test_state_that_no_master_can_stand_for_is_refused(tmp_path: Path) -> None:
    """One stage left out a step (an overflow where stages step on their own)."""

    def miscount(rank: Any, optimizer: ShardedOptimizer) -> None:
        for bucket in optimizer.buckets:
            if any(name.startswith("1.") for name in bucket.flat.names):
                optimizer.inner.state[bucket.master]["step"] -= 1
        saving(tmp_path)(rank, optimizer)

    run(job(), PLANS["abaca"], STEPS[:SAVED_AT], after=miscount)
    same = run(job(), PLANS["abaca"], STEPS[SAVED_AT:], before=loading(tmp_path))
    assert same.reports[-1].skipped is None
    with pytest.raises(CheckpointError, match=r"the optimizer's step is .* because a stage left"):
        run(job(), PLANS["one process"], [], before=loading(tmp_path))
    run(job(), PLANS["one process"], [], before=loading(tmp_path, with_optimizer=False))


def test_a_parameter_that_was_frozen_has_no_state(tmp_path: Path) -> None:
    run(job(), PLANS["1-3"], STEPS[:2], after=saving(tmp_path))
    thawed = job(group_of=lambda name: int(name.endswith("bias")))
    with pytest.raises(CheckpointError, match=r"has no exp_avg of the optimizer for 3\."):
        run(thawed, PLANS["3-1"], [], before=loading(tmp_path))
    found = run(thawed, PLANS["3-1"], STEPS[2:3], before=loading(tmp_path, with_optimizer=False))
    expected = run(job(), PLANS["3-1"], STEPS[2:3], before=loading(tmp_path))
    assert differ(found.losses, expected.losses) < 1e-6


def test_a_parameter_that_is_frozen_now_needs_none(tmp_path: Path) -> None:
    thawed = job(group_of=lambda name: int(name.endswith("bias")))
    run(thawed, PLANS["abab"], STEPS[:2], after=saving(tmp_path))
    found = run(job(), PLANS["3-1"], STEPS[2:4], before=loading(tmp_path))
    again = run(job(), PLANS["abab"], STEPS[2:4], before=loading(tmp_path))
    assert differ(found.losses, again.losses) < 1e-6
