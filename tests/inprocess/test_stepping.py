"""When stages step: at once where nothing global is needed, and people are told why not."""

from __future__ import annotations

from typing import Any

import pytest

from tests.random_plans import uniform_ministage_plan, uniform_plan
from zorse_ds.core.plan import Plan
from zorse_ds.errors import ConfigError
from zorse_ds.integrations.deepspeed.precision import boundary_dtypes, default_dtype, has_float16
from zorse_ds.integrations.deepspeed.stepping import stepping_of

PLAN = uniform_ministage_plan(2, 1, 2, 2)
FREE: dict[str, Any] = {"gradient_clipping": 0.0}


class Counting:
    """A loss that tells its targets beforehand."""

    def count_targets(self, labels: Any) -> int:
        return len(labels)


def with_dtypes(first: str | None, second: str | None) -> Plan:
    groups = [
        group.model_copy(update={"dtype": dtype})
        for group, dtype in zip(PLAN.groups, (first, second), strict=True)
    ]
    return PLAN.model_copy(update={"groups": tuple(groups)})


def test_ministages_step_at_once_when_nothing_global_is_needed() -> None:
    for config in (FREE, FREE | {"bf16": {"enabled": True}}):
        stepping = stepping_of("auto", config, PLAN, Counting())
        assert stepping.interleaved
        assert str(stepping) == (
            "each stage steps as soon as its backward ends: nothing global is needed"
        )


OBSTACLES: list[tuple[dict[str, Any], Plan, Any, str]] = [
    ({}, PLAN, Counting(), "gradient_clipping needs"),
    ({"gradient_clipping": 0.5}, PLAN, Counting(), "gradient_clipping needs"),
    (FREE | {"fp16": {"enabled": True}}, PLAN, Counting(), "the loss scale of float16"),
    (FREE, with_dtypes(None, "float16"), Counting(), "the loss scale of float16"),
    (FREE, PLAN, None, "no count_targets"),
]


@pytest.mark.parametrize(("config", "plan", "loss_fn", "why"), OBSTACLES)
def test_an_obstacle_is_told_or_refused(
    config: dict[str, Any], plan: Plan, loss_fn: Any, why: str
) -> None:
    stepping = stepping_of("auto", config, plan, loss_fn)
    assert not stepping.interleaved
    assert str(stepping).startswith("each stage steps after all stages are done: ")
    assert why in stepping.reason
    assert not stepping_of("delayed", config, plan, loss_fn).interleaved
    with pytest.raises(ConfigError, match=f"'interleaved', but .*{why}.*; expected 'delayed'"):
        stepping_of("interleaved", config, plan, loss_fn)


def test_one_stage_a_group_waits_unless_told_otherwise() -> None:
    plan = uniform_plan(2, 1, 2)
    assert not stepping_of("auto", FREE, plan, Counting()).interleaved
    assert stepping_of("interleaved", FREE, plan, Counting()).interleaved
    assert not stepping_of("delayed", FREE, PLAN, Counting()).interleaved


def test_dtypes_of_config_and_groups() -> None:
    assert default_dtype({}) == default_dtype({"bf16": {"enabled": False}}) == "float32"
    assert default_dtype({"bfloat16": {"enabled": True}}) == "bfloat16"
    assert default_dtype({"fp16": {"enabled": True}}) == "float16"
    assert not has_float16(with_dtypes("float32", "bfloat16"), {"fp16": {"enabled": True}})
    assert boundary_dtypes(PLAN, {"bf16": {"enabled": True}}) == {}


def test_boundaries_between_unlike_dtypes() -> None:
    plan = with_dtypes(None, "float16")
    assert plan.boundary_dtypes("bfloat16") == {
        0: ("bfloat16", "float16"),
        1: ("float16", "bfloat16"),
        2: ("bfloat16", "float16"),
    }
    assert plan.boundary_dtypes("float16") == {}
