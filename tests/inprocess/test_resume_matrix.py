"""Saved under any of eight plans and loaded under any: training goes on as if never interrupted."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.inprocess.checkpoint_cases import (
    FROZEN,
    PLANS,
    SAVED_AT,
    STEPS,
    differ,
    job,
    loading,
    saving,
)
from tests.inprocess.exact_cases import assert_values, plainly
from tests.inprocess.local_job import Outcome, run
from tests.inprocess.plain_job import PlainOutcome

TOLERANCE = 1e-6


@pytest.fixture(scope="module")
def plain() -> PlainOutcome:
    """Plain PyTorch in one process, never interrupted."""
    return plainly(job(), STEPS)[1]


@pytest.fixture(scope="module")
def whole() -> dict[str, Outcome]:
    """Every plan, never interrupted."""
    return {name: run(job(), plan, STEPS) for name, plan in PLANS.items()}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One folder a plan, saved after half of the steps."""
    root = tmp_path_factory.mktemp("checkpoints")
    for name, plan in PLANS.items():
        run(job(), plan, STEPS[:SAVED_AT], after=saving(root / name))
    return root


@pytest.mark.parametrize("loaded_by", PLANS)
@pytest.mark.parametrize("saved_by", PLANS)
def test_any_plan_loads_what_any_plan_saved(
    saved_by: str, loaded_by: str, saved: Path, whole: dict[str, Outcome], plain: PlainOutcome
) -> None:
    resumed = run(job(), PLANS[loaded_by], STEPS[SAVED_AT:], before=loading(saved / saved_by))
    assert differ(resumed.losses, plain.losses[SAVED_AT:]) < TOLERANCE
    assert differ(resumed.norms, plain.norms[SAVED_AT:]) < TOLERANCE
    assert_values(resumed.values[-1], plain.values[-1], TOLERANCE)
    if saved_by == loaded_by:
        expected = whole[loaded_by]
        assert resumed.losses == expected.losses[SAVED_AT:]
        assert resumed.norms == expected.norms[SAVED_AT:]
        for name, master in expected.masters[-1].items():
            assert torch.equal(resumed.masters[-1][name], master), name


def test_the_case_is_not_trivial(plain: PlainOutcome) -> None:
    """Without the optimizer's state the losses would be others, and every parameter moves."""
    assert abs(plain.losses[-1] - plain.losses[SAVED_AT - 1]) > 1e-2
    first, last = plain.values[0], plain.values[-1]
    still = {name for name in first if torch.equal(first[name], last[name])}
    assert still and all(name.startswith(FROZEN) for name in still)


def test_weights_alone_give_another_run(saved: Path, plain: PlainOutcome) -> None:
    hook = loading(saved / "1-3", with_optimizer=False)
    resumed = run(job(), PLANS["3-1"], STEPS[SAVED_AT:], before=hook)
    assert differ(resumed.losses[:1], plain.losses[SAVED_AT : SAVED_AT + 1]) < TOLERANCE
    assert differ(resumed.losses, plain.losses[SAVED_AT:]) > 1e-4
