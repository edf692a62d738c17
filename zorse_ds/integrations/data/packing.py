"""From documents to samples of one length: tokenise, join, cut."""

from collections.abc import Sequence
from typing import Any

import datasets
import numpy as np
import pyarrow.compute as pc  # type: ignore[import-untyped]

from zorse_ds.core.strict import listed, suggestion
from zorse_ds.errors import DataError

IGNORED_LABEL = -100
_TOKENS = datasets.Features({"input_ids": datasets.List(datasets.Value("int32"))})
SAMPLES = datasets.Features(
    {name: datasets.List(datasets.Value("int32")) for name in ("input_ids", "labels")}
)


def tokenise_and_pack(
    dataset: datasets.Dataset,
    tokenizer: Any,
    seq_len: int,
    *,
    text_column: str = "text",
    num_proc: int | None = None,
) -> datasets.Dataset:
    """Turn documents into samples `input_ids`, `labels` of `seq_len` tokens each.

    All documents are laid end to end, each closed by the tokenizer's end-of-text token, and the
    one long row of tokens is cut every `seq_len`. Not a token is lost: a sample may hold the end
    of one document and the beginning of the next, across the batches in which the work is done,
    and what is left at the very end is kept as one short sample (a collator pads it later).
    Documents that are empty or null give nothing. Labels equal the inputs; the model shifts them.

    A data set that has `input_ids` is taken as it is; labels are added if it has none, and are
    -100 where its `attention_mask` is 0.

    `num_proc` processes tokenise and pack at once. Both passes are cached by datasets.

    Raises DataError for a missing column, a tokenizer without end-of-text token, or no tokens.
    """
    if "input_ids" in dataset.column_names:
        return _with_labels(dataset, num_proc)
    _check_inputs(dataset, tokenizer, seq_len, text_column)
    documents = dataset.map(
        tokenise_texts,
        batched=True,
        input_columns=text_column,
        remove_columns=dataset.column_names,
        features=_TOKENS,
        fn_kwargs={"tokenizer": tokenizer},
        num_proc=num_proc,
        desc="Tokenising",
    )
    return _pack(documents, seq_len, num_proc)


def _check_inputs(
    dataset: datasets.Dataset, tokenizer: Any, seq_len: int, text_column: str
) -> None:
    if seq_len < 2:
        raise DataError(f"seq_len is {seq_len}; expected at least 2, for each token predicts one")
    if text_column not in dataset.column_names:
        raise DataError(
            f"the data set has no column {text_column!r}; expected one of its columns "
            f"{listed(dataset.column_names)}{suggestion(text_column, dataset.column_names)}"
        )
    if tokenizer.eos_token_id is None:
        raise DataError("the tokenizer has no eos_token; expected one, for it ends each document")


def tokenise_texts(texts: Sequence[str | None], tokenizer: Any) -> dict[str, list[list[int]]]:
    """Tokenise one batch of documents, each closed by end-of-text once; drop empty ones."""
    full = [text for text in texts if text]
    if not full:
        return {"input_ids": []}
    end = tokenizer.eos_token_id
    # verbose: no warning about documents longer than the model's context, they are cut later.
    rows = tokenizer(full, return_attention_mask=False, truncation=False, verbose=False)
    return {"input_ids": [r if r and r[-1] == end else [*r, end] for r in rows["input_ids"]]}


def _pack(documents: datasets.Dataset, seq_len: int, num_proc: int | None) -> datasets.Dataset:
    """Cut all tokens of `documents`, laid end to end, into samples of `seq_len`.

    A sample is made by the batch of documents that holds its first token; that batch reads on
    into the documents behind it. So no batch hands a remainder to the next, nothing is lost
    between them, and any number of processes gives the same samples.
    """
    if len(documents) == 0:
        raise DataError("the data set holds no text; expected at least one document")
    column = documents.data.column("input_ids")
    ends = np.cumsum(pc.list_value_length(column).to_numpy().astype(np.int64))
    return documents.map(
        _pack_batch,
        batched=True,
        with_indices=True,
        input_columns=[],
        remove_columns=documents.column_names,
        features=SAMPLES,
        fn_kwargs={"documents": documents.with_format("arrow"), "ends": ends, "seq_len": seq_len},
        num_proc=num_proc,
        desc=f"Packing into samples of {seq_len} tokens",
    )


def _pack_batch(
    indices: Sequence[int], documents: datasets.Dataset, ends: np.ndarray, seq_len: int
) -> dict[str, list[np.ndarray]]:
    """Return the samples whose first token lies in the documents `indices` (a contiguous run).

    `ends[i]` is the position, in the row of all tokens, one behind document i.
    """
    first_token = int(ends[indices[0] - 1]) if indices[0] else 0
    start = _round_up(first_token, seq_len)
    stop = min(_round_up(int(ends[indices[-1]]), seq_len), int(ends[-1]))
    if start >= stop:
        return {"input_ids": [], "labels": []}
    tokens = _read_tokens(documents, ends, start, stop)
    samples = [tokens[at : at + seq_len] for at in range(0, len(tokens), seq_len)]
    return {"input_ids": samples, "labels": samples}


def _read_tokens(
    documents: datasets.Dataset, ends: np.ndarray, start: int, stop: int
) -> np.ndarray:
    """Return tokens `[start, stop)` of the row of all tokens, int32."""
    first = int(np.searchsorted(ends, start, side="right"))
    last = int(np.searchsorted(ends, stop, side="left"))
    rows = documents[first : last + 1].column("input_ids")
    offset = int(ends[first - 1]) if first else 0
    tokens: np.ndarray = pc.list_flatten(rows).to_numpy()
    return tokens[start - offset : stop - offset]


def _round_up(position: int, multiple: int) -> int:
    return -(-position // multiple) * multiple


def _with_labels(dataset: datasets.Dataset, num_proc: int | None) -> datasets.Dataset:
    if "labels" in dataset.column_names:
        return dataset
    return dataset.map(_add_labels, num_proc=num_proc, desc="Adding labels")


def _add_labels(sample: dict[str, Any]) -> dict[str, list[int]]:
    ids = list(sample["input_ids"])
    mask = sample.get("attention_mask") or [1] * len(ids)
    labels = [i if seen else IGNORED_LABEL for i, seen in zip(ids, mask, strict=True)]
    return {"labels": labels}
