"""What an iterator may give as one global batch, and how its samples are read."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import datasets
import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset

from zorse_ds.core.order import SampleOrder
from zorse_ds.errors import DataError
from zorse_ds.integrations.deepspeed.agreement import _checksum
from zorse_ds.integrations.deepspeed.data import (
    CollatedBatch,
    IndexedBatch,
    PlacedBatch,
    SampleBatch,
    ZorseLoader,
    as_batch,
    default_collate_fn,
    lengths_of,
    num_samples_of,
)
from zorse_ds.ranges import Range

SAMPLES = [(torch.full((3,), float(i)), torch.tensor(i)) for i in range(6)]


def loaded(item: Any) -> tuple[int, Any, Any]:
    """Number of samples, and inputs and labels of the second one."""
    batch = as_batch(item, default_collate_fn)
    return batch.num_samples, *batch.load(Range(1, 2))


@pytest.mark.parametrize("size", [1, 2, 3, 6])
def test_a_list_of_samples_of_any_length(size: int) -> None:
    """Two samples look like a collated pair, but for being tuples."""
    batch = as_batch(SAMPLES[:size], default_collate_fn)
    assert isinstance(batch, SampleBatch)
    inputs, labels = batch.load(Range(0, size))
    assert batch.num_samples == size
    assert inputs.shape == (size, 3)
    assert labels.tolist() == list(range(size))


@pytest.mark.parametrize("size", [2, 3])
def test_what_a_plain_loader_collates(size: int) -> None:
    for item in DataLoader(SAMPLES, batch_size=size):
        assert isinstance(as_batch(item, default_collate_fn), CollatedBatch)
        num_samples, inputs, labels = loaded(item)
        assert num_samples == size
        assert inputs.shape == (1, 3)
        assert labels.shape == (1,)


def test_a_dictionary_with_labels() -> None:
    item = {"input_ids": torch.arange(8).view(4, 2), "labels": torch.arange(4), "name": "text"}
    num_samples, inputs, labels = loaded(item)
    assert num_samples == 4
    assert inputs["input_ids"].tolist() == [[2, 3]]
    assert inputs["name"] == "text"
    assert labels.tolist() == [1]


def test_dictionaries_are_samples() -> None:
    batch = as_batch([{"x": torch.ones(2)}, {"x": torch.ones(2)}], lambda samples: (samples, None))
    assert batch.num_samples == 2
    assert len(batch.load(Range(0, 2))[0]) == 2


def test_tensors_of_unlike_length_are_refused() -> None:
    with pytest.raises(DataError, match=r"\[4, 5\] samples along dim 0"):
        as_batch((torch.ones(4, 2), torch.ones(5)), default_collate_fn)


@pytest.mark.parametrize("item", ["text", [], 3, torch.ones(4)], ids=repr)
def test_anything_else_is_refused(item: Any) -> None:
    with pytest.raises(DataError, match="expected one global batch"):
        as_batch(item, default_collate_fn)


def test_a_collator_that_gives_no_pair_is_refused() -> None:
    batch = as_batch(SAMPLES[:3], lambda samples: torch.ones(3))
    with pytest.raises(DataError, match=r"expected \(inputs, labels\)"):
        batch.load(Range(0, 1))


def test_samples_of_unlike_shape_need_a_collator() -> None:
    batch = as_batch([(torch.ones(2), 1), (torch.ones(3), 1)], default_collate_fn)
    with pytest.raises(DataError, match="or a collate_fn"):
        batch.load(Range(0, 2))


def test_batch_fn_comes_before_the_device() -> None:
    batch = as_batch(SAMPLES[:3], default_collate_fn)
    placed = PlacedBatch(
        batch, torch.device("cpu"), torch.float32, lambda pair: (pair[0] * 2, pair[1])
    )
    inputs, _ = placed.load(Range(2, 3))
    assert inputs.tolist() == [[4.0, 4.0, 4.0]]
    assert placed.num_samples == 3


def test_a_loader_goes_on_where_it_was_left() -> None:
    order = SampleOrder(6, 4, shuffle=False, seed=0, drop_last=False)
    loader = ZorseLoader(SAMPLES, order, default_collate_fn)
    assert len(loader) == 2
    assert next(iter(loader)).load(Range(0, 4))[1].tolist() == [0, 1, 2, 3]
    assert [batch.num_samples for batch in loader] == [2]
    assert [batch.num_samples for batch in loader] == [4, 2]


class Endless(IterableDataset[int]):
    """No length."""

    def __iter__(self) -> Iterator[int]:
        yield from range(3)


class Unsized:
    def __getitem__(self, index: int) -> int:
        return index


@pytest.mark.parametrize("dataset", [Endless(), Unsized()], ids=lambda d: type(d).__name__)
def test_a_data_set_without_length_is_refused(dataset: Any) -> None:
    with pytest.raises(DataError, match="which has no order to cut"):
        num_samples_of(dataset)


def checksum_of(item: Any) -> int:
    batch = as_batch(item, default_collate_fn)
    assert not isinstance(batch, IndexedBatch)
    return _checksum(batch.value)


def tokens(last: int) -> list[dict[str, Any]]:
    return [{"input_ids": [1, 2, last]}, {"input_ids": np.array([3, last])}]


def floats(last: float) -> tuple[Any, Any]:
    half = torch.tensor([[1.0], [last]], dtype=torch.bfloat16)
    return {"x": half, "empty": torch.zeros(2, 0)}, torch.tensor([0.5, last])


@pytest.mark.parametrize("make", [tokens, floats], ids=lambda make: make.__name__)
def test_a_checksum_tells_equal_batches_from_others(make: Any) -> None:
    assert checksum_of(make(5)) == checksum_of(make(5))
    assert checksum_of(make(5)) != checksum_of(make(6))
    assert checksum_of(make(5)) != checksum_of(make(5)[::-1])


def test_float_inputs_take_the_dtype_of_the_group_and_labels_stay() -> None:
    batch = CollatedBatch((torch.ones(2, 3), torch.ones(2)))
    placed = PlacedBatch(batch, torch.device("cpu"), torch.bfloat16, None)
    inputs, labels = placed.load(Range(0, 2))
    assert (inputs.dtype, labels.dtype) == (torch.bfloat16, torch.float32)


ROWS = [{"input_ids": [i] * length} for i, length in enumerate([3, 9, 1, 7, 5, 2, 8, 4, 6, 9, 1])]


@pytest.mark.parametrize("form", ["list", "columns", "datasets", "selected"])
def test_lengths_are_those_of_the_samples(form: str) -> None:
    dataset: Any = ROWS
    if form == "columns":
        dataset = {"input_ids": [row["input_ids"] for row in ROWS]}
    if form in ("datasets", "selected"):
        dataset = datasets.Dataset.from_list(ROWS)
    if form == "selected":
        dataset = dataset.select(range(10, -1, -1)).select(range(10, -1, -1))
    assert lengths_of(dataset).tolist() == [3, 9, 1, 7, 5, 2, 8, 4, 6, 9, 1]


def test_samples_without_tokens_have_no_length() -> None:
    with pytest.raises(DataError, match=r"group_by_length is true, but the samples have no input"):
        lengths_of(SAMPLES)


@pytest.mark.parametrize("seed", range(3))
def test_batches_laid_by_length_have_the_same_samples_and_pad_less(seed: int) -> None:
    order = SampleOrder(len(ROWS), 4, shuffle=True, seed=seed, drop_last=False)
    plain = ZorseLoader(ROWS, order, lambda rows: (rows, None))
    laid = ZorseLoader(ROWS, order, lambda rows: (rows, None), lengths_of(ROWS))
    padding = {"plain": 0, "laid": 0}
    for one, other in zip(plain, laid, strict=True):
        whole = Range(0, one.num_samples)
        first, second = (batch.load(whole)[0] for batch in (one, other))
        assert sorted(row["input_ids"] for row in first) == sorted(
            row["input_ids"] for row in second
        )
        lengths = [len(row["input_ids"]) for row in second]
        assert lengths == sorted(lengths, reverse=True)
        for name, rows in (("plain", first), ("laid", second)):
            for start in range(0, len(rows), 2):
                own = [len(row["input_ids"]) for row in rows[start : start + 2]]
                padding[name] += max(own) * len(own) - sum(own)
    assert padding["laid"] < padding["plain"]
