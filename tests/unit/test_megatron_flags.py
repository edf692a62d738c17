"""A plan as Megatron-Core's flags: what they say is the plan, what they cannot say is told."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from tests.random_plans import random_plan
from zorse_ds.cli import app
from zorse_ds.core.megatron import layout_of, megatron_flags
from zorse_ds.core.model import ModelShape
from zorse_ds.core.plan import Plan


def expanded(layout: str) -> list[str]:
    """Stages of single letters, by the format's own rule: `|` splits, `x*n` repeats a letter."""
    return [re.sub(r"(\w)\*(\d+)", lambda m: m[1] * int(m[2]), part) for part in layout.split("|")]


def values(flags: tuple[str, ...]) -> dict[str, str]:
    """Flags with the word behind each, empty where that is a flag."""
    words = [*flags, "--"]
    return {
        word: "" if words[i + 1].startswith("--") else words[i + 1]
        for i, word in enumerate(flags)
        if word.startswith("--")
    }


def plan_of(groups: list[dict[str, Any]], cuts: list[int], visits: list[str]) -> Plan:
    stages = [{"group": name, "layers": [cuts[i], cuts[i + 1]]} for i, name in enumerate(visits)]
    schedule = "ministage" if len(visits) > len(groups) else "1f1b"
    return Plan.from_dict(
        {"global_batch_size": 8, "schedule": schedule, "groups": groups, "stages": stages}
    )


def group(name: str, ranks: list[list[int]], first: int, **more: Any) -> dict[str, Any]:
    gpus = [{"rank": first + i, "micro_batches": sizes} for i, sizes in enumerate(ranks)]
    return {"name": name, "gpus": gpus, **more}


def test_a_rectangle_is_said_in_full() -> None:
    even = [[2, 2], [2, 2]]
    plan = plan_of(
        [group("a", even, 0, zero_level=1), group("b", even, 2, zero_level=1)],
        [0, 4, 10],
        ["a", "b"],
    )
    found = megatron_flags(plan, 4096, "bfloat16")
    assert found.unsaid == ()
    assert values(found.flags) == {
        "--num-layers": "8",
        "--seq-length": "4096",
        "--tensor-model-parallel-size": "1",
        "--pipeline-model-parallel-size": "2",
        "--pipeline-model-parallel-layout": "Et*3|t*5L",
        "--global-batch-size": "8",
        "--micro-batch-size": "2",
        "--bf16": "",
        "--use-distributed-optimizer": "",
    }


def test_rounds_of_stages_are_said_by_the_layout() -> None:
    groups = [group("a", [[8]], 0), group("b", [[8]], 1)]
    plan = plan_of(groups, [0, 1, 4, 5, 9], ["a", "b", "a", "b"])
    found = megatron_flags(plan, 128, "float32")
    assert expanded(layout_of(plan)) == ["E", "ttt", "t", "tttL"]
    assert "--bf16" not in found.flags
    assert len(found.unsaid) == 1
    assert "the schedule is 'ministage'" in found.unsaid[0]


@pytest.mark.parametrize(
    ("groups", "sentence"),
    [
        ([group("a", [[4, 4]], 0), group("b", [[4], [4]], 1)], "groups are 1, 2 ranks wide"),
        ([group("a", [[4, 4]], 0), group("b", [[2] * 4], 1)], "micro-batches have 2, 4 samples"),
        ([group("a", [[5], [3]], 0), group("b", [[4], [4]], 2)], "work on 3, 4, 5 samples"),
        ([group("a", [[8]], 1), group("b", [[8]], 0)], "come in the order 1, 0 along the pipeline"),
        ([group("a", [[8]], 0, zero_level=1), group("b", [[8]], 1)], "groups have zero_level 0, 1"),
        ([group("a", [[8]], 0, dtype="float16"), group("b", [[8]], 1)], "bfloat16, float16"),
        (
            [group("a", [[8]], 0, recompute="full"), group("b", [[8]], 1)],
            "unlike numbers of layers; Megatron is told 3 in all",
        ),
        ([group("a", [[8]], 0, offload="params"), group("b", [[8]], 1)], "offload is none, params"),
    ],
)
def test_what_megatron_lacks_is_told(groups: list[dict[str, Any]], sentence: str) -> None:
    found = megatron_flags(plan_of(groups, [0, 3, 6], ["a", "b"]), 64)
    assert [own for own in found.unsaid if sentence in own], found.unsaid
    assert not [own for own in found.unsaid if "\n" in own]


@pytest.mark.parametrize("seed", range(40))
def test_the_layout_has_each_layer_once_where_the_plan_has_it(seed: int) -> None:
    plan = random_plan(seed, num_layers=3 + seed % 7)
    stages = expanded(layout_of(plan))
    blocks = "t" * (plan.num_layers - 2)
    assert "".join(stages) == f"E{blocks}L"
    assert [len(stage) for stage in stages] == [stage.layers.size for stage in plan.stages]
    size = int(values(megatron_flags(plan, 64).flags)["--micro-batch-size"])
    width = plan.world_size // len(plan.groups)
    assert size == 1 or plan.global_batch_size % (size * width) == 0


def test_the_command_prints_flags_alone(tmp_path: Path) -> None:
    ModelShape.llama("small", 6, 256, 688, 8, vocab=1000).save(tmp_path / "shape.json")
    words = ["plan", "--cluster", "desk", "--shape", str(tmp_path / "shape.json")]
    words += ["--seq-len", "256", "--global-batch", "16", "--effort", "0.1"]
    result = CliRunner().invoke(app, [*words, "--format", "megatron"])
    assert result.exit_code == 0, result.output
    flags = shlex.split(result.stdout)
    assert values(tuple(flags))["--num-layers"] == "6"
    facts = json.loads(CliRunner().invoke(app, [*words, "--format", "megatron", "--json"]).stdout)
    assert facts["megatron"]["flags"] == flags
    assert all(f"not in the flags: {own}" in result.stderr for own in facts["megatron"]["unsaid"])
