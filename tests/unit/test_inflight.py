"""In-flight limits: textbook numbers on uniform plans, and enough, yet not idle, on ragged ones."""

import statistics

import pytest

from tests.random_plans import random_plan, uniform_plan
from zorse_ds.core.layout import Layout, lay_out
from zorse_ds.core.plan import Plan
from zorse_ds.errors import ScheduleError
from zorse_ds.schedule.compile import limits_of
from zorse_ds.schedule.inflight import (
    InFlightLimits,
    all_in_flight,
    in_flight_limits,
    limits_to_finish,
)
from zorse_ds.schedule.orders import compute_order

# Shapes of random plans: few wide groups, many narrow ones, long and short steps.
SHAPES = [
    {"max_groups": 4, "max_width": 3, "max_batch": 17},
    {"max_groups": 6, "max_width": 6, "max_batch": 40},
    {"max_groups": 8, "max_width": 2, "max_batch": 24},
    {"max_groups": 2, "max_width": 6, "max_batch": 200},
]


def ticks(plan: Plan, layout: Layout, limits: InFlightLimits) -> int:
    """Makespan on the integer clock."""
    return max(compute.stop for compute in compute_order(plan, layout, limits, "1f1b"))


@pytest.mark.parametrize("num_stages", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("width", [1, 2, 3])
@pytest.mark.parametrize("micro_batches_a_rank", [1, 2, 7, 12])
def test_uniform_plans_have_the_textbook_limits(
    num_stages: int, width: int, micro_batches_a_rank: int
) -> None:
    limits = in_flight_limits(lay_out(uniform_plan(num_stages, width, micro_batches_a_rank)))
    assert limits == {
        (stage * width + i, stage): min(num_stages - stage, micro_batches_a_rank)
        for stage in range(num_stages)
        for i in range(width)
    }


def test_the_last_stage_holds_one_whatever_its_sizes() -> None:
    for seed in range(50):
        plan = random_plan(seed)
        last = len(plan.stages) - 1
        limits = in_flight_limits(lay_out(plan))
        assert {limit for (_, stage), limit in limits.items() if stage == last} == {1}


def test_limits_follow_the_routes() -> None:
    # One micro-batch below needs all six above before any backward can begin.
    plan = Plan.from_dict(
        {
            "global_batch_size": 6,
            "groups": [
                {"name": "a", "gpus": [{"rank": 0, "micro_batches": [1] * 6}]},
                {"name": "b", "gpus": [{"rank": 1, "micro_batches": [6]}]},
            ],
            "stages": [{"group": "a", "layers": [0, 1]}, {"group": "b", "layers": [1, 2]}],
        }
    )
    assert limits_to_finish(lay_out(plan)) == {(0, 0): 6, (1, 1): 1}
    with pytest.raises(ScheduleError, match="stalls after 5 of 14"):
        compute_order(plan, lay_out(plan), {(0, 0): 5, (1, 1): 1}, "1f1b")


@pytest.mark.parametrize("shape", range(len(SHAPES)))
@pytest.mark.parametrize("chunk", range(5))
def test_limits_suffice(shape: int, chunk: int) -> None:
    for seed in range(50 * chunk, 50 * (chunk + 1)):
        plan = random_plan(seed, schedules=("1f1b",), **SHAPES[shape])
        layout = lay_out(plan)
        most = all_in_flight(layout)
        for limits in (limits_to_finish(layout), in_flight_limits(layout)):
            ticks(plan, layout, limits)
            assert all(1 <= limits[key] <= most[key] for key in most)


@pytest.mark.parametrize("shape", range(len(SHAPES)))
def test_limits_hardly_idle_the_pipeline(shape: int) -> None:
    ratios = []
    for seed in range(150):
        plan = random_plan(seed, schedules=("1f1b",), **SHAPES[shape])
        layout = lay_out(plan)
        bounded = ticks(plan, layout, in_flight_limits(layout))
        ratios.append(bounded / ticks(plan, layout, all_in_flight(layout)))
    assert statistics.mean(ratios) < 1.008
    assert max(ratios) < 1.3
    assert sum(ratio > 1.15 for ratio in ratios) <= 2


def test_limits_save_memory_on_long_steps() -> None:
    layout = lay_out(uniform_plan(4, 2, 50))
    assert sum(in_flight_limits(layout).values()) * 10 <= sum(all_in_flight(layout).values())


@pytest.mark.parametrize("num_stages", [1, 2, 3, 5])
@pytest.mark.parametrize("width", [1, 2, 3])
@pytest.mark.parametrize("ahead", [0, 1, 2])
def test_every_uniform_stage_is_further_ahead_of_the_one_below(
    num_stages: int, width: int, ahead: int
) -> None:
    plan = uniform_plan(num_stages, width, 12).model_copy(update={"ahead": ahead})
    assert limits_of(plan, lay_out(plan)) == {
        (stage * width + i, stage): min(12, (num_stages - stage - 1) * (1 + ahead) + 1)
        for stage in range(num_stages)
        for i in range(width)
    }


def test_a_rank_alone_is_ahead_by_what_a_wide_group_runs_at_once() -> None:
    plan = Plan.from_dict(
        {
            "global_batch_size": 16,
            "groups": [
                {"name": "one", "gpus": [{"rank": 0, "micro_batches": [1] * 16}]},
                {
                    "name": "four",
                    "gpus": [{"rank": r, "micro_batches": [1] * 4} for r in range(1, 5)],
                },
                {"name": "last", "gpus": [{"rank": 5, "micro_batches": [1] * 16}]},
            ],
            "stages": [
                {"group": "one", "layers": [0, 1]},
                {"group": "four", "layers": [1, 2]},
                {"group": "last", "layers": [2, 3]},
            ],
        }
    )
    layout = lay_out(plan)
    least = in_flight_limits(layout)
    further = limits_of(plan.model_copy(update={"ahead": 1}), layout)
    assert {key: further[key] - least[key] for key in least} == {
        (0, 0): min(8, 16 - least[0, 0]),
        **{(rank, 1): 1 for rank in range(1, 5)},
        (5, 2): 0,
    }


@pytest.mark.parametrize("seed", range(40))
def test_further_ahead_takes_no_longer_on_the_integer_clock(seed: int) -> None:
    plan = random_plan(seed, schedules=("1f1b",))
    layout = lay_out(plan)
    plain, ahead = (plan.model_copy(update={"ahead": n}) for n in (0, 1))
    assert ticks(ahead, layout, limits_of(ahead, layout)) <= 1.05 * ticks(
        plain, layout, limits_of(plain, layout)
    )
