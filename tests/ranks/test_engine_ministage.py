"""Ministages through the real engine: over processes it equals plain PyTorch in one."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from tests.random_plans import random_ministage_plan
from tests.ranks.engine_cases import Case, Result, check, run_cases, run_reference
from tests.ranks.engine_models import Block, CountedError, batches_of, mlp, vectors
from zorse_ds.core.plan import Plan

STEPS = 4
ADAMW = {"type": "AdamW", "params": {"lr": 0.01, "eps": 1e-3, "torch_adam": True}}


def layers_of(plan: Plan, seed: int) -> Callable[[], list[nn.Module]]:
    """As many as the plan wants; every second seed ties some, every third freezes some."""

    def make() -> list[nn.Module]:
        layers = mlp(plan.num_layers)
        if seed % 2 == 0 and len(layers) > 3:
            layers[-1] = layers[len(layers) // 2] = layers[1]
        if seed % 3 == 0:
            layers[-2].requires_grad_(False)
            if isinstance(layers[-1], Block):
                layers[-1].inner.bias.requires_grad_(False)
        return layers

    return make


def case_of(seed: int, plan: Plan) -> Case:
    """Clipped every fourth time, else each stage steps as soon as it can."""
    clip = 0.2 if seed % 4 == 0 else 0.0
    size = plan.global_batch_size
    short = max(1, size // 3)
    sizes = [size, size, short, size]
    return Case(
        f"seed {seed}",
        plan.to_dict(),
        batches_of(vectors(sum(sizes)), sizes),
        layers=layers_of(plan, seed),
        loss_fn=CountedError(),
        sample_loss=CountedError(),
        config={"optimizer": ADAMW, "gradient_clipping": clip},
        optimizer=lambda params: torch.optim.AdamW(params, lr=0.01, eps=1e-3),
        clip=clip,
    )


def plans(count: int) -> dict[int, Plan]:
    """Random plans of 2 to 4 ranks with at least two stages and sharded parameters, by seed."""
    found: dict[int, Plan] = {}
    seed = 0
    while len(found) < count:
        plan = random_ministage_plan(seed, max_groups=3, max_batch=11, zero_levels=(3, 3, 2, 0))
        sharded = any(group.zero_level == 3 for group in plan.groups)
        if 2 <= plan.world_size <= 4 and len(plan.stages) > 1 and plan.num_layers > 2 and sharded:
            found[seed] = plan
        seed += 1
    return found


CASES = [case_of(seed, plan) for seed, plan in plans(12).items()]


@pytest.fixture(scope="module")
def results() -> dict[str, list[Result]]:
    return run_cases(CASES)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_plan_equals_one_process(case: Case, results: dict[str, list[Result]]) -> None:
    check(results[case.name], run_reference(case))


def test_the_plans_are_of_every_kind() -> None:
    made = list(plans(12).values())
    assert {plan.turnaround for plan in made} == {False, True}
    assert {plan.world_size for plan in made} == {2, 3, 4}
    assert any(len(plan.groups) == 1 for plan in made)
    assert any(plan.recomputed(i) for plan in made for i in range(len(plan.stages)))
    assert max(len(plan.stages) for plan in made) > 4
    assert {bool(case.clip) for case in CASES} == {False, True}
