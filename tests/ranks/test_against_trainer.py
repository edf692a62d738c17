"""A recipe on three unequal ranks gives the loss curve of `Trainer`, or `peft`, in one process."""

from __future__ import annotations

import csv
import json
import random
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch

from benchmarks.trainer_reference import trainer_losses
from tests.inprocess.data_tokenizer import make_tokenizer
from tests.inprocess.hf_models import CONFIGS, save_checkpoint
from tests.ranks.harness import run_ranks
from zorse_ds import Plan
from zorse_ds.integrations.huggingface import CausalLMStages
from zorse_ds.integrations.huggingface.adapter_saving import (
    join_adapter_parts,
    write_adapter_config,
    write_adapter_part,
)
from zorse_ds.integrations.recipe.config import config_of
from zorse_ds.integrations.recipe.run_folder import RunFolder
from zorse_ds.integrations.recipe.samples import load_samples, load_tokenizer
from zorse_ds.integrations.recipe.schema import Recipe
from zorse_ds.integrations.recipe.script import run

STEPS, BATCH = 20, 12
GROUPS = {
    "ragged": [
        {
            "name": "a",
            "zero_level": 2,
            "gpus": [
                {"rank": 0, "micro_batches": [3, 1, 4], "shard_weight": 2.0},
                {"rank": 1, "micro_batches": [2, 2]},
            ],
        },
        {"name": "b", "zero_level": 1, "gpus": [{"rank": 2, "micro_batches": [5, 5, 2]}]},
    ],
    "deep": [
        {"name": "a", "gpus": [{"rank": 0, "micro_batches": [6, 6]}]},
        {"name": "b", "recompute": "full", "gpus": [{"rank": 1, "micro_batches": [4, 4, 4]}]},
        {"name": "c", "gpus": [{"rank": 2, "micro_batches": [12]}]},
    ],
}
STAGES = {
    "ragged": [{"group": "a", "layers": [0, 2]}, {"group": "b", "layers": [2, 5]}],
    "deep": [
        {"group": "a", "layers": [0, 1]},
        {"group": "b", "layers": [1, 4]},
        {"group": "c", "layers": [4, 5]},
    ],
}


def write_pairs(path: Path) -> None:
    """Prompts of unequal length with answers of unequal length that follow from them."""
    rng = random.Random(3)
    lines = []
    for _ in range(STEPS * BATCH):
        start, asked, told = rng.randrange(50), rng.randint(1, 6), rng.randint(1, 9)
        words = [f"w{(start + i) % 50}" for i in range(asked + told)]
        prompt, completion = (" ".join(part) for part in (words[:asked], words[asked:]))
        lines.append(json.dumps({"prompt": f"{prompt} ", "completion": completion}))
    path.write_text("".join(f"{line}\n" for line in lines))


def write_run(recipe: Recipe, plan: Plan, folder: RunFolder) -> None:
    """What `zorse train` leaves for the ranks."""
    recipe.save(folder.recipe)
    plan.save(folder.plan)
    folder.config.write_text(json.dumps(config_of(recipe, plan, folder)))


def losses_of(folder: RunFolder) -> list[float]:
    """What the monitor was told of the steps."""
    with open(folder.curves / "csv" / "Train_Samples_train_loss.csv", newline="") as file:
        return [float(loss) for step, loss in csv.reader(file) if step != "step"]


KINDS: dict[str, dict[str, Any]] = {
    "full": {"learning_rate": 2e-2},
    # At several times this rate rounding alone grows to 1e-2, also between two runs of `Trainer`.
    "lora": {
        "learning_rate": 1e-2,
        "adapters": {"r": 4, "lora_alpha": 16, "target_modules": "all-linear"},
    },
}


def write_first_adapters(recipe: Recipe, folder: Path) -> Path:
    """The random values that a recipe's adapters begin with, as `peft` reads them."""
    assert recipe.adapters is not None, "a recipe with adapters"
    stages = CausalLMStages.from_folder(recipe.model, adapters=recipe.adapters, seed=recipe.seed)
    assert stages.adapters is not None
    folder.mkdir()
    write_adapter_part(stages.build(0, stages.structure.num_layers), folder, 0)
    join_adapter_parts(folder)
    write_adapter_config(stages.adapters, folder, Path(recipe.model))
    return folder


@pytest.mark.parametrize(
    ("name", "kind"), [("ragged", "full"), ("deep", "full"), ("ragged", "lora")]
)
def test_the_loss_curve_is_that_of_trainer(
    name: str, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "datasets")
    save_checkpoint(CONFIGS["llama"](), tmp_path / "model", torch.float32)
    make_tokenizer(eos_token="<end>").save_pretrained(tmp_path / "model")
    write_pairs(tmp_path / "pairs.jsonl")
    plan = {"global_batch_size": BATCH, "groups": GROUPS[name], "stages": STAGES[name]}
    given: dict[str, Any] = {
        "model": str(tmp_path / "model"),
        "output": str(tmp_path / "out"),
        "data": {
            "train": str(tmp_path / "pairs.jsonl"),
            "shuffle": False,
            # Which samples make up a batch stays, and so must the curve.
            "group_by_length": name == "ragged",
            "cache": str(tmp_path / "cache"),
        },
        "plan": "given below",
        "seq_len": 32,
        "epochs": 1,
        "lr_scheduler_type": "linear",
        "warmup_steps": 3,
        "weight_decay": 0.1,
        "gradient_clipping": 0.5,
        "dtype": "float32",
        **KINDS[kind],
    }
    recipe, folder = Recipe.from_dict(given), RunFolder(tmp_path / "out")
    tokenizer = load_tokenizer(recipe.model)
    samples = load_samples(recipe, tokenizer, BATCH)
    write_run(recipe, Plan.from_dict(plan), folder)
    run_ranks(3, lambda _: run(folder), timeout_s=90)

    lora = recipe.adapters is not None
    expected = trainer_losses(
        recipe,
        samples.train,
        tokenizer,
        global_batch=BATCH,
        micro_batch=3,
        folder=tmp_path / "trainer",
        adapters=write_first_adapters(recipe, tmp_path / "adapters") if lora else None,
    )
    found = losses_of(folder)
    assert len(expected) == STEPS
    assert found == pytest.approx(expected, abs=1e-4)
    # Adapters alone move a random model less.
    assert expected[-1] < expected[0] - (0.1 if lora else 0.5)
