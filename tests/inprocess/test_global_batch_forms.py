"""What a data set and an iterator may give, and the sentences for what they may not."""

from __future__ import annotations

from typing import Any

import datasets
import pytest
import torch

from zorse_ds.core.order import SampleOrder
from zorse_ds.errors import DataError
from zorse_ds.integrations.deepspeed.data import (
    CollatedBatch,
    SampleBatch,
    ZorseLoader,
    as_batch,
    check_dataset,
    num_samples_of,
)
from zorse_ds.integrations.huggingface import collate_causal_lm
from zorse_ds.ranges import Range

ROWS: dict[str, Any] = {"input_ids": [[1, 2], [3, 4, 5], [6]], "text": ["a", "b", "c"]}
IDS = [[1, 2, 0], [3, 4, 5], [6, 0, 0]]


def loaded(item: Any) -> list[list[int]]:
    batch = as_batch(item, collate_causal_lm)
    inputs, _ = batch.load(Range(0, batch.num_samples))
    return inputs["input_ids"].tolist()


def test_a_slice_of_a_data_set_is_a_global_batch() -> None:
    dataset = datasets.Dataset.from_dict(ROWS)
    assert loaded(dataset[:3]) == loaded(ROWS) == loaded(dataset.to_list()) == IDS
    assert loaded(dataset.with_format("torch")[:3]) == IDS
    assert isinstance(as_batch(ROWS, collate_causal_lm), SampleBatch)


def test_a_dict_of_tensors_with_labels_is_collated() -> None:
    ids = torch.ones(3, 2, dtype=torch.long)
    batch = as_batch({"input_ids": ids, "labels": ids}, collate_causal_lm)
    assert isinstance(batch, CollatedBatch)
    assert batch.num_samples == 3


def test_a_dict_of_columns_is_a_data_set() -> None:
    order = SampleOrder(num_samples_of(ROWS), 2, shuffle=False, seed=0, drop_last=False)
    loader = ZorseLoader(ROWS, order, collate_causal_lm)
    inputs = [batch.load(Range(0, batch.num_samples))[0]["input_ids"].tolist() for batch in loader]
    assert inputs == [[[1, 2, 0], [3, 4, 5]], [[6]]]


@pytest.mark.parametrize(
    ("item", "sentence"),
    [
        (datasets.Dataset.from_dict(ROWS)[0], "looks like a single sample; expected one global"),
        ({"input_ids": [1, 2], "labels": [1, 2]}, "looks like a single sample"),
        ({"input_ids": torch.tensor([1]), "labels": torch.tensor([1])}, "like a single sample"),
        ({"input_ids": [[1], [2]], "labels": [[1]]}, "columns of lengths"),
        (datasets.Dataset.from_dict(ROWS)[:0], "a batch has 0 samples"),
        ((torch.zeros(0, 3), torch.zeros(0)), "a batch has 0 samples"),
        (("a", "b"), "a batch has no tensors"),
        ((torch.zeros(2, 3), torch.zeros(3)), r"tensors with \[2, 3\] samples"),
        ([], "gave an empty list"),
        ({}, "gave an empty dict"),
        ("text", "gave a str"),
    ],
    ids=str,
)
def test_what_is_no_global_batch_is_refused(item: Any, sentence: str) -> None:
    with pytest.raises(DataError, match=sentence):
        as_batch(item, collate_causal_lm)


@pytest.mark.parametrize(
    ("dataset", "sentence"),
    [
        ([], "the data set has 0 samples"),
        ({"input_ids": []}, "the data set has 0 samples"),
        ({}, "the data set has 0 samples"),
        (5, "is a int, which has no order"),
        (iter([1]), "has no order to cut"),
        ({"input_ids": [[1]], "labels": []}, "columns of lengths"),
        (datasets.DatasetDict(train=datasets.Dataset.from_dict(ROWS)), "is a DatasetDict"),
    ],
    ids=str,
)
def test_what_is_no_data_set_is_refused(dataset: Any, sentence: str) -> None:
    with pytest.raises(DataError, match=sentence):
        check_dataset(dataset)
    check_dataset([1])
    check_dataset({0: "a", 1: "b"})
