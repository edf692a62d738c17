"""Micro-batches change their rank between steps: parameters stay those of plain PyTorch."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest

from tests.inprocess.exact_cases import CountedError, assert_exact, vectors
from tests.inprocess.local_job import Job, Step
from tests.inprocess.test_exactness_random import random_layers
from tests.random_plans import random_ministage_plan, random_plan
from zorse_ds.core.plan import Plan
from zorse_ds.planner.adapting import RankFacts, ShareDecider, ShareRule
from zorse_ds.schedule.paced import Pace

PLANS, STEPS = 60, 5
RULE = ShareRule(window=1, least_gain=0.01, most_moved=1.0)


def drifting(plan: Plan, rng: random.Random) -> list[Plan]:
    """What runs in each step when speeds change after every one of them."""
    decider, found = ShareDecider(plan, RULE), [plan]
    for _ in range(STEPS - 1):
        facts = []
        for rank in range(plan.world_size):
            speed = rng.choice([1.0, 2.0, 4.0])
            paces = {stage: Pace(speed, 2 * speed) for stage in plan.stages_of_rank(rank)}
            # More than the paced step, so that some changes are too small to be worth it.
            facts.append(RankFacts(100.0, paces, grown_bytes=1.0, room_bytes=100.0))
        decider.observe(facts)
        found.append(decider.current)
    return found


def plan_of(seed: int) -> Plan:
    make = random_plan if seed % 2 else random_ministage_plan
    return make(seed, max_groups=3)


@pytest.mark.parametrize("seed", range(PLANS))
def test_random_plans_stay_exact(seed: int) -> None:
    plan, rng = plan_of(seed), random.Random(seed)
    clip = rng.choice([0.0, 0.05])
    job = Job(random_layers(rng, plan.num_layers), CountedError(), interleaved=not clip)
    steps = [
        Step(vectors(100 * seed + i, plan.global_batch_size), clip, shares=shares)
        for i, shares in enumerate(drifting(plan, rng))
    ]
    assert_exact(job, plan, steps)


def test_the_cases_are_not_trivial() -> None:
    """Most plans that have a group of several ranks change, and often more than once."""
    wide, changes = 0, []
    for seed in range(PLANS):
        plan, rng = plan_of(seed), random.Random(seed)
        if any(len(group.gpus) > 1 for group in plan.groups):
            wide += 1
            found = drifting(plan, rng)
            changes.append(sum(a != b for a, b in pairwise(found)))
    assert wide > 40 and sum(bool(each) for each in changes) > wide / 2 and max(changes) >= 3
