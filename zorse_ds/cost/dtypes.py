"""What a group computes in, and how wide its numbers are."""

from collections.abc import Mapping
from types import MappingProxyType

from zorse_ds.core.gpus import GpuType
from zorse_ds.core.plan import Dtype, GpuGroup
from zorse_ds.cost.setting import Setting

DTYPE_BYTES: Mapping[Dtype, int] = MappingProxyType({"float32": 4, "bfloat16": 2, "float16": 2})
MASTER_BYTES = 4
"""Gradients accumulate, and optimizers work, in float32."""


def usable_dtype(wanted: Dtype, kind: GpuType) -> Dtype:
    """`wanted`, or what replaces it on a type that lacks it.

    bfloat16 becomes float16 on types with 16-bit matrix units, else float32 (P40).
    """
    if wanted != "bfloat16" or kind.has_bf16:
        return wanted
    return "float16" if kind.tensor_flops > (kind.fp32_flops or 0.0) else "float32"


def dtype_of(group: GpuGroup, setting: Setting) -> Dtype:
    """What a group computes in: its own dtype, or the setting's as far as all its types know it."""
    if group.dtype is not None:
        return group.dtype
    kinds = {setting.cluster.gpus[rank].type for rank in group.ranks}
    found = {usable_dtype(setting.dtype, kind) for kind in kinds}
    if len(found) == 1:
        return found.pop()
    # What every type has: float16 as soon as one of them has matrix units for it.
    return "float16" if "float16" in found else "float32"
