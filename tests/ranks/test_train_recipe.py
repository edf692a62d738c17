"""`zorse train`: a recipe through the real launcher, and a run that goes on where it ended."""

from __future__ import annotations

import csv
import json
import os
import re
import subprocess
import sys
from contextlib import chdir
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
import transformers as hf

from tests.inprocess.data_tokenizer import make_tokenizer
from tests.inprocess.hf_models import CONFIGS, save_checkpoint
from tests.ranks.harness import run_ranks
from tests.ranks.launched import environment
from zorse_ds import Plan
from zorse_ds.errors import ZorseError
from zorse_ds.integrations.recipe.config import config_of
from zorse_ds.integrations.recipe.run_folder import RunFolder
from zorse_ds.integrations.recipe.samples import load_samples
from zorse_ds.integrations.recipe.schema import Recipe
from zorse_ds.integrations.recipe.script import run

PLAN = {
    "version": 1,
    "global_batch_size": 5,
    "groups": [
        {
            "name": "a",
            "zero_level": 2,
            "gpus": [
                {"rank": 0, "micro_batches": [2, 1], "shard_weight": 2.0},
                {"rank": 1, "micro_batches": [2]},
            ],
        },
        {"name": "b", "gpus": [{"rank": 2, "micro_batches": [4, 1]}]},
    ],
    "stages": [{"group": "a", "layers": [0, 2]}, {"group": "b", "layers": [2, 5]}],
}


@pytest.fixture
def recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """A model, texts in which each word foretells the next, and what to do with them."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "datasets")
    save_checkpoint(CONFIGS["llama"](), tmp_path / "model", torch.float32)
    make_tokenizer(eos_token="<end>").save_pretrained(tmp_path / "model")
    texts = [" ".join(f"w{(i + j) % 50}" for j in range(5 + i % 13)) for i in range(40)]
    lines = (json.dumps({"text": text}) for text in texts)
    (tmp_path / "train.jsonl").write_text("".join(f"{line}\n" for line in lines))
    (tmp_path / "plan.json").write_text(json.dumps(PLAN))
    return {
        "model": str(tmp_path / "model"),
        "output": str(tmp_path / "out"),
        "data": {
            "train": str(tmp_path / "train.jsonl"),
            "validation_share": 0.2,
            "cache": str(tmp_path / "cache"),
        },
        "plan": str(tmp_path / "plan.json"),
        "seq_len": 12,
        "epochs": 2,
        "learning_rate": 1e-2,
        "dtype": "float32",
        "eval_steps": 4,
        "warmup_steps": 2,
    }


def plain_loss(folder: Path, dataset: datasets.Dataset) -> float:
    """The mean loss over all targets, by transformers alone."""
    model = hf.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    loss_sum = num_targets = 0.0
    for sample in dataset:
        ids, labels = (torch.tensor([sample[key]]) for key in ("input_ids", "labels"))
        targets = int((labels[:, 1:] != -100).sum())
        if targets:
            with torch.no_grad():
                loss_sum += model(input_ids=ids, labels=labels).loss.item() * targets
            num_targets += targets
    return loss_sum / num_targets


def test_a_recipe_trains_by_the_launcher(recipe: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "recipe.json").write_text(json.dumps(recipe))
    command = [sys.executable, "-m", "zorse_ds.cli", "train", "recipe.json"]
    caches = {"HF_DATASETS_CACHE": str(tmp_path / "datasets"), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        command,
        cwd=tmp_path,
        env=environment() | caches,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    folder = RunFolder(tmp_path / "out")
    tokenizer = make_tokenizer(eos_token="<end>")
    validation = load_samples(Recipe.from_dict(recipe), tokenizer, 5).validation
    assert validation is not None
    measured = json.loads(folder.finished.read_text())["validation"]
    assert [each["step"] for each in measured] == [0, 4, 8, 12, measured[-1]["step"]]
    for place, each in ((tmp_path / "model", measured[0]), (folder.model, measured[-1])):
        assert each["loss"] == pytest.approx(plain_loss(place, validation), rel=1e-5)
    assert measured[-1]["loss"] < measured[0]["loss"] - 0.3
    assert folder.steps_saved() == measured[-1]["step"]
    assert Plan.load(folder.plan) == Plan.from_dict(PLAN)
    assert json.loads(folder.config.read_text())["optimizer"]["params"]["lr"] == 1e-2
    with open(folder.curves / "csv" / "Validation_loss.csv", newline="") as file:
        _, *rows = csv.reader(file)
    assert [float(value) for _, value in rows] == [each["loss"] for each in measured]


def trained(recipe: dict[str, Any]) -> list[dict[str, Any]]:
    """What the launcher's module does, on three ranks; what was measured."""
    folder = RunFolder(written(recipe)["output"])
    run_ranks(3, lambda _: run(folder), timeout_s=90)
    measured: list[dict[str, Any]] = json.loads(folder.finished.read_text())["validation"]
    return measured


def written(recipe: dict[str, Any]) -> dict[str, Any]:
    """The recipe, with its files in its folder."""
    parsed, folder, plan = (
        Recipe.from_dict(recipe),
        RunFolder(recipe["output"]),
        Plan.from_dict(PLAN),
    )
    parsed.save(folder.recipe)
    plan.save(folder.plan)
    folder.config.write_text(json.dumps(config_of(parsed, plan, folder)))
    return recipe


def test_a_run_goes_on_and_may_become_longer(recipe: dict[str, Any], tmp_path: Path) -> None:
    """Ended after half the steps and begun again with more, it ends where it would have."""
    del recipe["epochs"]
    constant = recipe | {"lr_scheduler_type": "constant", "warmup_steps": 0}
    adapted = constant | {"adapters": {"r": 2, "target_modules": "all-linear"}, "steps": 8}
    ends = {}
    streamed = constant | {"steps": 8}
    streamed["data"] = {
        "train": recipe["data"]["train"],
        "validation": recipe["data"]["train"],
        "streaming": True,
        "shuffle_buffer": 7,
        "cache": recipe["data"]["cache"],
    }
    kinds = {"full": constant | {"steps": 8}, "lora": adapted, "stream": streamed}
    for name, given in kinds.items():
        whole = given | {"output": str(tmp_path / f"{name}-whole")}
        half = given | {"output": str(tmp_path / f"{name}-half")}
        expected = trained(whole)
        trained(half | {"steps": 4})
        assert trained(half) == expected[-1:]
        assert expected[-1]["loss"] < expected[0]["loss"]
        ends[name] = expected[-1]["loss"]
    assert (tmp_path / "lora-half" / "model" / "adapter_config.json").is_file()
    assert len(set(ends.values())) == 3


def test_a_longer_schedule_starts_at_once(recipe: dict[str, Any], tmp_path: Path) -> None:
    """The cosine of 4 steps ended at a rate of 0; that of 6 is not there yet."""
    del recipe["epochs"]
    trained(recipe | {"steps": 4})
    trained(recipe | {"steps": 6, "warmup_steps": 0})
    with open(tmp_path / "out" / "curves" / "csv" / "Train_Samples_lr.csv", newline="") as file:
        rates = [float(rate) for step, rate in csv.reader(file) if step != "step"]
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    schedule = hf.get_scheduler("cosine", optimizer, num_warmup_steps=0, num_training_steps=6)
    expected = []
    for _ in range(6):
        optimizer.step()
        schedule.step()
        expected += schedule.get_last_lr()
    assert rates[4:] == pytest.approx(expected[4:])


def run_apart(rank: int, root: Path) -> list[str]:
    """Rank 2 is on a node of its own that sees neither the output folder nor, then, the data."""
    os.environ["LOCAL_RANK"] = "0" if rank == 2 else str(rank)
    (root / "other").mkdir(exist_ok=True)
    told = []
    for folder in (root / "other" if rank == 2 else root / "out", root / "out"):
        with chdir(root / "other" if rank == 2 else root), pytest.raises(ZorseError) as caught:
            run(RunFolder(folder))
        told.append(str(caught.value))
    return told


def test_what_one_node_does_not_see_ends_all(recipe: dict[str, Any], tmp_path: Path) -> None:
    recipe["data"]["train"] = "train.jsonl"
    written(recipe)
    ranks = run_ranks(3, run_apart, tmp_path, timeout_s=90)
    mine = [r"other/recipe.json is not on .*; expected an output folder that all nodes share$"]
    mine.append(r"^train.jsonl does not exist; expected a data file$")
    for own, sentence in zip(ranks[2], mine, strict=True):
        assert re.search(sentence, own), own
    for others in ranks[:2]:
        assert [told.split(" failed on ranks [2]; rank 2 says ")[0] for told in others] == [
            "reading the recipe",
            "preparing the data",
        ]
