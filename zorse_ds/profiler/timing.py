"""Seconds of work on a device: medians of repeats, warm-up left out, within a budget."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median

import torch

_WARM_UPS = 2
_LEAST_REPEATS = 3
_MOST_REPEATS = 30


@dataclass(frozen=True, slots=True)
class Budget:
    """How long one point may take: repeats stop after `seconds`, but not before some are made."""

    seconds: float = 1.0
    least_repeats: int = _LEAST_REPEATS
    most_repeats: int = _MOST_REPEATS


def median_seconds(
    parts: Sequence[Callable[[], object]], device: torch.device, budget: Budget
) -> list[float]:
    """Median seconds of each of `parts`, which are called in turn, again and again.

    The first rounds (allocations, kernels being chosen) count for nothing.
    """
    for _ in range(_WARM_UPS):
        _round(parts, device)
    rounds: list[list[float]] = []
    start = time.perf_counter()
    while len(rounds) < budget.most_repeats:
        rounds.append(_round(parts, device))
        is_late = time.perf_counter() - start > budget.seconds
        if is_late and len(rounds) >= budget.least_repeats:
            break
    return [median(seconds) for seconds in zip(*rounds, strict=True)]


def _round(parts: Sequence[Callable[[], object]], device: torch.device) -> list[float]:
    seconds = []
    for part in parts:
        _finish(device)
        start = time.perf_counter()
        part()
        _finish(device)
        seconds.append(time.perf_counter() - start)
    return seconds


def _finish(device: torch.device) -> None:
    """Wait for what was started on a device that runs on its own."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
