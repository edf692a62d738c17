"""Models from folders and configurations: what is trained and saved, and what is refused alike."""

from __future__ import annotations

import io
import os
import sys
from contextlib import redirect_stderr
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf

import zorse_ds
from tests.inprocess.hf_models import CONFIGS, save_checkpoint
from tests.ranks.harness import run_ranks
from zorse_ds.core.plan import Plan
from zorse_ds.errors import ZorseError

PLAN = Plan.from_dict(
    {
        "global_batch_size": 4,
        "groups": [
            {
                "name": "a",
                "zero_level": 3,
                "gpus": [{"rank": 0, "micro_batches": [2]}, {"rank": 1, "micro_batches": [2]}],
            },
            {"name": "b", "gpus": [{"rank": 2, "micro_batches": [4]}]},
        ],
        "stages": [{"group": "a", "layers": [0, 3]}, {"group": "b", "layers": [3, 5]}],
    }
)
WHOLE = Plan.from_dict(
    {
        "global_batch_size": 4,
        "groups": [{"name": "a", "gpus": [{"rank": 0, "micro_batches": [4]}]}],
        "stages": [{"group": "a", "layers": [0, 5]}],
    }
)
CONFIG = {"optimizer": {"type": "SGD", "params": {"lr": 0.1}}}
BATCH = [{"input_ids": list(range(i + 1, i + 7))} for i in range(4)]


def sentence_of(action: Any, *arguments: Any, **options: Any) -> str:
    """Kind and text of the error, of which there must be one."""
    with pytest.raises(ZorseError) as caught:
        action(*arguments, **options)
    return f"{type(caught.value).__name__}: {caught.value}"


def train_from_config(rank: int, folder: Path, plan: Plan) -> list[float]:
    module = zorse_ds.from_config(CONFIGS["llama_tied"](), plan, seed=7)
    engine, *_ = zorse_ds.initialize(model=module, config=CONFIG)
    engine.set_dataiterator(iter([BATCH] * 3))
    losses = [float(engine.train_batch()) for _ in range(3)]
    os.chdir(folder)
    engine.save_pretrained(".")
    engine.destroy()
    return losses


def test_random_weights_do_not_depend_on_the_plan_and_save_here(tmp_path: Path) -> None:
    folders = [tmp_path / "ragged", tmp_path / "whole"]
    for folder in folders:
        folder.mkdir()
    ragged = run_ranks(3, train_from_config, folders[0], PLAN, timeout_s=120)
    whole = run_ranks(1, train_from_config, folders[1], WHOLE, timeout_s=120)
    assert ragged == [ragged[0]] * 3
    assert ragged[0] == pytest.approx(whole[0], rel=1e-5)
    assert ragged[0][2] < ragged[0][0]
    models = [hf.AutoModelForCausalLM.from_pretrained(folder).state_dict() for folder in folders]
    for name, value in models[0].items():
        torch.testing.assert_close(value, models[1][name], rtol=1e-4, atol=1e-6)
    assert not list(tmp_path.rglob(".unfinished"))


def refuse_targets(rank: int, folder: Path) -> list[str]:
    module = zorse_ds.from_pretrained(folder / "model", PLAN)
    engine, *_ = zorse_ds.initialize(model=module, config=CONFIG)
    own = [folder / "file", folder / "file" / "below", "", None, "/proc/zorse", f"{folder}/a\0b"]
    problems = [sentence_of(engine.save_pretrained, target) for target in own]
    # One rank alone fails while it writes.
    if rank == 2:
        engine.module.stage_models[1].model.state_dict = lambda: 1 / 0
    problems.append(sentence_of(engine.save_pretrained, folder / "new"))
    engine.destroy()
    return problems


def test_a_target_that_cannot_be_written_is_refused_on_all_ranks(tmp_path: Path) -> None:
    save_checkpoint(CONFIGS["llama"](), tmp_path / "model")
    (tmp_path / "file").write_text("kept")
    results = run_ranks(3, refuse_targets, tmp_path, timeout_s=120)
    assert results == [results[0]] * 3
    expected = ["is a file; expected a", "lies below the file", "is ''", "is None", "cannot be wri"]
    for part, found in zip([*expected, "null", "by rank 2 (Zero"], results[0], strict=True):
        assert found.startswith("ModelError: ")
        assert part in found
    assert (tmp_path / "file").read_text() == "kept"
    assert not list(tmp_path.rglob(".unfinished"))
    assert not list((tmp_path / "new").iterdir())


def refuse_models(rank: int, folder: Path) -> list[str]:
    load, make = zorse_ds.from_pretrained, zorse_ds.from_config
    llama = CONFIGS["llama"]()
    return [
        *(sentence_of(load, each, PLAN) for each in (None, "", 5, folder / "file", folder / "no")),
        *(sentence_of(load, folder / each, PLAN) for each in ("empty", "index")),
        sentence_of(load, folder / "model", PLAN, dtype="float32"),
        sentence_of(make, {"model_type": "llama"}, PLAN),
        sentence_of(make, llama, PLAN, seed=-1),
        sentence_of(make, llama),
        sentence_of(make, llama, PLAN, seed=rank),
    ]


def test_what_is_no_model_is_refused_on_all_ranks(tmp_path: Path) -> None:
    save_checkpoint(CONFIGS["llama"](), tmp_path / "model")
    save_checkpoint(CONFIGS["llama"](), tmp_path / "index")
    (tmp_path / "index" / "model.safetensors.index.json").write_text('{"weight_map": [1]}')
    (tmp_path / "file").write_text("")
    (tmp_path / "empty").mkdir()
    results = run_ranks(3, refuse_models, tmp_path, timeout_s=120)
    assert results == [results[0]] * 3
    expected = [
        *("the folder is None", "the folder is ''", "the folder is 5", "file is a file; expected"),
        *("no is not a folder", "config.json cannot be read", "weight_map is no object"),
        *("dtype is 'float32'", "configuration is a dict", "seed is -1; expected"),
        *("PlanError: from_config was given no plan", "the ranks disagree about the model's files"),
    ]
    for part, found in zip(expected, results[0], strict=True):
        assert part in found


def load_and_listen(rank: int, folder: Path) -> str:
    with redirect_stderr(io.StringIO()) as heard:
        zorse_ds.from_pretrained(folder, PLAN)
    return heard.getvalue()


def test_only_rank_0_shows_a_bar(tmp_path: Path) -> None:
    save_checkpoint(CONFIGS["llama"](), tmp_path)
    first, *others = run_ranks(3, load_and_listen, tmp_path, timeout_s=120)
    assert "Loading weights" in first
    assert others == ["", ""]


def train_without_a_launcher(rank: int) -> tuple[list[float], list[str]]:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        del os.environ[name]
    os.environ["RANK"] = "0"
    sys.modules["mpi4py"] = None  # type: ignore[assignment]
    told = [sentence_of(zorse_ds.from_config, CONFIGS["llama"](), WHOLE)]
    del os.environ["RANK"], os.environ["LOCAL_RANK"]
    module = zorse_ds.from_config(CONFIGS["llama"](), WHOLE, seed=7)
    told.append(sentence_of(zorse_ds.from_config, CONFIGS["llama"](), PLAN))
    engine, *_ = zorse_ds.initialize(model=module, config=CONFIG)
    losses = [float(engine.train_batch(iter([BATCH]))) for _ in range(3)]
    engine.destroy()
    return losses, told


def test_a_process_that_nobody_launched_is_a_world_of_one() -> None:
    ((losses, told),) = run_ranks(1, train_without_a_launcher, timeout_s=120)
    assert losses[2] < losses[0]
    assert "lacks WORLD_SIZE, MASTER_ADDR, MASTER_PORT, and there is no mpi4py" in told[0]
    assert "names 3 ranks, but 1 were started; expected 3 processes, as `deepspeed --num" in told[1]
