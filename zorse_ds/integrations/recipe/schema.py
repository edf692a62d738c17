"""A recipe: everything about a training run in one strict JSON file.

Where a thing has a name in DeepSpeed's JSON or in transformers' `TrainingArguments`, it keeps it.
"""

import json
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, ValidationError

from zorse_ds.core.strict import StrictModel, problems_of
from zorse_ds.errors import ConfigError
from zorse_ds.files import read_json, write_text

Schedule = Literal["constant", "linear", "cosine", "constant_with_warmup"]

_BATCH = (
    *("batch_size", "train_batch_size", "global_batch_size", "per_device_train_batch_size"),
    *("gradient_accumulation_steps", "train_micro_batch_size_per_gpu"),
)
_LENGTH = ("max_seq_length", "max_length", "max_seq_len", "block_size", "sequence_length")
_OTHER_NAMES = {
    **dict.fromkeys(_BATCH, "global_batch"),
    **dict.fromkeys(_LENGTH, "seq_len"),
    **dict.fromkeys(("max_steps", "num_steps", "train_steps", "iterations"), "steps"),
    **dict.fromkeys(("num_train_epochs", "num_epochs", "max_epochs"), "epochs"),
    **dict.fromkeys(("model_name_or_path", "model_name", "base_model"), "model"),
    **dict.fromkeys(("output_dir", "out", "run_dir", "save_dir"), "output"),
    **dict.fromkeys(("lr", "learning-rate"), "learning_rate"),
    **dict.fromkeys(("lr_scheduler", "scheduler", "schedule"), "lr_scheduler_type"),
    **dict.fromkeys(("warmup", "warmup_ratio", "num_warmup_steps"), "warmup_steps"),
    **dict.fromkeys(("max_grad_norm", "clip_grad", "grad_clip"), "gradient_clipping"),
    **dict.fromkeys(("bf16", "fp16", "torch_dtype", "precision", "mixed_precision"), "dtype"),
    **dict.fromkeys(("eval_strategy", "evaluation_strategy", "eval_every"), "eval_steps"),
    **dict.fromkeys(("save_strategy", "save_every", "checkpoint_steps"), "save_steps"),
    **dict.fromkeys(("lora", "peft", "peft_config", "lora_config", "adapter"), "adapters"),
    **dict.fromkeys(("report_to", "logging_dir", "logging_steps", "run_name"), "monitor"),
    **dict.fromkeys(("wandb", "tensorboard"), "monitor"),
    **dict.fromkeys(
        ("optim", "optimizer", "adam_beta1", "adam_beta2", "adam_epsilon"), "deepspeed"
    ),
    **dict.fromkeys(("train_file", "dataset", "dataset_name", "train"), "data.train"),
    **dict.fromkeys(("validation_file", "eval_dataset", "validation"), "data.validation"),
    "data_seed": "data.seed",
    "merge": "merge_adapters",
    "nodes": "hostfile",
}
"""What keys are called in `TrainingArguments`, in its scripts, and elsewhere."""


class DataRecipe(StrictModel):
    """What is trained on, and what is measured on."""

    train: str = Field(min_length=1)
    """A file, a glob, a saved data set or one of the hub, see `load_source`."""
    streaming: bool = False
    """Tokenise while training goes on, one rank for all: for data too large to prepare."""
    shuffle_buffer: int = Field(default=10_000, ge=2)
    """Rows that a shuffled stream draws from."""
    validation: str | None = Field(default=None, min_length=1)
    validation_share: float | None = Field(default=None, gt=0, lt=1)
    """Of the documents or conversations of `train`, instead of `validation`: never trained on."""
    max_validation_samples: int | None = Field(default=None, ge=1)
    """Samples that are measured on: the first ones; default: all."""
    text_column: str = Field(default="text", min_length=1)
    shuffle: bool = True
    seed: int = Field(default=1234, ge=0, le=2**64 - 1)
    group_by_length: bool = False
    """Lay the samples of each batch by length: less padding, the same update."""
    cache: str = Field(default="~/.cache/zorse_ds", min_length=1)
    """Folder of tokenised data."""
    num_proc: int | None = Field(default=None, ge=1)
    """Processes that tokenise."""


class MonitorRecipe(StrictModel):
    """Where the curves go."""

    wandb: str | None = Field(default=None, min_length=1)
    """The project's name."""
    tensorboard: bool = False
    csv: bool = True
    picture_every: int | None = Field(default=None, ge=1)
    """Steps between two pictures of the timeline."""


class Recipe(StrictModel):
    """A run. Raises `ConfigError` on malformed input."""

    other_names = _OTHER_NAMES

    model: str = Field(min_length=1)
    """Folder of a Hugging Face model with its tokenizer."""
    output: str = Field(min_length=1)
    """Folder of checkpoints, curves and the trained model; on several nodes a shared one."""
    data: DataRecipe
    plan: str | None = Field(default=None, min_length=1)
    """A plan's file; without it `zorse plan`'s search finds one for `cluster`."""
    cluster: str | None = Field(default=None, min_length=1)
    """A cluster's file, a hostfile, or an example's name."""
    profile: str | None = Field(default=None, min_length=1)
    hostfile: str | None = Field(default=None, min_length=1)
    """Of several nodes, for the launcher; default: `cluster`, if that is one."""
    adapters: str | dict[str, Any] | None = None
    """LoRA: a `peft` configuration, or the path of one; without it all parameters are trained."""
    merge_adapters: bool = False
    global_batch: int | None = Field(default=None, ge=1)
    """Samples of a step; default: the plan's."""
    seq_len: int = Field(ge=2)
    """Tokens of a sample, at most."""
    epochs: int | None = Field(default=None, ge=1)
    steps: int | None = Field(default=None, ge=1)
    learning_rate: float = Field(default=2e-5, gt=0)
    lr_scheduler_type: Schedule = "cosine"
    """As in transformers, whose schedules these are."""
    warmup_steps: int = Field(default=0, ge=0)
    weight_decay: float = Field(default=0.0, ge=0)
    gradient_clipping: float = Field(default=1.0, ge=0)
    """0: off."""
    dtype: Literal["float32", "bfloat16", "float16"] = "bfloat16"
    seed: int = Field(default=1234, ge=0, le=2**63 - 1)
    """Of new weights, as adapters are."""
    eval_steps: int | None = Field(default=None, ge=1)
    """Steps between two measurements on the validation data; default: at the ends alone."""
    save_steps: int | None = Field(default=None, ge=1)
    """Steps between two checkpoints; default: at the end alone, and at SIGTERM."""
    save_total_limit: int | None = Field(default=2, ge=1)
    monitor: MonitorRecipe = MonitorRecipe()
    deepspeed: dict[str, Any] = Field(default_factory=dict)
    """Keys of the DeepSpeed JSON that win over what the recipe would write."""

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> "Recipe":
        """Validate plain data. Raises `ConfigError` that tells all problems."""
        try:
            recipe = cls.model_validate(data)
        except ValidationError as error:
            raise ConfigError("\n".join(problems_of(error, cls))) from None
        problems = list(_contradictions(recipe))
        if problems:
            raise ConfigError("\n".join(problems))
        return recipe

    @classmethod
    def load(cls, path: str | Path) -> "Recipe":
        """Read a recipe. Raises `ConfigError`, each sentence with the path."""
        data = read_json(path, ConfigError)
        try:
            return cls.from_dict(data)
        except ConfigError as error:
            lines = str(error).splitlines()
            raise ConfigError("\n".join(f"{path}: {line}" for line in lines)) from None

    def to_dict(self) -> dict[str, Any]:
        """The recipe as plain data; what was left at its default is left out."""
        return self.model_dump(mode="json", exclude_defaults=True)

    def save(self, path: str | Path) -> None:
        """Write the recipe as JSON, atomically."""
        write_text(path, json.dumps(self.to_dict(), indent=2) + "\n")

    @property
    def validates(self) -> bool:
        """There is something to measure on."""
        return self.data.validation is not None or self.data.validation_share is not None


def _contradictions(recipe: Recipe) -> list[str]:
    """What is well-formed but says two things or too little."""
    problems = []
    if recipe.plan == "auto":
        problems.append(
            'plan is "auto"; expected the file of a plan, or no plan and a cluster to find one for'
        )
    if recipe.plan is None and recipe.cluster is None:
        problems.append("plan and cluster are missing; expected one of them, or both")
    elif recipe.plan is None and recipe.global_batch is None:
        problems.append("global_batch is missing; expected it, as no plan says it")
    if (recipe.epochs is None) == (recipe.steps is None):
        found = "missing" if recipe.epochs is None else "both given"
        problems.append(f"epochs and steps are {found}; expected one of them")
    if recipe.data.validation is not None and recipe.data.validation_share is not None:
        problems.append(
            "data.validation and data.validation_share are both given; expected one of them"
        )
    if recipe.data.streaming and recipe.epochs is not None:
        problems.append(
            "epochs is given with data.streaming; expected steps, for a stream has no end"
        )
    if recipe.data.streaming and recipe.data.validation_share is not None:
        problems.append(
            "data.validation_share is given with data.streaming; expected data.validation, for a "
            "stream cannot be cut"
        )
    if recipe.eval_steps is not None and not recipe.validates:
        problems.append(
            "eval_steps is given without data.validation or data.validation_share; expected one of "
            "them"
        )
    if recipe.merge_adapters and recipe.adapters is None:
        problems.append("merge_adapters is given without adapters; expected both or neither")
    if recipe.profile is not None and recipe.cluster is None:
        problems.append("profile is given without cluster; expected both or neither")
    return problems
