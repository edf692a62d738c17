"""Seconds of the optimizer and of sums of gradients: bound by memory bandwidth."""

from zorse_ds.core.gpus import GpuType
from zorse_ds.core.plan import Dtype
from zorse_ds.cost.dtypes import DTYPE_BYTES, MASTER_BYTES
from zorse_ds.cost.setting import Setting

HOST_BYTES_PER_S = 20e9
"""What one rank's optimizer reaches in host memory: a share of a server's 100 to 300 GB/s."""
UNKNOWN_BYTES_PER_S = 1e12
"""Of device memory, where nobody states it."""


def memory_bytes_per_s(kind: GpuType) -> float:
    """What device memory moves."""
    return kind.memory_bytes_per_s or UNKNOWN_BYTES_PER_S


def step_s(
    setting: Setting, kind: GpuType, dtype: Dtype, num_params: float, on_host: bool = False
) -> float:
    """Seconds to step `num_params` elements of a rank's own masters.

    Measured where the profile has the type (and nothing is offloaded). Else by what a fused step
    touches: the gradient read, scaled and read again; master and moments read and written; the
    parameter written where it is another than the master.
    """
    if not on_host and setting.profile is not None:
        for entry in setting.profile.optimizer:
            if entry.gpu_type == kind.name:
                return num_params * entry.step_s_per_param
    touched = 3 * MASTER_BYTES + 2 * (MASTER_BYTES + setting.optimizer_bytes)
    if DTYPE_BYTES[dtype] != MASTER_BYTES:
        touched += DTYPE_BYTES[dtype]
    speed = HOST_BYTES_PER_S if on_host else memory_bytes_per_s(kind)
    return num_params * touched / speed


def opening_s(kind: GpuType, num_params: float) -> float:
    """Seconds to zero the gradients of a stage, before its first backward of a step."""
    return num_params * MASTER_BYTES / memory_bytes_per_s(kind)


def lot_sum_s(kind: GpuType, dtype: Dtype, num_params: float, share: float, width: int) -> float:
    """Seconds in which a rank lays one micro-batch's gradients together and sums up its own shard.

    Reads and writes what travels, in the group's dtype, and adds `width` contributions to its shard
    (each is read, and the sum read and written).
    """
    wire = DTYPE_BYTES[dtype]
    touched = 2 * wire + width * (2 * MASTER_BYTES + wire) * share
    return num_params * touched / memory_bytes_per_s(kind)


def reduction_s(kind: GpuType, dtype: Dtype, num_params: float, share: float, width: int) -> float:
    """Seconds in which a rank cuts gradients for the others and sums up its own shard.

    Reads all gradients and writes what it sends, adds `width` contributions to its shard (each is
    read, and the sum read and written), and reads the shard once for the norm. A rank alone only
    does that. What travels is in the group's dtype.
    """
    if width == 1:
        return num_params * MASTER_BYTES / memory_bytes_per_s(kind)
    wire = DTYPE_BYTES[dtype]
    touched = MASTER_BYTES + wire + (width * (2 * MASTER_BYTES + wire) + MASTER_BYTES) * share
    return num_params * touched / memory_bytes_per_s(kind)
