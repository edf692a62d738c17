"""The DeepSpeed JSON: its `zorse` section, and what in the rest would contradict a plan."""

import os
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, ValidationError

from zorse_ds.core.handover import PLAN_VARIABLE
from zorse_ds.core.plan import Plan
from zorse_ds.core.strict import StrictModel, problems_of
from zorse_ds.errors import ConfigError, PlanError
from zorse_ds.files import read_json
from zorse_ds.integrations.deepspeed.config_checks import config_problems


class DataSettings(StrictModel):
    """The one global order of samples."""

    shuffle: bool = True
    seed: int = Field(default=1234, ge=0, le=2**64 - 1)
    group_by_length: bool = False
    """Lay the samples of each global batch by length, so that micro-batches pad less."""


class CheckpointSettings(StrictModel):
    """How `save_checkpoint` works."""

    in_background: bool = Field(default=False, alias="async")
    """Training waits for a copy in memory only; files are written while it goes on."""
    folder: str | None = Field(default=None, min_length=1)
    """Where SIGTERM saves; default: where the script saved or loaded last."""
    keep_last: int | None = Field(default=None, ge=1)
    """Checkpoints of a folder that stay; older ones are removed."""


class MonitorSettings(StrictModel):
    """What DeepSpeed's monitors are told besides loss and learning rate."""

    cluster: dict[str, Any] | None = None
    """A cluster's description: names the GPU types, and is kept beside the curves."""
    predicted_step_s: float | None = Field(default=None, gt=0)
    """By `zorse simulate`, to be compared with what is measured."""
    picture_every: int | None = Field(default=None, ge=1)
    """Steps between two pictures of the timeline."""
    folder: str | None = Field(default=None, min_length=1)
    """Where pictures and W&B's files go; a run that goes on there goes on in W&B too."""


class AdaptSettings(StrictModel):
    """When micro-batches move between ranks of a group, and how many at once."""

    window: int = Field(default=5, ge=1, le=10_000)
    """Steps whose median decides; they are measured anew after each change."""
    least_gain: float = Field(default=0.03, gt=0, lt=1)
    """Share of the step (0–1) that a change must be predicted to save."""
    most_moved: float = Field(default=0.25, gt=0, le=1)
    """Share of a group's samples (0–1) that one change may move."""


def _switched(value: object) -> object:
    """true: with all defaults; false: not at all."""
    if isinstance(value, bool):
        return {} if value else None
    if not isinstance(value, dict | AdaptSettings | None):
        raise ValueError("true, false or an object {...}")
    return value


class ZorseSettings(StrictModel):
    """The `zorse` section."""

    plan: str | dict[str, Any] | None = None
    """Path of a plan file (relative to the working directory), the plan itself, or "auto"."""
    cluster: str | dict[str, Any] | None = None
    """With plan "auto": a cluster's file, a hostfile, or the description itself."""
    profile: str | None = Field(default=None, min_length=1)
    """With plan "auto": measured times, as `zorse profile` writes them; else they are estimated."""
    seq_len: int | None = Field(default=None, ge=1)
    """With plan "auto": tokens of a sample."""
    adapters: str | dict[str, Any] | None = None
    """LoRA for `from_pretrained`: a `peft` configuration, or the path of one."""
    data: DataSettings = DataSettings()
    checkpoint: CheckpointSettings = CheckpointSettings()
    adapt_shares: Annotated[AdaptSettings | None, BeforeValidator(_switched)] = None
    """Micro-batches move to where they end sooner, as measured; `true` or how."""
    monitor: MonitorSettings = MonitorSettings()
    optimizer_step: Literal["auto", "interleaved", "delayed"] = "auto"
    """`interleaved`: each stage steps as soon as its backward ends; `delayed`: all at the end."""
    transport: Literal["auto", "direct", "staged"] = "auto"
    """`staged` sends messages between stages through host memory."""
    count_memory: bool = False
    """Each step's report says what its peak of memory consists of; costs time."""
    timeout_s: float = Field(default=600.0, ge=0.001, le=1e7)
    """How long a rank waits for another before it gives up."""


def load_config(config: str | Path | dict[str, Any]) -> dict[str, Any]:
    """The DeepSpeed JSON as a dictionary of its own. Raises `ConfigError`."""
    if isinstance(config, dict):
        return dict(config)
    if not isinstance(config, str | Path) or not str(config):
        raise ConfigError(
            f"the config is {config!r}; expected the path of a DeepSpeed JSON, or its content as a "
            "dict"
        )
    return read_json(config, ConfigError)


def settings_of(config: dict[str, Any]) -> ZorseSettings:
    """The `zorse` section, strictly. Raises `ConfigError` that tells all problems."""
    section = config.get("zorse", {})
    if not isinstance(section, dict):
        raise ConfigError(
            f'zorse is {section!r}; expected an object such as {{"plan": "plan.json"}}'
        )
    try:
        return ZorseSettings.model_validate(section)
    except ValidationError as error:
        raise ConfigError(
            "\n".join(f"zorse.{p}" for p in problems_of(error, ZorseSettings))
        ) from None


def settled_plan(plan: Plan | None, config: str | Path | dict[str, Any] | None) -> Plan | None:
    """The plan of the environment, else the one given, else the config's, else None.

    Raises `ConfigError`, `PlanError`.
    """
    told = _plan_from_environment()
    if told is None:
        return plan if plan is not None or config is None else plan_from_config(config)
    if plan is not None and plan.global_batch_size != told.global_batch_size:
        raise PlanError(
            f"{os.environ[PLAN_VARIABLE]}: global_batch_size is {told.global_batch_size}, but the "
            f"script's plan has {plan.global_batch_size}; expected the same"
        )
    return told


def _plan_from_environment() -> Plan | None:
    path = os.environ.get(PLAN_VARIABLE)
    return Plan.load(path) if path else None


def plan_from_config(config: str | Path | dict[str, Any]) -> Plan | None:
    """The plan that a DeepSpeed JSON names or holds, or None (also where it is to be found).

    Raises `ConfigError`, `PlanError`.
    """
    plan = settings_of(load_config(config)).plan
    if plan is None or plan == "auto":
        return None
    if isinstance(plan, str) and (not plan.strip() or "\0" in plan):
        raise ConfigError(f"zorse.plan is {plan!r}; expected the path of a plan file, or a plan")
    if isinstance(plan, dict):
        try:
            return Plan.from_dict(plan)
        except PlanError as error:
            raise PlanError(f"zorse.plan.{problem}" for problem in error.problems) from None
    return Plan.load(plan)


def check_config(config: dict[str, Any], plan: Plan) -> ZorseSettings:
    """Refuse what contradicts the plan or what this engine would silently ignore.

    Raises `ConfigError` with one sentence per problem.
    """
    settings = settings_of(config)
    problems = config_problems(config, plan)
    named = _plan_from_environment() or plan_from_config(config)
    if named is not None and named != plan:
        problems.append(
            "zorse.plan differs from the plan the model was made with; expected the same, or no "
            "zorse.plan"
        )
    if problems:
        raise ConfigError("\n".join(problems))
    return settings
