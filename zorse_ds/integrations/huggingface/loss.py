"""The loss of a causal language model, as a sum that someone else divides once."""

import torch
from torch.nn import functional

from zorse_ds.errors import DataError

IGNORED_LABEL = -100


def count_targets(labels: torch.Tensor) -> int:
    """Number of targets in `labels` (b, t): those after the first position that are not -100."""
    return int((labels[:, 1:] != IGNORED_LABEL).sum())


class CausalLMLoss:
    """Cross entropy of each position's logits with the label one position later."""

    count_targets = staticmethod(count_targets)
    """Lets the divisor of a step be known before its first backward."""

    def __call__(self, logits: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, int]:
        """Sum of the losses of all targets, and their number.

        `logits` is (b, t, vocabulary), `labels` (b, t) with -100 for no target; labels are shifted
        here. Logits that go on longer than the labels are padding on the right. The sum is in
        float32, or float64 for float64 logits; without a target it is zero, with zero gradients.
        Raises DataError for a target outside the vocabulary.
        """
        length = labels.shape[1]
        precision = torch.float64 if logits.dtype == torch.float64 else torch.float32
        predictions = logits[:, : length - 1].flatten(0, 1).to(precision)
        targets = labels[:, 1:].flatten().to(logits.device)
        _check_targets(targets, logits.shape[-1])
        loss_sum = functional.cross_entropy(
            predictions, targets, ignore_index=IGNORED_LABEL, reduction="sum"
        )
        return loss_sum, count_targets(labels)


def _check_targets(targets: torch.Tensor, vocabulary_size: int) -> None:
    """On a GPU the loss itself would end the process."""
    outside = (targets != IGNORED_LABEL) & ((targets < 0) | (targets >= vocabulary_size))
    if outside.any():
        raise DataError(
            f"a label is {int(targets[outside][0])}; expected 0 to {vocabulary_size - 1}, the "
            f"model's vocabulary, or {IGNORED_LABEL} for no target"
        )
