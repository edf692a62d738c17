"""Recipes: every mistake is one sentence, told before anything starts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from zorse_ds.cli import app
from zorse_ds.cli.train import read_recipe
from zorse_ds.errors import ConfigError
from zorse_ds.integrations.recipe.run_folder import RunFolder
from zorse_ds.integrations.recipe.schema import DataRecipe, Recipe

GOOD: dict[str, Any] = {
    "model": "model",
    "output": "out",
    "data": {"train": "train.jsonl"},
    "plan": "plan.json",
    "seq_len": 64,
    "steps": 10,
}


def test_a_recipe_survives_its_file(tmp_path: Path) -> None:
    recipe = Recipe.from_dict({**GOOD, "adapters": {"r": 4}, "monitor": {"wandb": "mine"}})
    recipe.save(tmp_path / "recipe.json")
    assert json.loads((tmp_path / "recipe.json").read_text())["adapters"] == {"r": 4}
    assert Recipe.load(tmp_path / "recipe.json") == recipe


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"learning_rat": 1e-4}, "learning_rat is not a known key; .*did you mean 'learning_rate'"),
        ({"data": {"train": "a", "valdation": "b"}}, "data.valdation .*did you mean 'validation'"),
        ({"max_steps": 5}, r"^max_steps is not a known key; did you mean 'steps'\? \(known are "),
        ({"num_train_epochs": 3}, r"known key; did you mean 'epochs'\?"),
        ({"per_device_train_batch_size": 8}, r"known key; did you mean 'global_batch'\?"),
        ({"lr": 1e-4}, r"known key; did you mean 'learning_rate'\?"),
        ({"train_file": "a"}, r"known key; did you mean 'data.train'\?"),
        ({"dtype": "bf16"}, "dtype is 'bf16'; expected .*'bfloat16'"),
        ({"adapters": 3}, r"^adapters is 3; expected a text or an object \{\.\.\.\}$"),
        ({"seq_len": 1}, "seq_len is 1; expected at least 2"),
        ({"seq_len": "64"}, "seq_len is '64'; expected a whole number"),
        ({"epochs": 1}, "epochs and steps are both given; expected one of them"),
        ({"steps": None}, "epochs and steps are missing; expected one of them"),
        ({"plan": "auto"}, 'plan is "auto"; expected the file of a plan, or no plan and a'),
        ({"plan": None}, "plan and cluster are missing"),
        ({"plan": None, "cluster": "desk"}, "global_batch is missing"),
        ({"profile": "p.json"}, "profile is given without cluster"),
        ({"eval_steps": 5}, "eval_steps is given without data.validation"),
        (
            {"data": {"train": "a", "streaming": True}, "steps": None, "epochs": 1},
            "epochs is given with data.streaming; expected steps",
        ),
        (
            {"data": {"train": "a", "streaming": True, "validation_share": 0.1}},
            "data.validation_share is given with data.streaming",
        ),
        ({"merge_adapters": True}, "merge_adapters is given without adapters"),
        (
            {"data": {"train": "a", "validation": "b", "validation_share": 0.1}},
            "data.validation and data.validation_share are both given",
        ),
    ],
)
def test_a_mistake_is_one_sentence(changes: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence) as caught:
        Recipe.from_dict({**GOOD, **changes})
    assert "\n" not in str(caught.value)


def test_flags_win_over_the_file_and_take_the_place_of_what_contradicts(tmp_path: Path) -> None:
    path = tmp_path / "recipe.json"
    path.write_text(json.dumps(GOOD))
    recipe = read_recipe(path, {"epochs": 2, "data.train": "other.jsonl", "monitor.wandb": "mine"})
    assert (recipe.epochs, recipe.steps) == (2, None)
    assert (recipe.data.train, recipe.monitor.wandb) == ("other.jsonl", "mine")


def test_the_program_names_the_file_and_starts_nothing(tmp_path: Path) -> None:
    path = tmp_path / "recipe.json"
    path.write_text(json.dumps({**GOOD, "output": str(tmp_path / "out"), "warmup": 3}))
    result = CliRunner().invoke(app, ["train", str(path)])
    assert isinstance(result.exception, ConfigError)
    assert str(result.exception).startswith(f"{path}: warmup is not a known key")
    result = CliRunner().invoke(app, ["train", str(path), "--set", "warmup"])
    assert str(result.exception).startswith("--set is 'warmup'; expected KEY=VALUE")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(("latest", "steps"), [("global_step12", 12), (None, 0), ("mine", 0)])
def test_the_latest_checkpoint_says_how_far_a_run_is(
    latest: str | None, steps: int, tmp_path: Path
) -> None:
    folder = RunFolder(tmp_path)
    if latest is not None:
        folder.checkpoints.mkdir()
        (folder.checkpoints / "latest").write_text(latest)
    assert folder.steps_saved() == steps


def test_other_names_lead_to_keys() -> None:
    keys = {*Recipe.model_fields, *(f"data.{name}" for name in DataRecipe.model_fields)}
    assert set(Recipe.other_names.values()) <= keys
    assert not set(Recipe.other_names) & set(Recipe.model_fields)


def with_steps(root: Path, recipe: dict[str, Any]) -> RunFolder:
    folder = RunFolder(root)
    Recipe.from_dict(recipe).save(folder.recipe)
    folder.checkpoints.mkdir()
    (folder.checkpoints / "latest").write_text("global_step3")
    return folder


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"model": "other"}, "^model is 'other', but 'model' in the run that .* holds 3 steps of"),
        ({"seq_len": 65}, "^seq_len is 65, but 64 in"),
        ({"adapters": {"r": 4}}, r"^adapters is \{'r': 4\}, but None in"),
        ({"data": {"train": "b"}}, "^data.train is 'b', but 'train.jsonl' in"),
        (
            {"data": {"train": "train.jsonl", "validation_share": 0.1}},
            "^data.validation_share is 0.1, but None in",
        ),
    ],
)
def test_a_folder_is_of_one_run(changes: dict[str, Any], sentence: str, tmp_path: Path) -> None:
    folder = with_steps(tmp_path, GOOD)
    with pytest.raises(ConfigError, match=f"{sentence}.*; expected the same, or another output"):
        folder.check(Recipe.from_dict({**GOOD, **changes}))


def test_a_run_goes_on_with_other_steps_plan_and_rates(tmp_path: Path) -> None:
    folder = with_steps(tmp_path, GOOD)
    changes = {"steps": 20, "plan": "other.json", "learning_rate": 1e-3, "model": "./model"}
    folder.check(Recipe.from_dict({**GOOD, **changes}))


def test_an_output_that_is_no_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    recipe = Recipe.from_dict(GOOD)
    with pytest.raises(ConfigError, match="file, which is a file; expected a folder"):
        RunFolder(tmp_path / "file").check(recipe)
    with pytest.raises(ConfigError, match=r"below, which lies below the file .*file; expected"):
        RunFolder(tmp_path / "file" / "below").check(recipe)


def test_nothing_at_all_is_told_what_to_give() -> None:
    result = CliRunner().invoke(app, ["train"])
    assert str(result.exception).startswith("zorse train was given nothing; expected a recipe's")
