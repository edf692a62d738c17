"""The DeepSpeed JSON of a recipe."""

from typing import Any

from zorse_ds.core.plan import Plan
from zorse_ds.core.strict import listed
from zorse_ds.errors import ConfigError
from zorse_ds.integrations.recipe.run_folder import RunFolder
from zorse_ds.integrations.recipe.schema import Recipe

_OWN = ("zorse", "scheduler", "train_batch_size")
"""Keys of the DeepSpeed JSON that the recipe itself decides."""
_NEVER = 1_000_000_000
_PRECISIONS = {"bfloat16": "bf16", "float16": "fp16"}


def config_of(
    recipe: Recipe,
    plan: Plan,
    folder: RunFolder,
    cluster: dict[str, Any] | None = None,
    predicted_step_s: float | None = None,
) -> dict[str, Any]:
    """What `deepspeed --deepspeed_config` takes, all but the schedule, which transformers makes.

    `cluster` and `predicted_step_s` are what the curves are told of.
    Raises `ConfigError` for a key in the recipe's `deepspeed` that the recipe has itself.
    """
    clashing = [key for key in _OWN if key in recipe.deepspeed]
    if clashing:
        raise ConfigError(
            f"deepspeed holds {listed(clashing)}, which the recipe decides; expected "
            "lr_scheduler_type, plan and the other keys of a recipe"
        )
    config: dict[str, Any] = {
        "train_batch_size": plan.global_batch_size,
        "optimizer": {
            "type": "AdamW",
            "params": {
                "lr": recipe.learning_rate,
                "weight_decay": recipe.weight_decay,
                "torch_adam": True,
            },
        },
        "gradient_clipping": recipe.gradient_clipping,
        "steps_per_print": _NEVER,
        "zorse": {
            **_section(recipe, folder),
            "monitor": {
                "cluster": cluster,
                "predicted_step_s": predicted_step_s,
                "picture_every": recipe.monitor.picture_every,
                "folder": str(folder.curves),
            },
        },
    }
    if recipe.dtype in _PRECISIONS:
        config[_PRECISIONS[recipe.dtype]] = {"enabled": True}
    return {**config, **_monitors(recipe, folder), **recipe.deepspeed}


def _section(recipe: Recipe, folder: RunFolder) -> dict[str, Any]:
    section: dict[str, Any] = {
        "plan": str(folder.plan),
        "data": {
            "shuffle": recipe.data.shuffle,
            "seed": recipe.data.seed,
            "group_by_length": recipe.data.group_by_length,
        },
        "checkpoint": {"folder": str(folder.checkpoints)},
    }
    if recipe.save_total_limit is not None:
        section["checkpoint"]["keep_last"] = recipe.save_total_limit
    if recipe.adapters is not None:
        section["adapters"] = recipe.adapters
    return section


def _monitors(recipe: Recipe, folder: RunFolder) -> dict[str, Any]:
    monitor, monitors = recipe.monitor, {}
    if monitor.wandb is not None:
        monitors["wandb"] = {"enabled": True, "project": monitor.wandb}
    for key, name, wanted in (
        ("tensorboard", "tensorboard", monitor.tensorboard),
        ("csv_monitor", "csv", monitor.csv),
    ):
        if wanted:
            monitors[key] = {"enabled": True, "output_path": str(folder.curves), "job_name": name}
    return monitors
