"""What `zorse train` finds out before it starts anything."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch

from tests.inprocess.data_tokenizer import make_tokenizer
from tests.inprocess.hf_models import CONFIGS, save_checkpoint
from zorse_ds.cli.train_parts import job_of
from zorse_ds.errors import ZorseError
from zorse_ds.integrations.recipe.schema import Recipe

PLAN: dict[str, Any] = {
    "global_batch_size": 4,
    "groups": [{"name": "a", "gpus": [{"rank": 0, "micro_batches": [2, 2]}]}],
    "stages": [{"group": "a", "layers": [0, 5]}],
}


@pytest.fixture
def recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "datasets")
    save_checkpoint(CONFIGS["llama"](), tmp_path / "model", torch.float32)
    make_tokenizer(eos_token="<end>").save_pretrained(tmp_path / "model")
    (tmp_path / "text.txt").write_text(" ".join(f"w{i % 50}" for i in range(200)))
    (tmp_path / "plan.json").write_text(json.dumps(PLAN))
    return {
        "model": str(tmp_path / "model"),
        "output": str(tmp_path / "out"),
        "data": {"train": str(tmp_path / "text.txt"), "cache": str(tmp_path / "cache")},
        "plan": str(tmp_path / "plan.json"),
        "seq_len": 12,
        "epochs": 1,
    }


def test_steps_of_an_epoch_are_counted(recipe: dict[str, Any]) -> None:
    job = job_of(Recipe.from_dict(recipe))
    assert job.num_samples is not None
    assert job.num_steps == -(-job.num_samples // 4) > 1
    assert not job.folder.root.exists()


def damage_weights(folder: Path) -> None:
    path = sorted((folder / "model").glob("*.safetensors"))[0]
    path.write_bytes(path.read_bytes()[:-1])


def remove_weights(folder: Path) -> None:
    for path in (folder / "model").glob("*.safetensors*"):
        path.unlink()


def remove_tokenizer(folder: Path) -> None:
    for path in (folder / "model").glob("tokenizer*"):
        path.unlink()


def cut_for_another_model(folder: Path) -> None:
    stages = [{"group": "a", "layers": [0, 32]}]
    (folder / "plan.json").write_text(json.dumps({**PLAN, "stages": stages}))


def leave_samples_out(folder: Path) -> None:
    groups = [{"name": "a", "gpus": [{"rank": 0, "micro_batches": [2, 1]}]}]
    (folder / "plan.json").write_text(json.dumps({**PLAN, "groups": groups}))


def leave_an_index(folder: Path) -> None:
    (folder / "model" / "model.safetensors.index.json").write_text('{"weight_map": {"a": "no"}}')


@pytest.mark.parametrize(
    ("mistake", "sentence"),
    [
        (damage_weights, r"model-00001-of-.*safetensors is damaged"),
        (remove_weights, r"model holds no weights"),
        (remove_tokenizer, r"model has no tokenizer"),
        (
            cut_for_another_model,
            r"stages of the plan cover 32 pipeline layers, but the model has 5",
        ),
        (leave_samples_out, r"sum to 3, but global_batch_size is 4; expected 1 more"),
        (leave_an_index, r"index.json names no, which is not there"),
    ],
)
def test_mistakes_are_told_before_anything_starts(
    recipe: dict[str, Any], tmp_path: Path, mistake: Callable[[Path], None], sentence: str
) -> None:
    mistake(tmp_path)
    with pytest.raises(ZorseError, match=sentence) as told:
        job_of(Recipe.from_dict(recipe))
    assert "\n" not in str(told.value)
    assert not (tmp_path / "out").exists()
