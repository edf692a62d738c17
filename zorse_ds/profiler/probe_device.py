"""What a rank can say of its device: its name, its memory, and how fast it is alone."""

import os
import time
from collections.abc import Callable
from statistics import median

import torch

from zorse_ds.profiler import probe_cuda
from zorse_ds.profiler.probe_facts import DeviceFacts

_REPEATS = 5
_MATRIX = 1024
_COPY_BYTES = 1 << 26


def device_facts(device: torch.device) -> DeviceFacts:
    """Measure a device. All ranks of a host should do so at once, as they compute in training."""
    if device.type == "cuda":
        return probe_cuda.device_facts(device, _host_memory_bytes())
    return _cpu_facts()


def _cpu_facts() -> DeviceFacts:
    matrix = torch.rand(_MATRIX, _MATRIX)
    block = torch.zeros(_COPY_BYTES, dtype=torch.uint8)
    target = torch.empty_like(block)
    copy_s = _median_s(lambda: target.copy_(block))
    memory = _host_memory_bytes()
    return DeviceFacts(
        kind="cpu",
        name=_cpu_name(),
        memory_bytes=memory,
        usable_bytes=memory,
        host_memory_bytes=memory,
        fp32_flops=2 * _MATRIX**3 / _median_s(lambda: matrix @ matrix),
        half_flops=None,
        has_bf16=True,
        memory_bytes_per_s=2 * _COPY_BYTES / copy_s,
        host_bytes_per_s=_COPY_BYTES / copy_s,
        reaches_peers=True,
    )


def _median_s(work: Callable[[], object]) -> float:
    """Median seconds of a call, the first left out as warm-up."""
    work()
    times = []
    for _ in range(_REPEATS):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return median(times)


def _host_memory_bytes() -> int:
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _cpu_name() -> str:
    """The model's name; `CPU` where the system does not tell."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            pairs = [line.partition(":") for line in file]
    except OSError:
        pairs = []
    names = (text.strip() for key, _, text in pairs if key.strip() == "model name")
    return next(names, "CPU")
