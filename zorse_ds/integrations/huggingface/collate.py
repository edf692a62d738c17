"""Making one micro-batch of samples of unequal length."""

import difflib
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from zorse_ds.errors import DataError
from zorse_ds.integrations.huggingface.loss import IGNORED_LABEL
from zorse_ds.integrations.huggingface.structure import ModelStructure

CollateFn = Callable[[Sequence[Mapping[str, Any]]], tuple[dict[str, torch.Tensor], torch.Tensor]]

OPTIONAL_KEYS = ("attention_mask", "position_ids")

KNOWN_KEYS = ("input_ids", "labels", *OPTIONAL_KEYS)


def collate_for(structure: ModelStructure) -> CollateFn:
    """`collate_causal_lm` with what the model needs: a router loss must not count padding.

    So then there is an attention_mask, unless the samples have position_ids: these tell packed
    documents apart only where there is no mask.
    """
    needs_mask = structure.router_loss is not None
    takes_mask = "attention_mask" in structure.accepted_inputs
    return partial(collate_causal_lm, add_mask=needs_mask and takes_mask)


def collate_causal_lm(
    samples: Sequence[Mapping[str, Any]], pad_token_id: int = 0, *, add_mask: bool = False
) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """Stack samples into inputs and labels, both (b, t), padded on the right to the longest.

    A sample is a dict of sequences of integers: input_ids and, where wanted, labels (default: the
    input_ids), attention_mask, position_ids. The latter two are in the inputs only when the
    samples bring them (`add_mask`: the former always, unless there are position_ids): under a
    causal mask, padding on the right is seen by no real token. Other
    keys are left alone. Raises DataError when there are no samples or no tokens, or a sample has no
    input_ids, a misspelt key, keys the others lack, or sequences of unequal lengths or of anything
    but whole numbers.
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
    if length == 0:
        raise DataError(
            f"all {len(rows)} samples of a micro-batch have empty input_ids; expected at least one "
            "token"
        )
    if add_mask and not {"attention_mask", "position_ids"} & rows[0].keys():
        for row in rows:
            row["attention_mask"] = torch.ones_like(row["input_ids"])
    batch = {
        key: torch.stack([_pad(key, row[key], length, pad_token_id) for row in rows])
        for key in rows[0]
    }
    return batch, batch.pop("labels")


def _read_sample(index: int, sample: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """The known keys of a sample as 1-D tensors of one length, labels filled in."""
    if not isinstance(sample, Mapping):
        raise DataError(
            f"sample {index} is a {type(sample).__name__}; expected a dict with input_ids"
        )
    if "input_ids" not in sample:
        raise DataError(f"sample {index} has keys {sorted(sample)}; expected input_ids among them")
    _check_spelling(index, sample)
    row = {
        key: _whole_numbers(f"sample {index}: {key}", sample[key])
        for key in KNOWN_KEYS
        if key == "input_ids" or sample.get(key) is not None
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


def _check_spelling(index: int, sample: Mapping[str, Any]) -> None:
    """DataError for a key that must mean a known one which is not there, such as `label`."""
    wanted = [key for key in KNOWN_KEYS if key not in sample]
    for key in sample:
        if key in KNOWN_KEYS or not isinstance(key, str):
            continue
        near = difflib.get_close_matches(key.lower(), wanted, n=1, cutoff=0.8)
        # "global_attention_mask" is another thing, "label_ids" is not.
        if near and (near[0] == "labels" or abs(len(key) - len(near[0])) <= 2):
            raise DataError(
                f"sample {index} has the key {key!r}, which would be left out; did you mean "
                f"{near[0]!r}?"
            )


def _whole_numbers(where: str, value: Any) -> torch.Tensor:
    """A sequence of whole numbers as int64; floats are taken if they are whole."""
    try:
        numbers = torch.as_tensor(value)
        whole = numbers.to(torch.long)
    except (TypeError, ValueError, RuntimeError, OverflowError):
        shown = repr(value)
        shown = shown if len(shown) <= 40 else f"{shown[:37]}..."
        raise DataError(f"{where} is {shown}; expected a sequence of whole numbers") from None
    if not torch.equal(whole.to(numbers.dtype), numbers):
        wrong = numbers[whole.to(numbers.dtype) != numbers].flatten()[0].item()
        raise DataError(f"{where} holds {wrong:g}; expected whole numbers")
    return whole


def _pad(key: str, row: torch.Tensor, length: int, pad_token_id: int) -> torch.Tensor:
    """`row` lengthened on the right by what stands for nothing under `key`."""
    missing = length - len(row)
    if key == "position_ids":
        # Counting on, since a position that starts again would begin another packed document.
        after = int(row[-1]) + 1 if len(row) else 0
        return torch.cat([row, torch.arange(after, after + missing)])
    fill = {"input_ids": pad_token_id, "labels": IGNORED_LABEL, "attention_mask": 0}[key]
    return torch.nn.functional.pad(row, (0, missing), value=fill)
