"""The planner as a whole: near the best there is, on small clusters; and what it says."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tests.exhaustive_plans import best_step_s, peak_timer, random_problem
from zorse_ds.cli.program import app
from zorse_ds.core.cluster_files import cluster_from
from zorse_ds.core.model import ModelShape
from zorse_ds.core.plan import Plan
from zorse_ds.cost.memory import memory_of
from zorse_ds.cost.setting import Setting
from zorse_ds.errors import ClusterError, PlannerError
from zorse_ds.planner.answer import answer_of, simulated
from zorse_ds.planner.effort import Effort
from zorse_ds.planner.objective import choose
from zorse_ds.planner.search import search

QUICK = Effort(events=100_000)
SMALL = ModelShape.llama("small", 8, 1024, 2816, 16)


def setting_of(cluster: str, model: ModelShape = SMALL, seq_len: int = 512) -> Setting:
    return Setting(cluster_from(cluster), model, peak_timer, seq_len)


@pytest.mark.parametrize("seed", [4, 7, 8])
def test_no_plan_is_two_per_cent_faster(seed: int) -> None:
    problem = random_problem(seed)
    found = search(problem.setting, problem.batch, QUICK).best.step_s
    assert found <= 1.02 * best_step_s(problem, found)


@pytest.mark.parametrize("cluster", ["mini_b", "desk"])
def test_the_plan_is_valid_fits_and_takes_as_long_as_said(cluster: str) -> None:
    setting = setting_of(cluster)
    best = search(setting, 32, QUICK).best
    plan = Plan.from_dict(best.plan.to_dict())
    assert plan == best.plan
    assert plan.world_size == len(setting.cluster.gpus)
    assert all(own.fits for own in memory_of(plan, setting).values())
    assert simulated(plan, setting).step_s == pytest.approx(best.step_s)


def test_the_answer_does_not_depend_on_when_or_with_how_many_workers() -> None:
    setting = setting_of("desk")
    first = search(setting, 16, QUICK).best
    assert search(setting, 16, QUICK).best.plan == first.plan
    assert search(setting, 16, replace(QUICK, workers=2)).best.plan == first.plan


@pytest.mark.parametrize("events_at_once", [200, 20_000])
def test_the_next_best_ideas_are_told_with_what_they_lose(events_at_once: int) -> None:
    setting = setting_of("mini_b")
    found = search(setting, 64, replace(QUICK, events_at_once=events_at_once, confirmed=1))
    assert all(each.is_whole for each in found.ranked)
    answer = answer_of(found, setting)
    assert {each["other"] for each in answer["alternatives"]} == {"schedule", "groups", "grouping"}
    assert all(each["lost_share"] >= 0 for each in answer["alternatives"])
    assert answer["num_simulated"] > len(answer["alternatives"]) + 1


def test_fast_gpus_get_more_samples_and_layers() -> None:
    setting = setting_of("mini_b")
    plan = search(setting, 64, QUICK).best.plan
    work = dict.fromkeys(range(8), 0)
    for group in plan.groups:
        layers = sum(stage.layers.size for stage in plan.stages if stage.group == group.name)
        for gpu in group.gpus:
            work[gpu.rank] = gpu.num_samples * layers
    assert work[0] > 2 * max(work[rank] for rank in (5, 6, 7))


def test_what_is_missing_is_said() -> None:
    """A layer that no GPU can hold, however its state is cut."""
    large = ModelShape.llama("large", 3, 32768, 65536, 64, vocab=100)
    with pytest.raises(
        PlannerError, match=r"no plan fits .* lacks .* GiB, most of it .*; expected"
    ):
        search(setting_of("desk", large, seq_len=1), 1, QUICK)


def test_a_change_that_would_help_is_named() -> None:
    model = ModelShape.llama("wide", 2, 4096, 11008, 32)
    with pytest.raises(PlannerError, match=r"it would fit with samples of \d+ tokens"):
        search(setting_of("desk", model, seq_len=65536), 8, QUICK)


def test_the_least_cost_leaves_dear_nodes_out_and_needs_prices() -> None:
    setting = setting_of("desk")
    with pytest.raises(ClusterError, match=r"nodes\[0\].price_per_hour is missing"):
        choose(setting, 16, "cost", QUICK)
    data = setting.cluster.to_dict()
    for node, price in zip(data["nodes"], (1.0, 500.0), strict=True):
        node["price_per_hour"] = price
    priced = replace(setting, cluster=type(setting.cluster).from_dict(data))
    choice = choose(priced, 16, "cost", QUICK)
    assert choice.left_out == ("node1",)
    answer = answer_of(choice.found, choice.setting)
    tokens_per_hour = answer["tokens_per_s"] * 3600
    assert answer["price_per_billion_tokens"] == pytest.approx(1e9 / tokens_per_hour)


def test_the_command_writes_a_plan_and_compares_what_ifs(tmp_path: Path) -> None:
    shape, output = tmp_path / "shape.json", tmp_path / "plan.json"
    SMALL.save(shape)
    base = ["plan", "--cluster", "desk", "--shape", str(shape), "--seq-len", "256"]
    base += ["--global-batch", "16", "--effort", "0.1"]
    options = ["--add", "1xRTX4090", "--without", "node1", "--batch", "8", "-o", str(output)]
    result = CliRunner().invoke(app, [*base, *options, "--json"])
    assert result.exit_code == 0, result.output
    facts = json.loads(result.stdout)
    assert Plan.load(output).to_dict() == facts["plan"]
    assert list(facts["what_if"]) == ["add 1xRTX4090", "without node1", "batch 8"]
    assert len(facts["what_if"]["without node1"]["ranks"]) == 3
    table = CliRunner().invoke(app, [*base, "--batch", "8"])
    assert "What if" in table.stdout
    assert "Limit: compute" in table.stdout


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--cluster", "desc", "--seq-len", "8"], "did you mean 'desk'"),
        (["--cluster", "desk", "--seq-len", "8", "--add", "2xRTX409"], "RTX4090"),
        (["--cluster", "desk", "--seq-len", "8", "--without", "node7"], "no node 'node7'"),
    ],
)
def test_mistakes_are_one_sentence(options: list[str], sentence: str, tmp_path: Path) -> None:
    shape = tmp_path / "shape.json"
    SMALL.save(shape)
    result = CliRunner().invoke(
        app, ["plan", *options, "--shape", str(shape), "--global-batch", "4"]
    )
    assert sentence in str(result.exception)
