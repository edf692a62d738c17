"""Sequence lengths that change from step to step and from micro-batch to micro-batch.

Each micro-batch of the first stage is padded on the right to its own longest sample; further down
other samples meet. The reference runs each sample alone, unpadded.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from tests.inprocess.exact_cases import (
    BATCH,
    SHAPES,
    VOCAB,
    WIDTH,
    CountedTokenSum,
    assert_exact,
    language_model,
    make_plan,
    ragged_lengths,
    sentences,
    token_sum,
)
from tests.inprocess.local_job import Job, Step
from tests.inprocess.plain_job import Sample
from tests.random_plans import random_plan


@pytest.mark.parametrize("counted", [True, False], ids=["counted", "uncounted"])
@pytest.mark.parametrize("shape", SHAPES)
def test_lengths_that_change_from_step_to_step(shape: str, counted: bool) -> None:
    job = Job(language_model(3), CountedTokenSum() if counted else token_sum)
    steps = [Step(sentences(i, [length] * BATCH)) for i, length in enumerate((3, 9, 1, 5))]
    assert_exact(job, make_plan(SHAPES[shape], 5), steps)


@pytest.mark.parametrize("counted", [True, False], ids=["counted", "uncounted"])
@pytest.mark.parametrize("shape", SHAPES)
def test_lengths_that_change_within_a_step(shape: str, counted: bool) -> None:
    job = Job(language_model(3), CountedTokenSum() if counted else token_sum)
    steps = [Step(sentences(i, ragged_lengths(i)), clip=0.1) for i in range(4)]
    assert_exact(job, make_plan(SHAPES[shape], 5), steps)


@pytest.mark.parametrize(
    "lengths", [[1] * 10 + [9], [9] + [1] * 10, [1, 2, 3, 4, 5, 6, 7, 8, 9, 1, 1]]
)
def test_one_long_sample(lengths: list[int]) -> None:
    for shape in SHAPES.values():
        job = Job(language_model(3), token_sum)
        assert_exact(job, make_plan(shape, 5), [Step(sentences(0, lengths, 0.0))] * 2)


@pytest.mark.parametrize("seed", range(20), ids=lambda seed: f"seed{seed}")
def test_random_plans_with_random_lengths(seed: int) -> None:
    plan = random_plan(seed + 5000, num_layers=5)
    steps = [
        Step(sentences(100 * seed + i, ragged_lengths(seed + i, plan.global_batch_size)))
        for i in range(2)
    ]
    assert_exact(Job(language_model(3), token_sum), plan, steps)


class MeanOfWords(nn.Module):
    """Ids and a mask to one vector a sample: padding is left out by the mask."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, WIDTH)

    def forward(self, value: tuple[Tensor, Tensor]) -> Tensor:
        ids, mask = value
        hidden = self.embedding(ids) * mask[..., None]
        return hidden.sum(1) / mask.sum(1, keepdim=True)


@pytest.mark.parametrize("num_classes", [3, 4, 5, 6])
def test_outputs_without_a_sequence_axis(num_classes: int) -> None:
    """As many classes as a neighbour's padded length: they are not its padding."""
    torch.manual_seed(0)
    layers = [MeanOfWords().double(), nn.Linear(WIDTH, num_classes).double()]
    loss_fn = lambda logits, labels: nn.functional.cross_entropy(logits, labels)  # noqa: E731
    for shape in ("1-3", "3-1"):
        plan = make_plan(SHAPES[shape], 2)
        assert_exact(Job(layers, loss_fn), plan, [Step(classified(i)) for i in range(3)])


def classified(seed: int) -> list[Sample]:
    """Sentences with masks, and one of three classes each."""
    lengths = [1, 2, 6, 1, 3, 1, 5, 2, 4, 1, 1]
    ids = [inputs for inputs, _ in sentences(seed, lengths)]
    return [((own, torch.ones(len(own))), torch.tensor(len(own) % 3)) for own in ids]
