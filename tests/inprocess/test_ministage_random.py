"""Three hundred random ministage plans: parameters after three steps are those of plain PyTorch.

Every fourth plan also runs with the other kind of step, which must leave the same bytes.
"""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch

from tests.inprocess.exact_cases import CountedError, assert_exact, vectors
from tests.inprocess.local_job import Job, Outcome, Step, run
from tests.inprocess.test_exactness_random import random_layers
from tests.random_plans import random_ministage_plan, random_plan
from zorse_ds.core.plan import Plan

SEEDS_A_TEST = 10


def job_and_steps(seed: int, plan: Plan) -> tuple[Job, list[Step]]:
    """Blocks, some of them tied or frozen; interleaved steps where nothing is clipped."""
    rng = random.Random(seed)
    clip = rng.choice([0.0, 0.0, 0.05, 1e9])
    interleaved = not clip and rng.random() < 0.6
    layers = random_layers(rng, plan.num_layers)
    size = plan.global_batch_size
    steps = [Step(vectors(1000 * seed + i, size), clip) for i in range(3)]
    return Job(layers, CountedError(), interleaved=interleaved), steps


def check(seed: int) -> None:
    """One plan."""
    plan = random_ministage_plan(seed)
    job, steps = job_and_steps(seed, plan)
    outcome = assert_exact(job, plan, steps)
    if seed % 4 == 0 and not steps[0].clip:
        other = run(replace(job, interleaved=not job.interleaved), plan, steps)
        assert_same_bytes(outcome, other)


def assert_same_bytes(one: Outcome, other: Outcome) -> None:
    """Two runs told and left the same, to the bit."""
    assert one.losses == other.losses
    assert one.norms == other.norms
    for values, others in zip(one.values, other.values, strict=True):
        assert values.keys() == others.keys()
        assert all(torch.equal(value, others[name]) for name, value in values.items())


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


@pytest.mark.parametrize("seed", range(10))
def test_the_same_plan_twice_gives_the_same_bytes(seed: int) -> None:
    plan = random_ministage_plan(1000 + seed)
    job, steps = job_and_steps(seed, plan)
    assert_same_bytes(run(job, plan, steps), run(job, plan, steps))


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
@pytest.mark.parametrize("seed", range(12))
def test_sharded_parameters_under_the_other_schedules(seed: int, schedule: str) -> None:
    plan = random_plan(seed, zero_levels=(3, 3, 1), schedules=(schedule,), max_batch=12)
    job, steps = job_and_steps(seed, plan)
    assert_exact(job, plan, steps)


@pytest.mark.parametrize("seed", range(40))
def test_offload_changes_no_bit(seed: int) -> None:
    """Masters, optimizer state, shards and activations in host memory: the same update."""
    plan = random_ministage_plan(seed, offloads=("none", "params", "params+activations"))
    job, steps = job_and_steps(seed, plan)
    outcome = assert_exact(job, plan, steps)
    assert_same_bytes(outcome, run(job, plan_without_offload(plan), steps))


def plan_without_offload(plan: Plan) -> Plan:
    groups = tuple(group.model_copy(update={"offload": "none"}) for group in plan.groups)
    return plan.model_copy(update={"groups": groups})
