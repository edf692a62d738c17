"""What monitors are told of each step: read back from W&B's offline file, TensorBoard and CSV."""

from __future__ import annotations

import csv
import math
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import zorse_ds
from tests.inprocess.hf_models import CONFIGS
from tests.ranks.engine_cases import assert_close
from tests.ranks.harness import run_ranks
from tests.ranks.wandb_file import config_of, history_of

PLAN = {
    "version": 1,
    "global_batch_size": 4,
    "groups": [
        {
            "name": "a",
            "gpus": [{"rank": 0, "micro_batches": [2, 1]}, {"rank": 1, "micro_batches": [1]}],
        },
        {"name": "b", "gpus": [{"rank": 2, "micro_batches": [3, 1]}]},
    ],
    "stages": [{"group": "a", "layers": [0, 2]}, {"group": "b", "layers": [2, 5]}],
}
CLUSTER = {
    "types": {
        "big": {"fp32_tflops": 1.0, "memory_gib": 8},
        "small": {"fp32_tflops": 0.5, "memory_gib": 8},
    },
    "nodes": [
        {"gpu_types": ["big", "small", "small"], "intra_gb_per_s": 2, "nic_gb_per_s": 1},
    ],
}
SHARES = {"big": 3 / 4 * 2 / 5, "small": 1 / 4 * 2 / 5 + 3 / 5}
"""Samples by layers: rank 0 has 3 of 4 samples of 2 of 5 layers, and so on."""
LENGTHS = (7, 5, 9, 3, 6, 6, 2, 8, 4, 9)
BATCH_TOKENS = [24, 22, 13]
"""Of LENGTHS, four at a time; the last batch is short."""
PREFIX = "Train/Samples/"


def samples() -> list[dict[str, list[int]]]:
    rows = []
    for seed, length in enumerate(LENGTHS):
        generator = torch.Generator().manual_seed(seed)
        ids = torch.randint(3, 60, (length,), generator=generator).tolist()
        rows.append({"input_ids": ids, "labels": ids})
    return rows


def monitored(rank: int, folder: Path) -> list[tuple[float, float]]:
    """Three steps; their losses and gradient norms."""
    # As for a user who never logged in: W&B must neither stop training nor ask.
    for name in ("WANDB_MODE", "WANDB_API_KEY"):
        os.environ.pop(name, None)
    os.environ["HOME"] = str(folder)
    section = {"enabled": True, "output_path": str(folder), "job_name": "job"}
    config = {
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        "steps_per_print": None,
        "csv_monitor": section,
        "tensorboard": section | {"job_name": "board"},
        "wandb": {"enabled": True, "project": "tests"},
        "zorse": {
            "data": {"shuffle": False},
            "monitor": {
                "cluster": CLUSTER,
                "predicted_step_s": 0.5,
                "picture_every": 2,
                "folder": str(folder / "curves"),
            },
        },
    }
    plan = zorse_ds.Plan.from_dict(PLAN)
    model = zorse_ds.from_config(CONFIGS["llama"](), plan)
    engine, *_ = zorse_ds.initialize(model=model, config=config, training_data=samples())
    facts = []
    for _ in range(3):
        loss = float(engine.train_batch())
        facts.append((loss, float(engine.get_global_grad_norm())))
    engine.destroy()
    if rank == 0:
        import wandb

        assert wandb.run is None, "the engine ends the run that it started"
        wandb.teardown()
    dist.barrier()
    return facts


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[tuple[float, float]]]:
    pytest.importorskip("wandb")
    folder = tmp_path_factory.mktemp("monitored")
    return folder, run_ranks(3, monitored, folder, timeout_s=90)[0]


def check(series: dict[str, list[float]], facts: list[tuple[float, float]]) -> None:
    """Everything that is named, against what the script saw and what follows from the plan."""
    losses, norms = zip(*facts, strict=True)
    assert_close(series["train_loss"], list(losses), "loss")
    assert_close(series["perplexity"], [math.exp(loss) for loss in losses], "perplexity")
    assert_close(series["grad_norm"], list(norms), "norm")
    assert series["lr"] == pytest.approx([0.1] * 3)
    seconds = series["step_s"]
    assert all(0 < second < 60 for second in seconds)
    assert series["predicted_step_s"] == [0.5] * 3
    assert_close(series["step_s_over_predicted"], [second / 0.5 for second in seconds], "ratio")
    rates = [tokens / second for tokens, second in zip(BATCH_TOKENS, seconds, strict=True)]
    assert_close(series["tokens_per_s"], rates, "tokens/s")
    for name, share in SHARES.items():
        own = [rate * share for rate in rates]
        assert_close(series[f"tokens_per_s/{name}"], own, f"tokens/s of {name}")
    for rank in range(3):
        busy = series[f"busy_share/rank_{rank}"]
        assert all(0 < share <= 1 for share in busy[:2])
        # Of the two samples of the last batch rank 1 is given none.
        assert (busy[2] == 0) == (rank == 1)
        # A process that has loaded torch holds some hundred megabytes.
        assert all(0.1 < gib < 64 for gib in series[f"peak_memory_gib/rank_{rank}"])


def test_wandb_without_a_key_holds_it_all(told: tuple[Path, Any]) -> None:
    folder, facts = told
    rows = history_of(folder / "curves")
    series: dict[str, list[float]] = {}
    for row in rows:
        for name, value in row.items():
            series.setdefault(name.removeprefix(PREFIX), []).append(value)
    check(series, facts)
    pictures = [row for row in rows if "timeline" in row or "timeline/_type" in row]
    assert [row["_step"] for row in pictures] == [8]
    config = config_of(folder / "curves")
    assert config["plan"] == zorse_ds.Plan.from_dict(PLAN).to_dict()
    assert config["cluster"] == CLUSTER
    assert config["gpu_types"] == ["big", "small", "small"]
    assert config["versions"]["torch"] == torch.__version__
    assert config["deepspeed"]["optimizer"]["type"] == "SGD"


def test_tensorboard_holds_it_all(told: tuple[Path, Any]) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    folder, facts = told
    events = EventAccumulator(str(folder / "board"))
    events.Reload()
    tags = events.Tags()
    check(
        {
            tag.removeprefix(PREFIX): [scalar.value for scalar in events.Scalars(tag)]
            for tag in tags["scalars"]
        },
        facts,
    )
    assert [image.step for image in events.Images("timeline")] == [8]


def test_csv_holds_all_numbers_and_the_picture_lies_beside(told: tuple[Path, Any]) -> None:
    folder, facts = told
    series = {}
    for path in (folder / "job").glob("*.csv"):
        with open(path, newline="") as file:
            _, *rows = csv.reader(file)
        assert [int(step) for step, _ in rows] == [4, 8, 10]
        name = path.stem.removeprefix("Train_Samples_")
        for group in ("tokens_per_s_", "busy_share_", "peak_memory_gib_"):
            name = name.replace(group, f"{group[:-1]}/") if name != group[:-1] else name
        series[name] = [float(value) for _, value in rows]
    check(series, facts)
    pictures = sorted((folder / "curves" / "timelines").iterdir())
    assert [path.name for path in pictures] == ["step_2.png"]
    assert pictures[0].read_bytes().startswith(b"\x89PNG")


def test_one_run_is_written_by_one_rank(told: tuple[Path, Any]) -> None:
    folder, _ = told
    runs = [path for path in folder.rglob("*.wandb") if path.stat().st_size > 7]
    assert len(runs) == 1
    assert (folder / "curves" / "wandb_run_id").read_text() in runs[0].name
