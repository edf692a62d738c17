"""What DeepSpeed's own keys may hold: names, forms and values that it would accept and misread.

Each rule gives one sentence per problem: where, what was found, what was expected.
"""

import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from deepspeed.runtime import lr_schedules
from deepspeed.runtime.config import DEEPSPEED_OPTIMIZERS
from deepspeed.runtime.precision_config import DeepSpeedBF16Config, DeepSpeedFP16Config

from zorse_ds.core.strict import listed, nearest, suggestion

Config = dict[str, Any]

_KNOWN = """
activation_checkpointing aio amp autotuning bf16 bfloat16 checkpoint comet comms_logger
communication_data_type compile compression_training csv_monitor curriculum_learning
data_efficiency data_parallel_size data_types dataloader_drop_last datastates_ckpt
disable_allgather disable_python_gc dump_state eigenvalue elasticity expert_parallel
flops_profiler fp16 gradient_accumulation_steps gradient_allreduce_op gradient_clipping
gradient_predivide_factor graph_harvesting hybrid_engine log_level
managed_gradient_accumulation memory_breakdown optimizer pipeline prescale_gradients
progressive_layer_drop quantize_training scheduler seq_parallel_communication_data_type
sequence_parallel_size sparse_attention sparse_gradients steps_per_print tensor_parallel
tensorboard timers torch_autocast train_batch_size train_micro_batch_size_per_gpu
use_data_before_expert_parallelism vocabulary_size wall_clock_breakdown wandb
weight_quantization zenflow zero_allow_untested_optimizer zero_force_ds_cpu_optimizer
zero_optimization zorse
"""
KNOWN_KEYS = tuple(_KNOWN.split())
"""Top-level keys of DeepSpeed 0.19 and this product; others are the user's own."""

_SECTIONS = (
    *("activation_checkpointing", "aio", "bf16", "bfloat16", "checkpoint", "comet", "csv_monitor"),
    *("data_types", "fp16", "optimizer", "pipeline", "scheduler", "tensorboard", "timers", "wandb"),
)
_PRECISIONS: dict[str, Any] = {
    "bf16": DeepSpeedBF16Config,
    "bfloat16": DeepSpeedBF16Config,
    "fp16": DeepSpeedFP16Config,
}


def value_problems(config: Config) -> list[str]:
    """All keys, forms and values that DeepSpeed would misread or fail at later."""
    rules = (_misspelt, _forms, _precisions, _numbers, _optimizer, _scheduler)
    return [problem for rule in rules for problem in rule(config)]


def _misspelt(config: Config) -> Iterator[str]:
    for key in config:
        if not isinstance(key, str):
            yield f"{key!r} is a key of the config; expected a text"
        elif key not in KNOWN_KEYS and (near := _meant(key)):
            yield f"{key!r} is not a known key; did you mean {near!r}?"


def _meant(key: str) -> str | None:
    """The known key of which `key` is a misspelling: a few letters off, or its beginning."""
    near = nearest(key.lower(), KNOWN_KEYS)
    if near is None:
        return None
    begins = near.startswith(key.lower()) and 3 * len(key) >= 2 * len(near)
    return near if begins or _edits(key.lower(), near) <= min(2, len(key) // 4) else None


def _edits(one: str, other: str) -> int:
    """Letters to add, drop, replace, or swap with their neighbour."""
    before: list[int] = []
    row = list(range(len(other) + 1))
    for i, letter in enumerate(one, 1):
        last, before, row = before, row, [i]
        for j, wanted in enumerate(other, 1):
            best = min(before[j] + 1, row[-1] + 1, before[j - 1] + (letter != wanted))
            if i > 1 and j > 1 and letter == other[j - 2] and one[i - 2] == wanted:
                best = min(best, last[j - 2] + 1)
            row.append(best)
    return row[-1]


def _forms(config: Config) -> Iterator[str]:
    for key in _SECTIONS:
        if key in config and not isinstance(config[key], dict | str):
            example = ' such as {"enabled": true}' if key in _PRECISIONS else " {...}"
            yield f"{key} is {config[key]!r}; expected an object{example}"
        elif isinstance(config.get(key), str) and config[key] != "auto":
            yield f"{key} is {config[key]!r}; expected an object {{...}}"


def _precisions(config: Config) -> Iterator[str]:
    for key, model in _PRECISIONS.items():
        section = config.get(key)
        if not isinstance(section, dict):
            continue
        known = [*model.model_fields]
        for name, value in section.items():
            if name not in known:
                near = suggestion(name, known)
                yield f"{key}.{name} is not a known key; expected one of {listed(known)}{near}"
            elif name == "enabled" and not isinstance(value, bool) and value != "auto":
                yield f"{key}.enabled is {value!r}; expected true or false"


def _numbers(config: Config) -> Iterator[str]:
    clipping = config.get("gradient_clipping", 0)
    is_number = isinstance(clipping, int | float) and not isinstance(clipping, bool)
    if clipping != "auto" and not (is_number and math.isfinite(clipping) and clipping >= 0):
        yield f"gradient_clipping is {clipping!r}; expected 0 (off) or a finite norm above 0"
    every = config.get("steps_per_print", 1)
    if every not in ("auto", None) and (type(every) is not int or every < 1):
        yield f"steps_per_print is {every!r}; expected a whole number above 0"


def _optimizer(config: Config) -> Iterator[str]:
    optimizer = config.get("optimizer")
    if isinstance(optimizer, dict):
        names = _classes(vars(torch.optim), torch.optim.Optimizer)
        known = [*names, *(name for name in DEEPSPEED_OPTIMIZERS if name not in names)]

        def finds(name: str) -> bool:
            return name in names or name.lower() in DEEPSPEED_OPTIMIZERS

        yield from _typed("optimizer", optimizer, known, finds)


def _scheduler(config: Config) -> Iterator[str]:
    scheduler = config.get("scheduler")
    if isinstance(scheduler, dict):
        base = torch.optim.lr_scheduler.LRScheduler
        names = _classes(vars(torch.optim.lr_scheduler), base)
        known = [*lr_schedules.VALID_LR_SCHEDULES, *names]
        yield from _typed("scheduler", scheduler, known, known.__contains__)
        if "type" in scheduler and "params" not in scheduler:
            yield "scheduler.params is missing; expected an object {...}, if only an empty one"


def _classes(names: Any, base: type) -> list[str]:
    return [
        name
        for name, value in names.items()
        if isinstance(value, type)
        and issubclass(value, base)
        and value is not base
        and not name.startswith("_")
    ]


def _typed(
    where: str, section: Config, known: Iterable[str], finds: Callable[[str], bool]
) -> Iterator[str]:
    """Problems of an optimizer's or scheduler's `type` and `params`."""
    if "type" not in section:
        near = _key_near(section, "type")
        yield f"{where}.type is missing; expected the name of a class{near}"
    elif not isinstance(section["type"], str):
        yield f"{where}.type is {section['type']!r}; expected a text"
    elif section["type"] != "auto" and not finds(section["type"]):
        lower = {name.lower(): name for name in reversed(list(known))}
        found = nearest(section["type"].lower(), lower)
        meant = f"; did you mean {lower[found]!r}?" if found else ""
        yield (
            f"{where}.type is {section['type']!r}, which neither DeepSpeed nor torch.optim knows; "
            f"expected one that they know{meant}"
        )
    params = section.get("params", {})
    if not isinstance(params, dict) and params != "auto":
        yield f"{where}.params is {params!r}; expected an object {{...}}"


def _key_near(section: Config, wanted: str) -> str:
    keys = [key for key in section if key not in ("type", "params") and nearest(key, [wanted])]
    return f", but there is {keys[0]!r}" if keys else ""
