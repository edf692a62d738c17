"""What `zorse train` decides and checks before it starts anything."""

import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from zorse_ds.cli.plan import find_plan
from zorse_ds.cli.settings import load_setting
from zorse_ds.core.plan import Plan
from zorse_ds.cost.setting import Setting
from zorse_ds.errors import ConfigError
from zorse_ds.integrations.deepspeed.auto_plan import STEP_WORKSPACE_BYTES
from zorse_ds.integrations.deepspeed.config import check_config
from zorse_ds.integrations.deepspeed.module import check_plan
from zorse_ds.integrations.huggingface.shape import model_shape
from zorse_ds.integrations.huggingface.stored_weights import stored_weights
from zorse_ds.integrations.recipe.config import config_of
from zorse_ds.integrations.recipe.launching import command_of, environment_of
from zorse_ds.integrations.recipe.run_folder import RunFolder
from zorse_ds.integrations.recipe.samples import load_samples, load_tokenizer
from zorse_ds.integrations.recipe.schema import Recipe
from zorse_ds.planner.answer import simulated


@dataclass(frozen=True)
class Job:
    """A run that is ready to start."""

    recipe: Recipe
    folder: RunFolder
    plan: Plan
    config: dict[str, Any]
    command: list[str]
    environment: dict[str, str]
    num_samples: int | None
    """None of a stream."""
    num_steps: int
    predicted_step_s: float | None
    """By the simulator, where the cluster is known."""

    @property
    def is_finished(self) -> bool:
        """All steps are made and the model is written."""
        done = self.folder.steps_saved() >= self.num_steps
        return done and self.folder.finished.is_file()

    def facts(self) -> dict[str, Any]:
        """Everything, as JSON-like data."""
        return {
            "recipe": self.recipe.to_dict(),
            "plan": self.plan.to_dict(),
            "config": self.config,
            "command": self.command,
            "num_samples": self.num_samples,
            "num_steps": self.num_steps,
            "steps_saved": self.folder.steps_saved(),
            "predicted_step_s": self.predicted_step_s,
        }


def job_of(recipe: Recipe) -> Job:
    """Find the plan, tokenise, and check all that can be checked. Raises a `ZorseError`."""
    folder = RunFolder(recipe.output)
    folder.check(recipe)
    tokenizer = load_tokenizer(recipe.model)
    # Only what the files say they hold; ranks would find a damaged one after the launch.
    stored_weights(Path(recipe.model))
    plan, setting = _plan_of(recipe)
    predicted_step_s = None if setting is None else simulated(plan, setting).step_s
    cluster = None if setting is None else setting.cluster.to_dict()
    config = config_of(recipe, plan, folder, cluster, predicted_step_s)
    # The plan's file is not written yet.
    check_config({**config, "zorse": {**config["zorse"], "plan": None}}, plan)
    command = command_of(recipe, plan, folder)
    samples = load_samples(recipe, tokenizer, plan.global_batch_size)
    return Job(
        recipe=recipe,
        folder=folder,
        plan=plan,
        config=config,
        command=command,
        environment=environment_of(plan, os.environ),
        num_samples=None if samples.train is None else len(samples.train),
        num_steps=samples.num_steps(recipe, plan.global_batch_size),
        predicted_step_s=predicted_step_s,
    )


def _plan_of(recipe: Recipe) -> tuple[Plan, Setting | None]:
    """The plan that is given, or the one found for the cluster; the setting if there is one."""
    given = None if recipe.plan is None else Plan.load(recipe.plan)
    setting = None if recipe.cluster is None else _setting_of(recipe, recipe.cluster)
    if given is None:
        assert setting is not None and recipe.global_batch is not None, "a recipe without a plan"
        return find_plan(setting, recipe.global_batch), setting
    batch = recipe.global_batch
    if batch is not None and batch != given.global_batch_size:
        raise ConfigError(
            f"global_batch is {batch}, but the plan's global_batch_size is "
            f"{given.global_batch_size}; expected {given.global_batch_size} or no global_batch"
        )
    shape = setting.model if setting else model_shape(recipe.model, recipe.adapters)
    check_plan(given, len(shape.shapes), given.world_size)
    return given, setting


def _setting_of(recipe: Recipe, cluster: str) -> Setting:
    setting = load_setting(
        cluster,
        recipe.seq_len,
        recipe.dtype,
        model=Path(recipe.model),
        profile=None if recipe.profile is None else Path(recipe.profile),
        adapters=recipe.adapters,
    )
    # The recipe's AdamW is torch's own, which needs room in its step.
    return replace(setting, step_workspace_bytes=STEP_WORKSPACE_BYTES)
