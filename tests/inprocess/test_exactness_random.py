"""Three hundred random plans: parameters after three steps are those of plain PyTorch."""

from __future__ import annotations

import random

import pytest
from torch import nn

from tests.inprocess.exact_cases import assert_exact, blocks, squared_error, vectors
from tests.inprocess.local_job import Job, Step
from tests.random_plans import random_plan

SEEDS_A_TEST = 10


def random_layers(rng: random.Random, count: int) -> list[nn.Module]:
    """Blocks, of which some are shared (up to three uses) and some are frozen."""
    layers = blocks(count)
    if count > 1 and rng.random() < 0.5:
        first, *others = sorted(rng.sample(range(count), min(count, rng.choice([2, 2, 3]))))
        for other in others:
            layers[other] = layers[first]
    for layer in layers:
        if rng.random() < 0.2:
            layer.requires_grad_(False)
    if rng.random() < 0.3:
        part = rng.choice(layers).first.bias
        part.requires_grad_(False)
    return layers


def check(seed: int) -> None:
    """One plan."""
    rng = random.Random(seed)
    plan = random_plan(seed)
    clip = rng.choice([0.0, 0.05, 1e9])
    layers = random_layers(rng, plan.num_layers)
    size = plan.global_batch_size
    steps = [Step(vectors(1000 * seed + i, size), clip) for i in range(3)]
    assert_exact(Job(layers, squared_error), plan, steps)


@pytest.mark.parametrize(
    "first",
    range(0, 300, SEEDS_A_TEST),
    ids=lambda first: f"seeds{first}-{first + SEEDS_A_TEST - 1}",
)
def test_random_plans(first: int) -> None:
    for seed in range(first, first + SEEDS_A_TEST):
        try:
            check(seed)
        except BaseException as error:
            error.add_note(f"seed {seed}")
            raise
