"""The plan file: every rule has its sentence, and all problems of a file are told together."""

import copy
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.random_plans import random_plan
from zorse_ds.core.plan import Plan
from zorse_ds.errors import PlanError

VALID: dict[str, Any] = {
    "version": 1,
    "global_batch_size": 24,
    "schedule": "1f1b",
    "groups": [
        {
            "name": "fast",
            "zero_level": 2,
            "gpus": [
                {"rank": 0, "micro_batches": [4, 4, 4], "shard_weight": 2.0},
                {"rank": 1, "micro_batches": [3, 3, 3, 3], "shard_weight": 1},
            ],
        },
        {"name": "slow", "recompute": "full", "gpus": [{"rank": 2, "micro_batches": [2] * 12}]},
    ],
    "stages": [{"group": "fast", "layers": [0, 20]}, {"group": "slow", "layers": [20, 26]}],
}

GPU = ("groups", 0, "gpus", 0)


def changed(*changes: tuple[Sequence[int | str], object]) -> dict[str, Any]:
    """The valid plan with other values at some paths."""
    data = copy.deepcopy(VALID)
    for path, value in changes:
        holder: Any = data
        for step in path[:-1]:
            holder = holder[step]
        holder[path[-1]] = value
    return data


def problems(data: Any) -> tuple[str, ...]:
    with pytest.raises(PlanError) as caught:
        Plan.from_dict(data)
    return caught.value.problems


# A path, a value that is wrong there, and the whole sentence.
WRONG = [
    (["version"], 2, "version is 2; expected 1"),
    (["version"], True, "version is True; expected a whole number"),
    (["global_batch_size"], "24", "global_batch_size is '24'; expected a whole number"),
    (["global_batch_size"], 24.0, "global_batch_size is 24.0; expected a whole number"),
    (["global_batch_size"], 0, "global_batch_size is 0; expected at least 1"),
    (["global_batch_size"], 2**31, "global_batch_size is 2147483648; expected at most 2147483647"),
    (
        ["schedule"],
        "1f1",
        "schedule is '1f1'; expected '1f1b', 'gpipe' or 'ministage'; did you mean '1f1b'?",
    ),
    (["groups"], {}, "groups is {}; expected a list"),
    (["groups", 1], 5, "groups[1] is 5; expected an object {...}"),
    (["groups", 0, "name"], "", "groups[0].name is ''; expected a text that is not empty"),
    (["groups", 0, "zero_level"], 4, "groups[0].zero_level is 4; expected 0, 1, 2 or 3"),
    (["groups", 0, "zero_level"], 2.0, "groups[0].zero_level is 2.0; expected a whole number"),
    (
        ["groups", 0, "recompute"],
        "ful",
        "groups[0].recompute is 'ful'; expected 'none' or 'full'; did you mean 'full'?",
    ),
    ([*GPU, "rank"], -1, "groups[0].gpus[0].rank is -1; expected at least 0"),
    ([*GPU, "rank"], False, "groups[0].gpus[0].rank is False; expected a whole number"),
    ([*GPU, "micro_batches"], 12, "groups[0].gpus[0].micro_batches is 12; expected a list"),
    (
        [*GPU, "micro_batches"],
        [6, 0, 6],
        "groups[0].gpus[0].micro_batches[1] is 0; expected at least 1",
    ),
    (
        [*GPU, "shard_weight"],
        float("nan"),
        "groups[0].gpus[0].shard_weight is nan; expected a finite number",
    ),
    (
        [*GPU, "shard_weight"],
        float("inf"),
        "groups[0].gpus[0].shard_weight is inf; expected a finite number",
    ),
    ([*GPU, "shard_weight"], -1, "groups[0].gpus[0].shard_weight is -1; expected at least 0.0"),
    (
        [*GPU, "ranks"],
        1,
        "groups[0].gpus[0].ranks is not a known key; expected one of 'rank', 'micro_batches' or "
        "'shard_weight'; did you mean 'rank'?",
    ),
    (
        ["stages", 0, "layers"],
        [0, 1, 20],
        "stages[0].layers is [0, 1, 20]; expected two whole numbers [first, one behind the last]",
    ),
    (
        ["stages", 0, "layers"],
        [0, -1],
        "stages[0].layers is [0, -1]; expected two whole numbers from 0 to 2147483647",
    ),
    (
        ["stages", 1, "layers"],
        [19, 26],
        "stages[1].layers is [19, 26], but stages[0] ends at 20; expected [20, …]",
    ),
    (
        ["stages", 1, "layers"],
        [22, 26],
        "stages[1].layers is [22, 26], but stages[0] ends at 20; expected [20, …]",
    ),
    (
        ["stages", 0, "layers"],
        [1, 20],
        "stages[0].layers is [1, 20], but the model starts at 0; expected [0, …]",
    ),
    (
        ["stages", 1, "layers"],
        [20, 20],
        "stages[1].layers is [20, 20], which holds no layer; expected at least [20, 21]",
    ),
    (
        [*GPU, "micro_batches"],
        [4, 4, 3],
        "groups[0].gpus[*].micro_batches of group 'fast' sum to 23, but global_batch_size is 24; "
        "expected 1 more",
    ),
    (
        [*GPU, "micro_batches"],
        [4, 4, 6],
        "groups[0].gpus[*].micro_batches of group 'fast' sum to 26, but global_batch_size is 24; "
        "expected 2 fewer",
    ),
    (
        ["turnaround"],
        False,
        "turnaround is false, but schedule '1f1b' has no turn-around to switch off; expected "
        "schedule 'ministage', or no such key",
    ),
    (["ahead"], -1, "ahead is -1; expected at least 0"),
    (["ahead"], 13, "ahead is 13, but no GPU has more than 12 micro-batches; expected at most 12"),
    (
        ["groups", 0, "recompute_every"],
        1,
        "groups[0].recompute_every is 1, but recompute of group 'fast' is 'none'; expected "
        "recompute 'full', or no such key",
    ),
    (
        ["stages", 0, "recompute_every"],
        2,
        "stages[0].recompute_every is 2, but its recompute is 'none'; expected recompute 'full', "
        "or no such key",
    ),
    (
        ["groups", 0, "gpus", 1, "rank"],
        3,
        "groups[0].gpus[1].rank is 3, but the plan names 3 ranks; expected 0 to 2 each once, and "
        "rank 1 is missing",
    ),
]


@pytest.mark.parametrize(("path", "value", "sentence"), WRONG)
def test_one_mistake_is_one_sentence(path: list[Any], value: object, sentence: str) -> None:
    assert problems(changed((path, value))) == (sentence,)


def test_a_rank_named_twice() -> None:
    found = problems(changed((["groups", 1, "gpus", 0, "rank"], 0)))
    assert found[0] == (
        "groups[1].gpus[0].rank is 0, which groups[0].gpus[0].rank is too; expected each rank once"
    )


def test_a_name_used_twice() -> None:
    found = problems(changed((["groups", 1, "name"], "fast")))
    assert "groups[1].name is 'fast', which groups[0] has too; expected a name of its own" in found


def test_a_group_that_does_not_exist_and_one_without_stage() -> None:
    assert problems(changed((["stages", 1, "group"], "slwo"))) == (
        "stages[1].group is 'slwo', which is no group; expected 'fast' or 'slow'; "
        "did you mean 'slow'?",
        "groups[1] 'slow' hosts no stage; expected it in stages[*].group",
    )


def test_all_weights_zero() -> None:
    data = changed(([*GPU, "shard_weight"], 0), (["groups", 0, "gpus", 1, "shard_weight"], 0.0))
    assert [p for p in problems(data) if "somebody must hold the state" in p] == [*problems(data)]


def test_one_stage_a_group_unless_ministage() -> None:
    stages = [*VALID["stages"], {"group": "fast", "layers": [26, 30]}]
    (found,) = problems(changed((["stages"], stages)))
    assert found.startswith("schedule is '1f1b', but group 'fast' hosts 2 stages")
    plan = Plan.from_dict(changed((["stages"], stages), (["schedule"], "ministage")))
    assert plan.stages_of_rank(0) == (0, 2)


@pytest.mark.parametrize("key", ["groups", "stages"])
def test_empty_lists(key: str) -> None:
    assert f"{key} is empty" in problems(changed(([key], [])))[0]


def test_group_without_gpus() -> None:
    assert "groups[1].gpus is empty" in problems(changed((["groups", 1, "gpus"], [])))[0]


@pytest.mark.parametrize("data", [None, 3, "x", [], [VALID], True])
def test_what_is_no_object(data: Any) -> None:
    assert "expected an object {...}" in problems(data)[0]


def test_all_problems_are_told_together() -> None:
    data = changed(
        (["scedule"], "1f1b"),
        (["groups", 0, "zero_level"], 9),
        ([*GPU, "micro_batches"], [1]),
        (["stages", 0, "layers"], [1, 20]),
        (["stages", 1, "group"], "slo"),
    )
    told = "\n".join(problems(data))
    for part in ("scedule", "zero_level is 9", "sum to 13", "model starts at 0", "'slo'"):
        assert part in told


def test_overlap_does_not_blame_the_stages_behind_it() -> None:
    stages = [[0, 20], [5, 10], [20, 26]]
    data = changed(
        (["stages"], [{"group": "fast", "layers": layers} for layers in stages]),
        (["schedule"], "ministage"),
        (["groups"], [{**VALID["groups"][0], "gpus": [{"rank": 0, "micro_batches": [24]}]}]),
    )
    assert problems(data) == (
        "stages[1].layers is [5, 10], but stages[0] ends at 20; expected [20, …]",
    )


@pytest.mark.parametrize("key", ["schedule", "scedule"])
def test_a_misspelt_schedule_brings_no_false_complaint(key: str) -> None:
    stages = [*VALID["stages"], {"group": "fast", "layers": [26, 30]}]
    data = changed((["stages"], stages))
    del data["schedule"]
    data[key] = "ministge"
    assert len(problems(data)) == 1


@pytest.mark.parametrize("part", [("groups", 0), ("stages", 0)])
@pytest.mark.parametrize("key", ["recompute", "recompte"])
def test_a_misspelt_recompute_brings_no_false_complaint(part: tuple[str, int], key: str) -> None:
    data = changed(([*part, "recompute_every"], 2), ([*part, key], "ful"))
    assert len(problems(data)) == 1


def test_a_group_may_say_how_often_what_one_of_its_stages_recomputes() -> None:
    data = changed((["groups", 0, "recompute_every"], 3), (["stages", 0, "recompute"], "full"))
    assert Plan.from_dict(data).recomputed(0).every == 3
    data["stages"][0]["recompute"] = "none"
    (found,) = problems(data)
    assert found.startswith("groups[0].recompute_every is 3, but recompute of group 'fast' is")


@pytest.mark.parametrize(
    "changes",
    [
        [(["schedule"], "gpipe")],
        [(["schedule"], "ministage"), (["turnaround"], False)],
    ],
)
def test_nobody_is_further_ahead_where_every_forward_comes_first(
    changes: list[tuple[list[str], Any]],
) -> None:
    (found,) = problems(changed(*changes, (["ahead"], 1)))
    assert found == (
        "ahead is 1, but every forward comes first without a turn-around; expected 0, or no such "
        "key"
    )
    Plan.from_dict(changed(*changes, (["ahead"], 0)))


def test_gpipe_has_no_turnaround_either() -> None:
    (found,) = problems(changed((["schedule"], "gpipe"), (["turnaround"], False)))
    assert found.startswith("turnaround is false, but schedule 'gpipe' has no turn-around")
    Plan.from_dict(changed((["schedule"], "ministage"), (["turnaround"], False)))


def test_keys_that_could_steer_a_terminal_are_escaped() -> None:
    (found,) = problems(changed((["\x1b[31m"], 1)))
    assert found.isprintable()


@pytest.mark.parametrize("seed", range(20))
def test_a_saved_plan_loads_as_the_same(seed: int, tmp_path: Path) -> None:
    plan = random_plan(seed)
    plan.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == plan
    assert Plan.from_dict(plan.to_dict()) == plan


def test_load_names_the_file_in_every_problem(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(changed((["version"], 3), ([*GPU, "rank"], -4))))
    with pytest.raises(PlanError) as caught:
        Plan.load(path)
    assert [problem.startswith(f"{path}: ") for problem in caught.value.problems] == [True, True]


def test_ranks_of_a_group_are_sorted() -> None:
    gpus = VALID["groups"][0]["gpus"]
    plan = Plan.from_dict(changed((["groups", 0, "gpus"], gpus[::-1])))
    assert plan == Plan.from_dict(VALID)


def test_questions_a_plan_answers() -> None:
    plan = Plan.from_dict(VALID)
    assert (plan.world_size, plan.num_layers) == (3, 26)
    assert [plan.stage_of_layer(layer) for layer in (0, 19, 20, 25)] == [0, 0, 1, 1]
    assert plan.group_of_rank(1).name == "fast"
    assert plan.group_of_stage(1).ranks == (2,)
    assert [plan.recompute_of(stage) for stage in (0, 1)] == ["none", "full"]
    own = Plan.from_dict(changed((["stages", 1, "recompute"], "none")))
    assert own.recompute_of(1) == "none"


@pytest.mark.parametrize("seed", range(50))
def test_a_resized_plan_cuts_the_new_batch_in_proportion(seed: int) -> None:
    plan = random_plan(seed)
    for batch_size in (1, 2, plan.global_batch_size, plan.global_batch_size * 3 + 1):
        resized = plan.resized(batch_size)
        for group, old in zip(resized.groups, plan.groups, strict=True):
            assert sum(gpu.num_samples for gpu in group.gpus) == batch_size
            assert group.ranks == old.ranks
            for gpu, before in zip(group.gpus, old.gpus, strict=True):
                assert all(size >= 1 for size in gpu.micro_batches)
                quota = batch_size * before.num_samples / plan.global_batch_size
                assert abs(gpu.num_samples - quota) < max(1, len(before.micro_batches))
    assert plan.resized(plan.global_batch_size) is plan
