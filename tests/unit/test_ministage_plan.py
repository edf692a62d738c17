"""What a plan says about ministages: how it is written, defaults, and what overrides what."""

from typing import Any

import pytest

from tests.random_plans import random_ministage_plan, uniform_ministage_plan, uniform_plan
from zorse_ds.core.plan import Plan
from zorse_ds.errors import PlanError
from zorse_ds.ranges import Range


@pytest.mark.parametrize("seed", range(40))
def test_a_plan_is_read_as_it_was_written(seed: int) -> None:
    plan = random_ministage_plan(seed)
    assert Plan.from_dict(plan.to_dict()) == plan


def changed(**group: Any) -> dict[str, Any]:
    data = uniform_ministage_plan(2, 1, 2, 2).to_dict()
    data["groups"][0].update(group)
    return data


def test_turnaround_is_on_unless_it_is_switched_off() -> None:
    assert uniform_ministage_plan(2, 1, 2, 2).turnaround
    assert "turnaround" not in uniform_ministage_plan(2, 1, 2, 2).to_dict()
    assert uniform_ministage_plan(2, 1, 2, 2, turnaround=False).to_dict()["turnaround"] is False


def test_a_stage_overrides_its_groups_recompute() -> None:
    data = changed(recompute="full", recompute_every=3)
    data["stages"][2]["recompute_every"] = 2
    plan = Plan.from_dict(data)
    assert [recomputed_by(plan, stage) for stage in range(4)] == [3, 0, 2, 0]
    data["stages"][0]["recompute"] = "none"
    data["stages"][1]["recompute"] = "full"
    plan = Plan.from_dict(data)
    assert [recomputed_by(plan, stage) for stage in range(4)] == [0, 1, 2, 0]


def recomputed_by(plan: Plan, stage: int) -> int:
    """Layers between two kept activations, where the whole stage is recomputed."""
    recomputed = plan.recomputed(stage)
    assert recomputed.layers == plan.stages[stage].layers or not recomputed
    return recomputed.every if recomputed else 0


def test_a_group_recomputes_so_many_layers_of_each_stage_and_a_stage_overrides_it() -> None:
    data = changed(recompute="full", recompute_layers=1)
    plan = Plan.from_dict(data)
    hosted = [i for i in range(4) if plan.recomputed(i)]
    assert hosted
    for stage in hosted:
        start = plan.stages[stage].layers.start
        assert plan.recomputed(stage).layers == Range(start, start + 1)
    data["groups"][0]["recompute_layers"] = 99
    size = plan.stages[hosted[0]].layers.size
    data["stages"][hosted[0]]["recompute_layers"] = size
    plan = Plan.from_dict(data)
    assert all(plan.recomputed(i).layers == plan.stages[i].layers for i in hosted)
    data["stages"][hosted[0]]["recompute_layers"] = size + 1
    with pytest.raises(PlanError, match=rf"expected at most {size}"):
        Plan.from_dict(data)


@pytest.mark.parametrize(
    ("group", "sentence"),
    [
        ({"zero_level": 4}, r"groups\[0\].zero_level"),
        ({"recompute_every": 0}, r"groups\[0\].recompute_every"),
        ({"dtype": "float8"}, r"groups\[0\].dtype"),
        ({"turnaround": False}, r"groups\[0\].*turnaround"),
    ],
)
def test_a_wrong_value_is_refused(group: dict[str, Any], sentence: str) -> None:
    with pytest.raises(PlanError, match=sentence):
        Plan.from_dict(changed(**group))


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
def test_several_stages_a_group_need_ministages(schedule: str) -> None:
    data = uniform_ministage_plan(2, 1, 2, 2).to_dict()
    with pytest.raises(PlanError, match="hosts 2 stages; expected one stage a group, or schedule"):
        Plan.from_dict({**data, "schedule": schedule})


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "ministage"])
def test_sharded_parameters_go_with_any_schedule(schedule: str) -> None:
    data = uniform_plan(2, 2, 2).to_dict()
    data["groups"] = [{**group, "zero_level": 3} for group in data["groups"]]
    assert Plan.from_dict({**data, "schedule": schedule}).groups[0].zero_level == 3
