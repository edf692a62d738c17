"""What each group computes in, and whether its devices can."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, get_args

import torch
from deepspeed.accelerator import get_accelerator

from zorse_ds.core.plan import Dtype, Plan
from zorse_ds.core.strict import listed
from zorse_ds.errors import ConfigError
from zorse_ds.runtime.dist_world import DistWorld

TORCH_DTYPES = {name: getattr(torch, name) for name in get_args(Dtype)}
WIRES = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}
"""By the name that DeepSpeed gives them; float32 is what gradients accumulate in."""


def default_dtype(config: dict[str, Any]) -> Dtype:
    """What the DeepSpeed config makes parameters: float32 unless bf16 or fp16 is enabled."""
    for keys, name in ((("bf16", "bfloat16"), "bfloat16"), (("fp16",), "float16")):
        sections = (config.get(key) for key in keys)
        if any(isinstance(section, dict) and section.get("enabled") for section in sections):
            return name  # type: ignore[return-value]
    return "float32"


def dtype_of_rank(plan: Plan, rank: int, config: dict[str, Any]) -> torch.dtype:
    """The group's own dtype, or else the config's."""
    return TORCH_DTYPES[plan.group_of_rank(rank).dtype or default_dtype(config)]


def gradient_wire(config: dict[str, Any], computed: torch.dtype) -> torch.dtype | None:
    """What gradients travel in between ranks of a group that computes in `computed`.

    `communication_data_type` as in DeepSpeed: by default a group of 16 bits sends 16 bits. None:
    what gradients accumulate in.
    """
    wanted = config.get("communication_data_type")
    if wanted is None:
        return computed if computed in (torch.float16, torch.bfloat16) else None
    return WIRES[wanted]


def boundary_dtypes(
    plan: Plan, config: dict[str, Any]
) -> dict[int, tuple[torch.dtype, torch.dtype]]:
    """Boundaries at which the dtype changes → (above, below). See `Plan.boundary_dtypes`."""
    pairs = plan.boundary_dtypes(default_dtype(config)).items()
    return {at: (TORCH_DTYPES[above], TORCH_DTYPES[below]) for at, (above, below) in pairs}


def check_devices(world: DistWorld, dtype: torch.dtype) -> None:
    """Collective: raise `ConfigError` on every rank if one's device lacks its dtype."""
    accelerator = get_accelerator()
    has = {
        "float32": True,
        "bfloat16": accelerator.is_bf16_supported(),
        "float16": accelerator.is_fp16_supported(),
    }
    name = torch.cuda.get_device_name() if torch.cuda.is_available() else accelerator.device_name()
    wanted = str(dtype).removeprefix("torch.")
    known = tuple(dtype for dtype, known in has.items() if known)
    by_rank: list[Any] = world.gather_objects(DeviceDtypes(name, wanted, known))
    problems = device_problems(by_rank)
    if problems:
        raise ConfigError("\n".join(problems))


@dataclass(frozen=True, slots=True)
class DeviceDtypes:
    """What one rank's device is to compute in, and what it can."""

    device: str
    wanted: str
    known: tuple[str, ...]


def device_problems(by_rank: Sequence[DeviceDtypes]) -> list[str]:
    """One sentence for each kind of device and dtype that do not go together."""
    lacking: dict[DeviceDtypes, list[int]] = {}
    for rank, own in enumerate(by_rank):
        if own.wanted not in own.known:
            lacking.setdefault(own, []).append(rank)
    return [
        f"{f'rank {ranks[0]}' if len(ranks) == 1 else f'ranks {ranks}'} ({own.device}) would "
        f"compute in {own.wanted}, which this device lacks; expected another dtype for the group, "
        f"{listed(own.known)}"
        for own, ranks in lacking.items()
    ]


def has_float16(plan: Plan, config: dict[str, Any]) -> bool:
    """Some group computes in float16, so losses must be scaled."""
    default = default_dtype(config)
    return any((group.dtype or default) == "float16" for group in plan.groups)
