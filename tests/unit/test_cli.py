"""The command line: readable for people, JSON for machines, one sentence for each mistake."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

import zorse_ds
from tests.random_plans import random_plan, uniform_plan
from zorse_ds.cli import app
from zorse_ds.core.plan import Plan


def shown(plan: Plan, folder: Path, *options: str) -> str:
    """What `zorse show` prints for a plan."""
    path = folder / "plan.json"
    plan.save(path)
    result = CliRunner().invoke(app, ["show", str(path), *options])
    assert result.exit_code == 0, result.output
    return result.output


def zorse(*arguments: str) -> subprocess.CompletedProcess[str]:
    """The program in a process of its own, as a terminal runs it."""
    script = "from zorse_ds.cli import main; main()"
    return subprocess.run(
        [sys.executable, "-c", script, *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


EXAMPLE = {
    "version": 1,
    "global_batch_size": 24,
    "groups": [
        {
            "name": "fast",
            "zero_level": 2,
            "gpus": [
                {"rank": 0, "micro_batches": [4, 4, 4], "shard_weight": 2.0},
                {"rank": 1, "micro_batches": [3, 3, 3, 3]},
            ],
        },
        {"name": "[red]", "recompute": "full", "gpus": [{"rank": 2, "micro_batches": [2] * 12}]},
    ],
    "stages": [{"group": "fast", "layers": [0, 20]}, {"group": "[red]", "layers": [20, 26]}],
}


def test_show_tells_what_the_plan_means(tmp_path: Path) -> None:
    text = shown(Plan.from_dict(EXAMPLE), tmp_path, "--width", "140")
    for part in (
        *("3 ranks, 26 layers in 2 stages, 24 samples a step, schedule 1f1b", "0-19", "20-25"),
        *("fast", "[red]", "3 x 4", "4 x 3", "12 x 2", "66.7%", "33.3%", "100%", "full"),
        "many (2) to many (3)",
    ):
        assert part in text
    rows = [line for line in text.splitlines() if line.startswith("rank ") and "F" in line]
    assert [row[:7] for row in rows] == ["rank 0 ", "rank 1 ", "rank 2 "]
    for row in rows:
        assert len(row) == 140
        assert "B" in row
    assert "F9-B9===" in rows[2]


def test_every_line_keeps_to_the_width(tmp_path: Path) -> None:
    for seed in range(10):
        lines = shown(random_plan(seed), tmp_path, "--width", "60").splitlines()
        assert max(map(len, lines)) <= 60


def test_a_large_plan_is_cut_with_a_note(tmp_path: Path) -> None:
    text = shown(uniform_plan(4, 16, 20), tmp_path, "--width", "100", "--rows", "5")
    assert len(text.splitlines()) < 40
    # Once for the ranks, once for the grid.
    assert text.count("... and 59 more rows (--rows shows more)") == 2


def test_any_number_of_layers_is_shown_at_once(tmp_path: Path) -> None:
    cuts = {"fast": [0, 1], "[red]": [1, 2**31 - 1]}
    stages = [{"group": group, "layers": layers} for group, layers in cuts.items()]
    text = shown(Plan.from_dict(EXAMPLE | {"stages": stages}), tmp_path, "--width", "140")
    assert "1-2147483646" in text
    assert "0      0 " in text


def test_settings_have_columns_where_they_are_set(tmp_path: Path) -> None:
    plain = shown(Plan.from_dict(EXAMPLE), tmp_path, "--width", "140")
    for head in ("recompute every", "offload", "dtype", "activations in"):
        assert head not in plain
    fast, slow = EXAMPLE["groups"]  # type: ignore[misc]
    groups = [
        {**fast, "dtype": "bfloat16", "offload": "params"},
        {**slow, "recompute_every": 3},
    ]
    plan = Plan.from_dict(EXAMPLE | {"groups": groups})
    text = shown(plan, tmp_path, "--width", "160")
    stages = [line.split() for line in text.splitlines() if line.startswith(("0 ", "1 "))]
    assert stages[0][-2:] == ["params", "bfloat16"]
    assert stages[1][-4:] == ["full", "3", "none", "config's"]
    assert "activations in" in text
    boundary = next(line for line in text.splitlines() if line.startswith("0 to 1"))
    assert boundary.split()[-2:] == ["config's", "bfloat16"]
    facts = json.loads(shown(plan, tmp_path, "--json"))
    assert facts["boundaries"][0]["gradients_dtype"] == "bfloat16"


def test_one_stage_has_no_transfers(tmp_path: Path) -> None:
    assert "Transfers" not in shown(uniform_plan(1, 1, 1), tmp_path)


def test_json_is_for_machines(tmp_path: Path) -> None:
    facts = json.loads(shown(Plan.from_dict(EXAMPLE), tmp_path, "--json"))
    assert facts["ranks"][0]["held_shares"]["gradients"] == pytest.approx(2 / 3)
    assert facts["ranks"][2]["in_flight_limits"] == [1]
    assert facts["boundaries"][0]["num_transfers"] == 16
    assert 0 < facts["bubble_share"] < 1


def test_mistakes_are_sentences_on_stderr(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    path.write_text(json.dumps({**EXAMPLE, "scedule": "gpipe", "global_batch_size": 25}))
    result = zorse("show", str(path))
    assert (result.returncode, result.stdout) == (2, "")
    sentences = result.stderr.splitlines()
    assert len(sentences) == 3
    assert all(sentence.startswith(f"{path}: ") for sentence in sentences)
    assert "did you mean 'schedule'?" in result.stderr
    assert "Traceback" not in result.stderr


def test_a_missing_file_is_one_sentence(tmp_path: Path) -> None:
    result = zorse("show", str(tmp_path / "none.json"))
    assert result.returncode == 2
    assert len(result.stderr.splitlines()) == 1


def test_version_and_help() -> None:
    assert zorse("--version").stdout == f"zorse {zorse_ds.__version__}\n"
    assert "show" in zorse("--help").stdout
    assert "--json" in zorse("show", "--help").stdout
    assert zorse("shwo").returncode == 2
