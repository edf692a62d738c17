"""Making one micro-batch of samples of unequal length."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from zorse_ds.errors import DataError
from zorse_ds.integrations.huggingface.loss import IGNORED_LABEL

OPTIONAL_KEYS = ("attention_mask", "position_ids")


def collate_causal_lm(
    samples: Sequence[Mapping[str, Any]], pad_token_id: int = 0
) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """Stack samples into inputs and labels, both (b, t), padded on the right to the longest.

    A sample is a dict of sequences of integers: input_ids and, where wanted, labels (default: the
    input_ids), attention_mask, position_ids. The latter two are in the inputs only when the
    samples bring them: under a causal mask, padding on the right is seen by no real token. Raises
    DataError when there are no samples, or one has no input_ids, keys the others lack, or
    sequences of unequal lengths.
    """
    if not samples:
        raise DataError("a micro-batch has no samples; expected at least one")
    rows = [_read_sample(i, sample) for i, sample in enumerate(samples)]
    for key in OPTIONAL_KEYS:
        having = sum(key in row for row in rows)
        if 0 < having < len(rows):
            raise DataError(
                f"{having} of the {len(rows)} samples of a micro-batch have {key}; expected all "
                "or none"
            )
    length = max(len(row["input_ids"]) for row in rows)
    batch = {
        key: torch.stack([_pad(key, row[key], length, pad_token_id) for row in rows])
        for key in rows[0]
    }
    return batch, batch.pop("labels")


def _read_sample(index: int, sample: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """The known keys of a sample as 1-D tensors of one length, labels filled in."""
    if "input_ids" not in sample:
        raise DataError(f"sample {index} has keys {sorted(sample)}; expected input_ids among them")
    row = {
        key: torch.as_tensor(sample[key], dtype=torch.long)
        for key in ("input_ids", "labels", *OPTIONAL_KEYS)
        if sample.get(key) is not None
    }
    row.setdefault("labels", row["input_ids"].clone())
    shape = tuple(row["input_ids"].shape)
    for key, value in row.items():
        if value.ndim != 1 or tuple(value.shape) != shape:
            raise DataError(
                f"sample {index}: {key} has shape {tuple(value.shape)}; expected one dimension, "
                f"as long as input_ids {shape}"
            )
    return row


def _pad(key: str, row: torch.Tensor, length: int, pad_token_id: int) -> torch.Tensor:
    """`row` lengthened on the right by what stands for nothing under `key`."""
    missing = length - len(row)
    if key == "position_ids":
        # Counting on, since a position that starts again would begin another packed document.
        after = int(row[-1]) + 1 if len(row) else 0
        return torch.cat([row, torch.arange(after, after + missing)])
    fill = {"input_ids": pad_token_id, "labels": IGNORED_LABEL, "attention_mask": 0}[key]
    return torch.nn.functional.pad(row, (0, missing), value=fill)
