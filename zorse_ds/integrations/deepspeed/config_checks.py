"""What in a DeepSpeed JSON contradicts a plan, or would have no effect on this engine.

Each rule gives one sentence per problem: where, what was found, what was expected.
"""

from collections.abc import Iterator
from typing import Any

from zorse_ds.core.plan import Plan
from zorse_ds.core.strict import listed
from zorse_ds.integrations.deepspeed.config_values import value_problems

Config = dict[str, Any]

_SET_BY_PLAN = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")


def config_problems(config: Config, plan: Plan) -> list[str]:
    """All contradictions between a DeepSpeed JSON, a plan and what the engine can do."""
    of_both = (_batch, _precision, _offloaded, _pipeline)
    of_config = (_placeholders, _zero, _sections, _values, _optimizer, _scheduler)
    found = [problem for rule in of_both for problem in rule(config, plan)]
    found += value_problems(config)
    return found + [problem for rule in of_config for problem in rule(config)]


def optimizer_problem(name: str) -> str | None:
    """Why an optimizer cannot work on shards, or None."""
    if name.lower() not in _NOT_ELEMENTWISE:
        return None
    return (
        f"is {name!r}, which looks at whole parameters or at the loss; expected an element-wise "
        "optimizer such as 'AdamW', for shards cut parameters anywhere"
    )


def _batch(config: Config, plan: Plan) -> Iterator[str]:
    batch = config.get("train_batch_size", plan.global_batch_size)
    if batch not in (plan.global_batch_size, "auto"):
        yield (
            f"train_batch_size is {batch!r}, but the plan's global_batch_size is "
            f"{plan.global_batch_size}; expected {plan.global_batch_size}"
        )
    for key in _SET_BY_PLAN[1:]:
        if key in config and config[key] != "auto":
            yield (
                f"{key} is {config[key]!r}, but the plan lists every micro-batch; expected no such "
                "key"
            )


def _precision(config: Config, plan: Plan) -> Iterator[str]:
    enabled = [key for key in ("fp16", "bf16", "bfloat16") if _enabled(config, key)]
    if len(enabled) > 1:
        yield f"{enabled[0]} and {enabled[1]} are both enabled; expected one"


def _offloaded(config: Config, plan: Plan) -> Iterator[str]:
    optimizer = config.get("optimizer")
    if not isinstance(optimizer, dict) or all(group.offload == "none" for group in plan.groups):
        return
    parameters = optimizer.get("params") or {}
    is_adam = str(optimizer.get("type", "")).lower() in ("adam", "adamw")
    if is_adam and isinstance(parameters, dict) and not parameters.get("torch_adam"):
        yield (
            "optimizer.params.torch_adam is not set, but a group's offload keeps masters in host "
            "memory; expected true, for DeepSpeed's fused Adam works on the device alone"
        )


def _pipeline(config: Config, plan: Plan) -> Iterator[str]:
    pipeline = config.get("pipeline")
    if not isinstance(pipeline, dict):
        return
    interval = pipeline.get("activation_checkpoint_interval", 0)
    if interval:
        yield (
            f"pipeline.activation_checkpoint_interval is {interval!r}, but the plan says recompute "
            "group by group; expected 0 or no such key"
        )
    num_stages = len(plan.stages)
    if pipeline.get("stages", "auto") not in ("auto", num_stages):
        yield (
            f"pipeline.stages is {pipeline['stages']!r}, but the plan has {num_stages}; expected "
            f"{num_stages} or no such key"
        )
    if pipeline.get("partition", "best") != "best":
        yield (
            f"pipeline.partition is {pipeline['partition']!r}, but the plan cuts the layers; "
            "expected no such key"
        )
    if pipeline.get("seed_layers"):
        yield (
            "pipeline.seed_layers is true, but each layer is seeded by base_seed and its index "
            "anyway; expected no such key"
        )


def _placeholders(config: Config) -> Iterator[str]:
    """Only transformers' Trainer fills them in."""
    for path, value in _leaves({k: v for k, v in config.items() if k not in _SET_BY_PLAN}):
        if value == "auto" and path != "pipeline.stages" and not path.startswith("zorse."):
            yield f"{path} is 'auto', which nobody fills in here; expected a value"


def _zero(config: Config) -> Iterator[str]:
    zero = config.get("zero_optimization")
    level = zero.get("stage", 0) if isinstance(zero, dict) else int(bool(zero))
    if level and level != "auto":
        yield (
            f"zero_optimization.stage is {level!r}, but the plan says zero_level group by group; "
            "expected 0 or no such section"
        )
    for key in ("offload_optimizer", "offload_param"):
        section = zero.get(key) if isinstance(zero, dict) else None
        device = section.get("device", "none") if isinstance(section, dict) else "none"
        if device != "none":
            yield (
                f"zero_optimization.{key}.device is {device!r}, but the plan says offload group by "
                "group; expected no such section"
            )


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
    "weight_quantization": "the engine trains whole parameters",
    "flops_profiler": "use the step report's timeline",
    "comms_logger": "use the step report's timeline",
    "autotuning": "a plan takes its place",
    "elasticity": "a plan takes its place",
    "zenflow": "use the plan's zero_level",
    "compile": "layers run as they are",
}
_ON_WHEN_PRESENT = ("tensor_parallel", "zenflow")


def _sections(config: Config) -> Iterator[str]:
    for key, instead in _UNSUPPORTED_SECTIONS.items():
        if _enabled(config, key):
            yield f"{key} is enabled, which would have no effect here; expected it off ({instead})"


_ONLY_VALUES: dict[str, tuple[Any, ...]] = {
    "sparse_gradients": (False,),
    "prescale_gradients": (False,),
    "gradient_predivide_factor": (1, None),
    "gradient_allreduce_op": ("mean", None),
    "managed_gradient_accumulation": (True,),
    "communication_data_type": ("fp32", "bf16", "fp16", None),
    "graph_harvesting": (False,),
    "compile.deepcompile": (False,),
    "sequence_parallel_size": (1, None),
    "data_parallel_size": (1, None),
    "data_types.grad_accum_dtype": ("fp32", None),
    "fp16.auto_cast": (False,),
    "fp16.fp16_master_weights_and_grads": (False,),
    "bf16.bf16_master_weights_and_grads": (False,),
    "bf16.bf16_optimizer_states": (False,),
}
"""Gradients accumulate and are summed in float32, masters are float32; nothing else is done."""


def _values(config: Config) -> Iterator[str]:
    for path, value in _leaves(config):
        allowed = _ONLY_VALUES.get(path)
        if allowed is not None and value not in allowed:
            yield (
                f"{path} is {value!r}, which would have no effect here; expected {allowed[0]!r} or "
                "no such key"
            )


_NOT_ELEMENTWISE = (
    "adafactor",
    "lamb",
    "fusedlamb",
    "lars",
    "lbfgs",
    "muadam",
    "muadamw",
    "muon",
    "musgd",
    "onebitadam",
    "onebitlamb",
    "sparseadam",
    "zerooneadam",
)


def _optimizer(config: Config) -> Iterator[str]:
    optimizer = config.get("optimizer")
    if not isinstance(optimizer, dict):
        return
    problem = optimizer_problem(str(optimizer.get("type", "")))
    if problem is not None:
        yield f"optimizer.type {problem}"
    parameters = optimizer.get("params")
    if isinstance(parameters, dict) and "max_grad_norm" in parameters:
        yield (
            "optimizer.params.max_grad_norm would have no effect; expected gradient_clipping "
            "beside the optimizer"
        )


_WANTS_A_METRIC = ("ReduceLROnPlateau",)


def _scheduler(config: Config) -> Iterator[str]:
    scheduler = config.get("scheduler")
    name = scheduler.get("type") if isinstance(scheduler, dict) else None
    if name in _WANTS_A_METRIC:
        yield (
            f"scheduler.type is {name!r}, which needs a metric at every step; expected one that "
            f"counts steps, such as {listed(['WarmupLR', 'CosineAnnealingLR'])}"
        )


def _leaves(section: Config, path: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in section.items():
        here = f"{path}{key}"
        if isinstance(value, dict):
            yield from _leaves(value, f"{here}.")
        else:
            yield here, value


def _enabled(config: Config, key: str) -> bool:
    """A section is on by its `enabled`, by one inside it, or for some by being there."""
    section = config.get(key)
    if not isinstance(section, dict):
        return bool(section)
    if key in _ON_WHEN_PRESENT and "enabled" not in section:
        return bool(section)
    if section.get("enabled") is False:
        return False
    return any(value and path.split(".")[-1] == "enabled" for path, value in _leaves(section))
