"""The loss of a causal language model, as a sum that someone else divides once."""

from typing import Any

import torch
from torch.nn import functional

from zorse_ds.errors import DataError
from zorse_ds.integrations.huggingface.router_loss import RouterLoss

IGNORED_LABEL = -100


def count_targets(labels: torch.Tensor) -> int:
    """Number of targets in `labels` (b, t): those after the first position that are not -100."""
    return int((labels[:, 1:] != IGNORED_LABEL).sum())


class CausalLMLoss:
    """Cross entropy of each position's logits with the label one position later.

    With a router loss, outputs are `(logits, sums)`, and a micro-batch's router loss is added to
    the mean over its targets, as transformers does for a batch.
    """

    def __init__(self, router_loss: RouterLoss | None = None) -> None:
        self._router_loss = router_loss

    count_targets = staticmethod(count_targets)
    """Lets the divisor of a step be known before its first backward."""

    def __call__(
        self, outputs: torch.Tensor | tuple[torch.Tensor, torch.Tensor], labels: torch.Tensor
    ) -> tuple[torch.Tensor, int]:
        """Sum of the losses of all targets, and their number.

        `outputs` are logits (b, t, vocabulary), or these and the sums of a router loss. `labels` is
        (b, t) with -100 for no target; labels are shifted here. Logits that go on longer than the
        labels are padding on the right. The sum is in float32, or float64 for float64 logits;
        without a target it is zero, with zero gradients. Raises DataError for a target outside the
        vocabulary.
        """
        parts: Any = (outputs, None) if isinstance(outputs, torch.Tensor) else outputs
        logits, sums = parts
        length = labels.shape[1]
        precision = torch.float64 if logits.dtype == torch.float64 else torch.float32
        predictions = logits[:, : length - 1].flatten(0, 1).to(precision)
        targets = labels[:, 1:].flatten().to(logits.device)
        _check_targets(targets, logits.shape[-1])
        loss_sum = functional.cross_entropy(
            predictions, targets, ignore_index=IGNORED_LABEL, reduction="sum"
        )
        count = count_targets(labels)
        if self._router_loss is not None:
            # In this order the parts of a batch add up to the very bits of transformers' gradients.
            added = self._router_loss.coefficient * self._router_loss.of(sums)
            loss_sum = loss_sum + added.to(loss_sum.dtype) * count
        return loss_sum, count


def _check_targets(targets: torch.Tensor, vocabulary_size: int) -> None:
    """On a GPU the loss itself would end the process."""
    outside = (targets != IGNORED_LABEL) & ((targets < 0) | (targets >= vocabulary_size))
    if outside.any():
        raise DataError(
            f"a label is {int(targets[outside][0])}; expected 0 to {vocabulary_size - 1}, the "
            f"model's vocabulary, or {IGNORED_LABEL} for no target"
        )
