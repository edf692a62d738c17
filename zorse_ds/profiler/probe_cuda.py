"""The CUDA half of probing. Not run yet: no GPU was at hand."""

import re
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist

from zorse_ds.profiler.probe_facts import DeviceFacts

_REPEATS = 5
_MATRIX = 8192
_COPY_BYTES = 1 << 28
_BF16_CAPABILITY = 8
"""Older devices only emulate bfloat16."""


def device_facts(device: torch.device, host_memory_bytes: int) -> DeviceFacts:
    """Measure a CUDA device."""
    properties = torch.cuda.get_device_properties(device)
    free, total = torch.cuda.mem_get_info(device)
    host = torch.device("cpu")
    host_s = max(_copy_s(host, device), _copy_s(device, host))
    return DeviceFacts(
        kind="cuda",
        name=properties.name,
        memory_bytes=total,
        usable_bytes=free,
        host_memory_bytes=host_memory_bytes,
        fp32_flops=_matrix_flops(device, torch.float32),
        half_flops=_matrix_flops(device, torch.float16),
        has_bf16=properties.major >= _BF16_CAPABILITY,
        memory_bytes_per_s=2 * _COPY_BYTES / _copy_s(device, device),
        host_bytes_per_s=_COPY_BYTES / host_s,
        reaches_peers=_reaches_peers(device),
    )


def driver_version() -> str | None:
    """NVIDIA's driver on this host, or None."""
    try:
        text = Path("/proc/driver/nvidia/version").read_text(encoding="utf-8")
    except OSError:
        return None
    found = re.search(r"Kernel Module(?: for \S+)?\s+(\d[\d.]+)", text)
    return found[1] if found else None


def can_send(device: torch.device, peer: int, leads: bool) -> bool:
    """Whether NCCL gets a small tensor to `peer` and back. Both ranks call it.

    The process group must wait blockingly, or its watchdog would end the process where this
    returns False.
    """
    token = torch.zeros(1, device=device)
    try:
        for sends in (leads, not leads):
            if sends:
                dist.send(token, peer)
            else:
                dist.recv(token, peer)
        torch.cuda.synchronize(device)
    except RuntimeError:  # of which all errors of torch.distributed are
        return False
    return True


def _reaches_peers(device: torch.device) -> bool:
    others = [index for index in range(torch.cuda.device_count()) if index != device.index]
    return all(torch.cuda.can_device_access_peer(device, other) for other in others)


def _matrix_flops(device: torch.device, dtype: torch.dtype) -> float:
    matrix = torch.rand(_MATRIX, _MATRIX, device=device, dtype=dtype)
    return 2 * _MATRIX**3 / _seconds(lambda: torch.matmul(matrix, matrix), device)


def _copy_s(source: torch.device, target: torch.device) -> float:
    block, room = (
        torch.empty(_COPY_BYTES, dtype=torch.uint8, device=end, pin_memory=end.type == "cpu")
        for end in (source, target)
    )
    device = source if source.type == "cuda" else target
    return _seconds(lambda: room.copy_(block, non_blocking=True), device)


def _seconds(work: Callable[[], object], device: torch.device) -> float:
    """Of one call on the device, the first left out as warm-up."""
    with torch.cuda.device(device):
        work()
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(_REPEATS):
            work()
        stop.record()
        stop.synchronize()
    return start.elapsed_time(stop) * 1e-3 / _REPEATS
