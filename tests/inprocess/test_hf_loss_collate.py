"""The loss is the one transformers computes, as a sum; batches hold samples of any length."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import transformers as hf

from tests.inprocess.hf_models import CONFIGS, make_batch
from zorse_ds.errors import DataError
from zorse_ds.integrations.huggingface import (
    CausalLMLoss,
    CausalLMStages,
    collate_causal_lm,
    count_targets,
)


def test_loss_is_that_of_transformers() -> None:
    model = hf.AutoModelForCausalLM.from_config(CONFIGS["llama"](), dtype=torch.float64)
    ids = make_batch()["input_ids"]
    labels = ids.clone()
    labels[0, :4] = -100
    expected = model(input_ids=ids, labels=labels)
    loss_sum, num_targets = CausalLMLoss()(expected.logits, labels)
    assert num_targets == count_targets(labels) == 6 + 3
    torch.testing.assert_close((loss_sum / num_targets).float(), expected.loss, rtol=1e-6, atol=0)


def test_first_label_is_no_target() -> None:
    assert count_targets(torch.tensor([[5, -100, -100]])) == 0
    assert count_targets(torch.tensor([[-100, 5, 6]])) == 2


@pytest.mark.parametrize(
    ("dtype", "expected"),
    [
        (torch.bfloat16, torch.float32),
        (torch.float32, torch.float32),
        (torch.float64, torch.float64),
    ],
)
def test_loss_precision(dtype: torch.dtype, expected: torch.dtype) -> None:
    logits = torch.randn(1, 4, 8, dtype=dtype)
    assert CausalLMLoss()(logits, torch.ones(1, 4, dtype=torch.long))[0].dtype == expected


def test_without_targets_the_loss_and_its_gradients_are_zero() -> None:
    logits = torch.randn(2, 4, 8, requires_grad=True)
    loss_sum, num_targets = CausalLMLoss()(logits, torch.full((2, 4), -100))
    loss_sum.backward()
    assert (loss_sum.item(), num_targets) == (0.0, 0)
    assert logits.grad is not None and not logits.grad.any()


def test_logits_of_padding_are_left_out() -> None:
    logits = torch.randn(2, 9, 8, dtype=torch.float64)
    labels = torch.randint(0, 8, (2, 6))
    assert CausalLMLoss()(logits, labels)[0] == CausalLMLoss()(logits[:, :6], labels)[0]


def test_collate_pads_on_the_right() -> None:
    samples = [
        {"input_ids": [1, 2, 3], "labels": [-100, 2, 3], "position_ids": [0, 1, 0]},
        {"input_ids": np.array([4, 5]), "labels": (4, 5), "position_ids": torch.tensor([3, 4])},
    ]
    inputs, labels = collate_causal_lm(samples, pad_token_id=9)
    assert {key: value.tolist() for key, value in inputs.items()} == {
        "input_ids": [[1, 2, 3], [4, 5, 9]],
        "position_ids": [[0, 1, 0], [3, 4, 5]],
    }
    assert labels.tolist() == [[-100, 2, 3], [4, 5, -100]]


def test_collate_fills_in_labels_and_keeps_masks() -> None:
    samples = [
        {"input_ids": [1, 2], "attention_mask": [0, 1], "idx": 7},
        {"input_ids": [3, 4, 5], "attention_mask": [1, 1, 1]},
    ]
    inputs, labels = collate_causal_lm(samples)
    assert inputs["attention_mask"].tolist() == [[0, 1, 0], [1, 1, 1]]
    assert inputs["input_ids"].tolist() == [[1, 2, 0], [3, 4, 5]]
    assert labels.tolist() == [[1, 2, -100], [3, 4, 5]]
    assert set(inputs) == {"input_ids", "attention_mask"}


@pytest.mark.parametrize(
    ("samples", "message"),
    [
        ([], "no samples"),
        ([{"labels": [1]}], "sample 0 has keys"),
        ([{"input_ids": [1], "attention_mask": [1]}, {"input_ids": [1]}], "1 of the 2 samples"),
        ([{"input_ids": [1]}, {"input_ids": [1, 2], "labels": [1]}], "sample 1: labels has shape"),
        ([{"input_ids": [[1, 2]]}], "expected one dimension"),
        ([{"input_ids": [1, 2], "label": [1, 2]}], "key 'label', .*did you mean 'labels'"),
        ([{"input_ids": [1, 2], "Labels": [1, 2]}], "key 'Labels', .*did you mean 'labels'"),
        ([{"input_ids": [1, 2], "label_ids": [1, 2]}], "did you mean 'labels'"),
        ([{"input_ids": [1], "attention_masks": [1]}], "did you mean 'attention_mask'"),
        ([{"input_ids": [1.7, 2.0]}], "sample 0: input_ids holds 1.7; expected whole numbers"),
        ([{"input_ids": [1, 2], "labels": [1, float("nan")]}], "labels holds nan"),
        ([{"input_ids": "text"}], "sample 0: input_ids is 'text'; expected a sequence of whole"),
        ([{"input_ids": None}], "sample 0: input_ids is None"),
        ([{"input_ids": [1, None]}], "input_ids is .1, None."),
        ([{"input_ids": [2**70]}], "expected a sequence of whole numbers"),
        (
            [{"input_ids": []}, {"input_ids": []}],
            "all 2 samples .* empty; expected|empty input_ids",
        ),
        ([([1, 2], [1, 2])], "sample 0 is a tuple; expected a dict"),
    ],
)
def test_collate_refuses_samples_that_do_not_fit(samples: list[dict], message: str) -> None:
    with pytest.raises(DataError, match=message):
        collate_causal_lm(samples)


def test_other_columns_are_left_alone_and_whole_floats_are_taken() -> None:
    others = {"text": "a", "tables": 1, "global_attention_mask": [1], "label": 3, "length": 2}
    sample = {"input_ids": np.array([1.0, 2.0]), "labels": [1, 2], **others}
    inputs, labels = collate_causal_lm([sample, {"input_ids": [], "labels": []}])
    assert inputs["input_ids"].tolist() == [[1, 2], [0, 0]]
    assert labels.tolist() == [[1, 2], [-100, -100]]
    assert set(inputs) == {"input_ids"}


@pytest.mark.parametrize("label", [8, -1, -101])
def test_a_label_outside_the_vocabulary_is_refused(label: int) -> None:
    with pytest.raises(DataError, match=f"a label is {label}; expected 0 to 7"):
        CausalLMLoss()(torch.zeros(1, 3, 8), torch.tensor([[1, 2, label]]))


def test_ids_outside_the_vocabulary_and_long_samples_are_refused() -> None:
    stage = CausalLMStages.from_config(CONFIGS["gpt2"]()).build(0, 2)
    with pytest.raises(DataError, match="holds the input id 64; expected 0 to 63"):
        stage({"input_ids": torch.tensor([[1, 64]])})
    with pytest.raises(DataError, match=r"samples of 65 tokens.; expected at most 64"):
        stage({"input_ids": torch.ones(1, 65, dtype=torch.long)})
