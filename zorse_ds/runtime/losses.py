"""Losses as sums: each micro-batch contributes a sum, the step divides once."""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from zorse_ds.errors import ModelError

LossFn = Callable[[Any, Any], Any]


class Criterion:
    """A user's loss function as `(sum, count)`.

    `loss_fn(outputs, labels)` returns `(loss_sum, num_targets)`, or a scalar that is the mean over
    the samples of the micro-batch, which is weighted by their number. Without a function the
    model's output is that scalar. A function with a method `count_targets(labels) -> int` lets the
    divisor be known before the first backward.
    """

    def __init__(self, loss_fn: LossFn | None) -> None:
        self._loss_fn = loss_fn
        count_targets = getattr(loss_fn, "count_targets", None)
        self.count_targets: Callable[[Any], int] | None = count_targets

    def __call__(self, outputs: Any, labels: Any, num_samples: int) -> tuple[Tensor, float]:
        """The loss summed over targets (0-dim), and their number, which may be a sum of weights.

        Raises `ModelError` for anything else that a loss function may return.
        """
        result = outputs if self._loss_fn is None else self._loss_fn(outputs, labels)
        if isinstance(result, Tensor) and result.numel() == 1:
            return result.reshape(()) * num_samples, num_samples
        if isinstance(result, tuple) and len(result) == 2 and isinstance(result[0], Tensor):
            loss_sum, count = result
            if loss_sum.numel() == 1:
                return loss_sum.reshape(()), _checked_count(count)
            result = loss_sum
        shape = list(result.shape) if isinstance(result, Tensor) else None
        found = f"a tensor of shape {shape}" if shape is not None else f"a {type(result).__name__}"
        raise ModelError(
            f"the loss function returned {found}; expected a scalar mean over the micro-batch's "
            "samples or (loss_sum, num_targets)"
        )


def _checked_count(count: Any) -> float:
    is_number = isinstance(count, int | float) or (isinstance(count, Tensor) and count.numel() == 1)
    number = float(count) if is_number else math.nan
    if not (math.isfinite(number) and number >= 0):
        raise ModelError(
            f"the loss function returned {count!r} as its number of targets; expected a number of "
            "at least 0"
        )
    return number


class LossSum:
    """Sum of losses and number of targets of one rank's micro-batches in a step."""

    def __init__(self) -> None:
        self._losses: list[Tensor] = []
        self.num_targets = 0.0

    def add(self, loss_sum: Tensor, count: float) -> None:
        """Add a micro-batch; one without targets adds nothing, whatever its loss says."""
        if count:
            self._losses.append(loss_sum.detach())
            self.num_targets += count

    @property
    def total(self) -> float:
        """The sum in float64; reads from the device once."""
        return float(torch.stack(self._losses).double().sum()) if self._losses else 0.0
