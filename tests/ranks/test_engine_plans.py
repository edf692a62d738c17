"""Ragged plans of every shape: the engine equals plain PyTorch in one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.random_plans import random_plan
from tests.ranks.engine_cases import Case, Result, check, run_cases, run_reference
from tests.ranks.engine_models import batches_of, plan_of, vectors

ADAMW = {"type": "AdamW", "params": {"lr": 0.01, "eps": 1e-3, "torch_adam": True}}
STEPS = 4

PLANS: dict[str, dict[str, Any]] = {
    "1-1": plan_of([[[3, 4]], [[2, 2, 3]]], [0, 2, 6]),
    "one stage, 2 wide": plan_of([[[3, 1], [2, 1]]], [0, 6], zero=[2], weights=[2, 1]),
    "1-1 recomputed": plan_of([[[3, 4]], [[7]]], [0, 5, 6], recompute="full"),
    "2-1": plan_of([[[3, 3], [2, 2]], [[5, 5]]], [0, 4, 6], zero=[2, 1], weights=[2, 1, 1]),
    "1-2": plan_of([[[1, 4, 6]], [[3, 1], [5, 2]]], [0, 1, 6], zero=[0, 2], weights=[1, 1, 3]),
    "1-1-1": plan_of([[[2] * 3 + [1]], [[7]], [[1, 3, 3]]], [0, 1, 5, 6], zero=[1, 0, 2]),
    "3 wide": plan_of([[[3, 1], [2], [1] * 5]], [0, 6], zero=[1], weights=[1, 0, 2.5]),
    "1-3": plan_of([[[4, 4, 3]], [[2] * 2, [3], [1, 3]]], [0, 3, 6], zero=[1, 2], weights=[1] * 4),
    "3-1": plan_of([[[5], [1] * 3, [3]], [[6, 5]]], [0, 3, 6], zero=[2, 2], weights=[0, 1, 2, 1]),
    "1-2-1": plan_of([[[5, 6]], [[4, 1], [6]], [[1, 9, 1]]], [0, 1, 3, 6], zero=[0, 1, 2]),
    "2-2": plan_of([[[1] * 4, [9]], [[8, 2], [3]]], [0, 2, 6], zero=[2, 1], weights=[1, 3, 0, 1]),
    "2-1-2": plan_of([[[3, 3], [2]], [[5, 3]], [[1, 1], [2, 4]]], [0, 2, 3, 6], zero=[1, 0, 2]),
    "1-3-1": plan_of([[[4, 7]], [[2], [3, 3], [3]], [[11]]], [0, 1, 5, 6], zero=[0, 2, 0]),
    "4-1": plan_of([[[1], [2], [3], [4, 1]], [[5, 6]]], [0, 5, 6], zero=[2, 0]),
    "5 wide": plan_of([[[1], [2], [3], [4, 1], [2]]], [0, 6], zero=[2], weights=[0, 1, 0, 5, 2]),
    "1-1-1-1-1": plan_of([[[3, 2]]] * 5, [0, 1, 2, 3, 4, 6], zero=[0, 1, 2, 0, 1]),
}


def summed_often(plan: dict[str, Any]) -> dict[str, Any]:
    """With the gradients of every micro-batch summed by themselves."""
    return {
        **plan,
        "groups": [{**group, "reduce_after": "micro_batch"} for group in plan["groups"]],
    }


def case_of(name: str, plan: dict[str, Any]) -> Case:
    size = plan["global_batch_size"]
    return Case(
        name,
        plan,
        batches_of(vectors(STEPS * size), [size] * STEPS),
        config={"optimizer": ADAMW, "gradient_clipping": 0.2},
        optimizer=lambda params: torch.optim.AdamW(params, lr=0.01, eps=1e-3),
        clip=0.2,
    )


def random_cases() -> list[Case]:
    """Twelve random plans of 2 to 5 ranks; the seed is in the name."""
    plans = {f"seed {seed}": random_plan(seed, num_layers=6, max_batch=13) for seed in range(60)}
    small = {name: plan for name, plan in plans.items() if 2 <= plan.world_size <= 5}
    return [case_of(name, plan.to_dict()) for name, plan in list(small.items())[:12]]


OFTEN = {
    f"{name}, summed often": summed_often(PLANS[name]) for name in ("one stage, 2 wide", "5 wide")
}
CASES = [*(case_of(name, plan) for name, plan in (PLANS | OFTEN).items()), *random_cases()]


@pytest.fixture(scope="module")
def results() -> dict[str, list[Result]]:
    return run_cases(CASES)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_plan_equals_one_process(case: Case, results: dict[str, list[Result]]) -> None:
    check(results[case.name], run_reference(case))
