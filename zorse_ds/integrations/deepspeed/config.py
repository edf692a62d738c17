"""The DeepSpeed JSON: its `zorse` section, and what in the rest would contradict a plan."""

from pathlib import Path
from typing import Any, Literal

from pydantic import Field, ValidationError

from zorse_ds.core.plan import Plan
from zorse_ds.core.strict import StrictModel, problems_of
from zorse_ds.errors import ConfigError, PlanError
from zorse_ds.files import read_json


class DataSettings(StrictModel):
    """The one global order of samples."""

    shuffle: bool = True
    seed: int = Field(default=1234, ge=0)


class ZorseSettings(StrictModel):
    """The `zorse` section."""

    plan: str | dict[str, Any] | None = None
    """Path of a plan file (relative to the working directory), or the plan itself."""
    data: DataSettings = DataSettings()
    transport: Literal["auto", "direct", "staged"] = "auto"
    """`staged` sends messages between stages through host memory."""
    timeout_s: float = Field(default=600.0, gt=0)
    """How long a rank waits for another before it gives up."""


def load_config(config: str | Path | dict[str, Any]) -> dict[str, Any]:
    """The DeepSpeed JSON as a dictionary of its own. Raises `ConfigError`."""
    return dict(config) if isinstance(config, dict) else read_json(config, ConfigError)


def settings_of(config: dict[str, Any]) -> ZorseSettings:
    """The `zorse` section, strictly. Raises `ConfigError` that tells all problems."""
    section = config.get("zorse", {})
    try:
        return ZorseSettings.model_validate(section)
    except ValidationError as error:
        raise ConfigError(
            "\n".join(f"zorse.{p}" for p in problems_of(error, ZorseSettings))
        ) from None


def plan_from_config(config: str | Path | dict[str, Any]) -> Plan | None:
    """The plan that a DeepSpeed JSON names or holds, or None. Raises `ConfigError`, `PlanError`."""
    plan = settings_of(load_config(config)).plan
    if plan is None:
        return None
    if plan == "auto":
        raise ConfigError(
            "zorse.plan is 'auto', which this version cannot do; expected a plan file or a plan"
        )
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
    problems = [*_batch_problems(config, plan), *_precision_problems(config, plan)]
    problems += [*_unsupported(config), *_optimizer_problems(config)]
    named = plan_from_config(config)
    if named is not None and named != plan:
        problems.append(
            "zorse.plan differs from the plan the model was made with; expected the same, or no "
            "zorse.plan"
        )
    if problems:
        raise ConfigError("\n".join(problems))
    return settings


def _batch_problems(config: dict[str, Any], plan: Plan) -> list[str]:
    problems = []
    batch = config.get("train_batch_size", plan.global_batch_size)
    if batch not in (plan.global_batch_size, "auto"):
        problems.append(
            f"train_batch_size is {batch!r}, but the plan's global_batch_size is "
            f"{plan.global_batch_size}; expected {plan.global_batch_size}"
        )
    problems += [
        f"{key} is {config[key]!r}, but the plan lists every micro-batch; expected no such key"
        for key in ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
        if key in config and config[key] != "auto"
    ]
    return problems


def _precision_problems(config: dict[str, Any], plan: Plan) -> list[str]:
    enabled = [key for key in ("fp16", "bf16", "bfloat16") if _enabled(config, key)]
    if len(enabled) > 1:
        return [f"{enabled[0]} and {enabled[1]} are both enabled; expected one"]
    found = {"fp16": "float16", "bf16": "bfloat16", "bfloat16": "bfloat16"}
    dtype = found[enabled[0]] if enabled else "float32"
    return [
        f"groups[{i}].dtype of the plan is {group.dtype!r}, but the DeepSpeed config makes it "
        f"{dtype!r}; expected {dtype!r}"
        for i, group in enumerate(plan.groups)
        if group.dtype not in (None, dtype)
    ]


_UNSUPPORTED_SECTIONS = {
    "amp": "use bf16 or fp16",
    "torch_autocast": "use bf16 or fp16",
    "tensor_parallel": "the plan has no tensor parallelism",
    "hybrid_engine": "the engine trains pipelines",
    "compression_training": "the engine trains whole parameters",
    "data_efficiency": "the plan fixes each step's samples",
    "curriculum_learning": "the plan fixes each step's samples",
    "progressive_layer_drop": "every layer runs for every sample",
    "eigenvalue": "the engine trains whole parameters",
    "quantize_training": "the engine trains whole parameters",
    "flops_profiler": "use the step report's timeline",
    "autotuning": "a plan takes its place",
    "elasticity": "a plan takes its place",
    "zenflow": "use the plan's zero_level",
    "compile": "layers run as they are",
}


def _unsupported(config: dict[str, Any]) -> list[str]:
    problems = [
        f"{key} is enabled, which would have no effect here; expected it off ({instead})"
        for key, instead in _UNSUPPORTED_SECTIONS.items()
        if _enabled(config, key)
    ]
    zero = config.get("zero_optimization")
    level = zero.get("stage", 0) if isinstance(zero, dict) else 0
    if level:
        problems.append(
            f"zero_optimization.stage is {level!r}, but the plan says zero_level group by group; "
            "expected 0 or no such section"
        )
    if config.get("sparse_gradients"):
        problems.append("sparse_gradients is true; expected false, gradients are flat vectors here")
    pipeline = config.get("pipeline")
    interval = (
        pipeline.get("activation_checkpoint_interval", 0) if isinstance(pipeline, dict) else 0
    )
    if interval:
        problems.append(
            f"pipeline.activation_checkpoint_interval is {interval!r}, but the plan says recompute "
            "group by group; expected 0 or no such key"
        )
    return problems


_NOT_ELEMENTWISE = ("lamb", "onebitlamb", "onebitadam", "zerooneadam", "muon", "lbfgs")


def _optimizer_problems(config: dict[str, Any]) -> list[str]:
    optimizer = config.get("optimizer")
    name = str(optimizer.get("type", "")) if isinstance(optimizer, dict) else ""
    if name.lower() not in _NOT_ELEMENTWISE:
        return []
    return [
        f"optimizer.type is {name!r}, which looks at whole parameters; expected an element-wise one "
        "such as 'AdamW', for shards cut parameters anywhere"
    ]


def _enabled(config: dict[str, Any], key: str) -> bool:
    section = config.get(key)
    if isinstance(section, dict):
        return bool(section.get("enabled", key in ("tensor_parallel", "zenflow") and section))
    return bool(section)
