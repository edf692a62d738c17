"""A GPU becomes slow in random plans: ten steps later hardly any static shares are better.

The simulator is the reality that is measured, with messages and collectives of which the decision
knows nothing; the best of all static shares is found by trying every one of them.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from tests.tired import plan_of, setting_of, splits
from zorse_ds.core.layout import lay_out
from zorse_ds.core.plan import Plan
from zorse_ds.cost.setting import Setting
from zorse_ds.planner.adapting import RankFacts, ShareDecider
from zorse_ds.schedule.paced import Pace
from zorse_ds.simulator.durations import Durations
from zorse_ds.simulator.quick import quick_step_s

STEPS = 10
PLANS = 40


def measured(plan: Plan, setting: Setting) -> list[RankFacts]:
    """What each rank would measure of a simulated step, with memory enough."""
    layout = lay_out(plan)
    durations, step_s = Durations(plan, layout, setting), quick_step_s(plan, setting)
    facts = []
    for rank in range(plan.world_size):
        paces = {}
        for stage in plan.stages_of_rank(rank):
            passes = durations.passes(stage)
            own = [each for each in layout.micro_batches[stage] if each.rank == rank]
            size = sum(each.samples.size for each in own)
            seconds = (
                sum(way[each.index] for each in own) / size
                for way in (passes.forward_s, passes.backward_s)
            )
            paces[stage] = Pace(*seconds)
        facts.append(RankFacts(step_s, paces, 1.0, 100.0))
    return facts


def case_of(seed: int) -> tuple[Callable[[Sequence[int]], Plan], list[tuple[int, ...]], Any]:
    """Counts → plan; all counts; a random generator for what becomes of it."""
    rng = random.Random(seed)
    batch, width = rng.choice([12, 16, 24]), rng.choice([2, 2, 3])
    sizes = [rng.choice([1, 1, 2]) for _ in range(width)]
    schedule = rng.choice(["1f1b", "gpipe", "ministage"])
    names = rng.choice([["fast", "slow"], ["slow", "fast"]])
    names *= 2 if schedule == "ministage" else 1
    cuts = [0, *sorted(rng.sample(range(1, 6), len(names) - 1)), 6]
    stages = [(name, cuts[i + 1] - cuts[i]) for i, name in enumerate(names)]

    def plan(counts: Sequence[int]) -> Plan:
        return plan_of(schedule, stages, sizes, counts)

    all_counts = sorted(
        splits(batch, sizes),
        key=lambda counts: max(n * size for n, size in zip(counts, sizes, strict=True)),
    )
    return plan, all_counts, rng


@pytest.mark.parametrize("seed", range(PLANS))
def test_ten_steps_later_no_static_plan_is_much_better(seed: int) -> None:
    plan, all_counts, rng = case_of(seed)
    width = len(all_counts[0])
    tired, factor = rng.randint(1, width), rng.choice([1.5, 2.0, 3.0, 4.0])
    setting, slow = setting_of(width), setting_of(width, tired, factor)
    best_s = min(quick_step_s(plan(counts), slow) for counts in all_counts)
    decider = ShareDecider(plan(all_counts[0]))
    for step in range(6 + STEPS):
        decider.observe(measured(decider.current, slow if step >= 6 else setting))
    assert quick_step_s(decider.current, slow) <= 1.10 * best_s


def test_the_cases_are_not_trivial() -> None:
    """In half of the plans the slow GPU costs more than that where nothing moves."""
    worse = 0
    for seed in range(PLANS):
        plan, all_counts, rng = case_of(seed)
        width = len(all_counts[0])
        slow = setting_of(width, rng.randint(1, width), rng.choice([1.5, 2.0, 3.0, 4.0]))
        best_s = min(quick_step_s(plan(counts), slow) for counts in all_counts)
        worse += quick_step_s(plan(all_counts[0]), slow) > 1.10 * best_s
    assert worse >= PLANS / 2
