"""What DeepSpeed's monitors are told: loss and learning rate of each step, by one writer."""

from __future__ import annotations

import contextlib
import csv
import importlib.util
import io
import os
from pathlib import Path
from typing import Any

import pytest

from tests.ranks.engine_cases import Case, Result, assert_close, make_engine, train
from tests.ranks.engine_models import batches_of, plan_of, vectors
from tests.ranks.harness import run_ranks
from tests.ranks.wandb_file import history_of

SIZES = [7, 7, 3, 7]
POSITIONS = [7, 14, 17, 24]
"""Samples seen after each step: what monitors plot against."""
PLAN = plan_of([[[3, 1], [2, 1]], [[2, 5]]], [0, 3, 6])
SCHEDULE = {"scheduler": {"type": "StepLR", "params": {"step_size": 1, "gamma": 0.5}}}
LOSS, RATE = "Train/Samples/train_loss", "Train/Samples/lr"


def monitored(rank: int, config: dict[str, Any], folder: Path) -> tuple[Result, str]:
    """Train and evaluate with monitors on; what was printed is returned."""
    os.environ["WANDB_DIR"] = str(folder)
    case = Case("monitored", PLAN, batches_of(vectors(24), SIZES), config=SCHEDULE | config)
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        engine = make_engine(case)
        result = train(engine, 4, iter(case.batches))
        engine.eval_batch(iter([vectors(5)]))
    engine.destroy()
    if "wandb" in config and rank == 0:
        import wandb

        # The history reaches the file only at the end of the run.
        wandb.finish()
        wandb.teardown()
    return result, printed.getvalue()


def trained(config: dict[str, Any], folder: Path) -> tuple[Result, list[str]]:
    results = run_ranks(3, monitored, config, folder, timeout_s=90)
    return results[0][0], [printed for _, printed in results]


def test_csv_files_hold_each_step_once(tmp_path: Path) -> None:
    monitor = {"enabled": True, "output_path": str(tmp_path), "job_name": "job"}
    result, _ = trained({"csv_monitor": monitor}, tmp_path)
    for name, expected in ((LOSS, result.losses), (RATE, result.rates)):
        with open(tmp_path / "job" / f"{name.replace('/', '_')}.csv", newline="") as file:
            header, *rows = csv.reader(file)
        assert header[0] == "step"
        assert [int(step) for step, _ in rows] == POSITIONS
        assert_close([float(value) for _, value in rows], expected, name)


def test_tensorboard_holds_each_step_once(tmp_path: Path) -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    monitor = {"enabled": True, "output_path": str(tmp_path), "job_name": "job"}
    result, _ = trained({"tensorboard": monitor}, tmp_path)
    assert len(list((tmp_path / "job").iterdir())) == 1
    events = accumulator.EventAccumulator(str(tmp_path / "job"))
    events.Reload()
    for name, expected in ((LOSS, result.losses), (RATE, result.rates)):
        scalars = events.Scalars(name)
        assert [scalar.step for scalar in scalars] == POSITIONS
        assert_close([scalar.value for scalar in scalars], expected, name)


@pytest.mark.skipif(importlib.util.find_spec("wandb") is None, reason="wandb is not installed")
def test_wandb_holds_each_step_once(tmp_path: Path) -> None:
    result, _ = trained({"wandb": {"enabled": True, "project": "tests"}}, tmp_path)
    rows = history_of(tmp_path)
    for name, expected in ((LOSS, result.losses), (RATE, result.rates)):
        own = [row for row in rows if name in row]
        assert [row["_step"] for row in own] == POSITIONS
        assert_close([row[name] for row in own], expected, name)


def test_progress_is_printed_by_one_rank_as_often_as_asked(tmp_path: Path) -> None:
    result, printed = trained({"steps_per_print": 2, "wall_clock_breakdown": True}, tmp_path)
    lines = [line for line in printed[0].splitlines() if line.startswith("steps:")]
    assert [line.split(" iter")[0] for line in lines] == [
        f"steps: {step} loss: {result.losses[step - 1]:0.4f}" for step in (2, 4)
    ]
    assert not any("steps:" in text for text in printed[1:])
