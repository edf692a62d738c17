"""The loss is a sum divided once by the targets of the whole step, whatever the cut."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.inprocess.exact_cases import (
    BATCH,
    SHAPES,
    CountedTokenSum,
    assert_exact,
    blocks,
    language_model,
    make_plan,
    sentences,
    squared_error,
    token_sum,
    vectors,
    without_targets,
)
from tests.inprocess.local_job import Job, Step, run
from tests.inprocess.plain_job import NO_TARGET
from zorse_ds.errors import ModelError
from zorse_ds.runtime.losses import Criterion

LENGTHS = [5] * BATCH
CRITERIA = {"counted": CountedTokenSum(), "uncounted": token_sum}


def tensor_count(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """The number of targets as a tensor."""
    total, _ = token_sum(logits, labels)
    return total, (labels != NO_TARGET).sum()


def nan_without_targets(logits: Tensor, labels: Tensor) -> tuple[Tensor, int]:
    """NaN where nothing counts, in the gradient too."""
    total, count = token_sum(logits, labels)
    return total if count else logits.sum() * math.nan, count


def sum_and_count(outputs: Tensor, labels: Tensor) -> tuple[Tensor, int]:
    """Squared errors, of which every third counts."""
    errors = ((outputs - labels) ** 2)[..., 0]
    return errors.sum(), len(errors)


@pytest.mark.parametrize("criterion", CRITERIA)
@pytest.mark.parametrize("shape", SHAPES)
def test_token_sum(shape: str, criterion: str) -> None:
    job = Job(language_model(3), CRITERIA[criterion])
    steps = [Step(sentences(i, LENGTHS)) for i in range(3)]
    outcome = assert_exact(job, make_plan(SHAPES[shape], 5), steps)
    for step, report in zip(steps, outcome.reports, strict=True):
        targets = sum(int((labels != NO_TARGET).sum()) for _, labels in step.samples)
        assert report.num_targets == targets
        assert targets not in (BATCH, 5 * BATCH)


@pytest.mark.parametrize("criterion", CRITERIA)
@pytest.mark.parametrize("shape", SHAPES)
def test_micro_batches_without_a_target(shape: str, criterion: str) -> None:
    job = Job(language_model(3), CRITERIA[criterion])
    plan = make_plan(SHAPES[shape], 5)
    steps = [
        Step(without_targets(sentences(0, LENGTHS), range(7))),
        Step(without_targets(sentences(1, LENGTHS), range(1, BATCH))),
        Step(without_targets(sentences(2, LENGTHS), [0, 2, 3, 9, 10])),
    ]
    assert_exact(job, plan, steps)


@pytest.mark.parametrize("criterion", [*CRITERIA, "NaN"])
@pytest.mark.parametrize("shape", SHAPES)
def test_a_step_without_any_target_changes_nothing(shape: str, criterion: str) -> None:
    """Neither parameters nor state: the steps around it are as if it had not been there."""
    loss_fn = CRITERIA.get(criterion, nan_without_targets)
    job = Job(language_model(3), loss_fn)
    empty = Step(without_targets(sentences(1, LENGTHS), range(BATCH)), clip=0.1)
    steps = [Step(sentences(0, LENGTHS)), empty, Step(sentences(2, LENGTHS))]
    plan = make_plan(SHAPES[shape], 5)
    outcome = assert_exact(job, plan, steps)
    assert [report.skipped for report in outcome.reports] == [None, "no targets", None]
    assert outcome.reports[1].num_targets == 0
    assert all(t.equal(outcome.values[0][name]) for name, t in outcome.values[1].items())
    for optimizer in outcome.optimizers:
        assert all(state["step"] == 2 for state in optimizer.inner.state.values())


LOSSES: dict[str, Callable[..., Any]] = {
    "scalar mean": squared_error,
    "mean of shape [1]": lambda o, y: squared_error(o, y).reshape(1),
    "sum and int": sum_and_count,
    "sum and tensor": lambda o, y: (sum_and_count(o, y)[0], torch.tensor(len(o))),
}


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("shape", SHAPES)
def test_what_a_loss_function_may_return(shape: str, loss: str) -> None:
    job = Job(blocks(4), LOSSES[loss])
    steps = [Step(vectors(i, size)) for i, size in enumerate((BATCH, BATCH, 6))]
    assert_exact(job, make_plan(SHAPES[shape], 4), steps)


@pytest.mark.parametrize("loss_fn", [tensor_count, nan_without_targets])
def test_counts_as_tensors_and_nan_where_nothing_counts(loss_fn: Any) -> None:
    samples = without_targets(sentences(0, LENGTHS), [0, 1, 2, 3, 4, 5, 10])
    job = Job(language_model(3), loss_fn)
    for shape in SHAPES.values():
        outcome = assert_exact(job, make_plan(shape, 5), [Step(samples), Step(samples)])
        assert math.isfinite(outcome.losses[0])


def test_a_model_whose_output_is_the_loss() -> None:
    layers = [*blocks(2), lambda value: (value**2).mean()]
    for shape in ([[[6], [5]], [[4, 4], [3]]], [[[2, 9]]]):
        assert_exact(Job(layers, None), make_plan(shape, 3), [Step(vectors(0))] * 2)


@pytest.mark.parametrize("criterion", CRITERIA)
@pytest.mark.parametrize("loss_scale", [2.0**16, 2.0**-7, 1000.0])
def test_the_loss_scale_does_not_matter(loss_scale: float, criterion: str) -> None:
    job = Job(language_model(3), CRITERIA[criterion])
    steps = [Step(sentences(i, LENGTHS), clip=0.05, loss_scale=loss_scale) for i in range(3)]
    for shape in SHAPES.values():
        assert_exact(job, make_plan(shape, 5), steps)


@pytest.mark.parametrize(
    ("loss_fn", "found"),
    [
        (lambda outputs, labels: (outputs - labels) ** 2, r"a tensor of shape \[11, 3\]"),
        (lambda outputs, labels: 1.5, "a float"),
        (lambda outputs, labels: (1.5, 2), "a tuple"),
    ],
)
def test_what_a_loss_function_may_not_return(loss_fn: Any, found: str) -> None:
    plan = make_plan([[[BATCH]]], 1)
    with pytest.raises(ModelError, match=f"the loss function returned {found}; expected"):
        run(Job(blocks(1), loss_fn), plan, [Step(vectors(0))])


def test_a_wrong_count_is_refused() -> None:
    """A divisor that is not the number of targets would silently scale the update."""

    class Wrong(CountedTokenSum):
        def count_targets(self, labels: Tensor) -> int:
            return labels.numel()

    plan = make_plan(SHAPES["1-3"], 5)
    with pytest.raises(ModelError, match="count_targets and the loss function differ by"):
        run(Job(language_model(3), Wrong()), plan, [Step(sentences(0, LENGTHS))])


class WeightedSquares:
    """Squared errors with a weight a sample, divided by the sum of the weights."""

    def __call__(self, outputs: Tensor, labels: Tensor) -> tuple[Tensor, float]:
        return ((outputs - labels) ** 2).sum() * 2.3, 2.3 * len(outputs)


@pytest.mark.parametrize("count", [-1, float("nan"), "many"])
def test_a_count_that_is_no_number_of_targets_is_refused(count: object) -> None:
    criterion = Criterion(lambda outputs, labels: (outputs.sum(), count))
    with pytest.raises(ModelError, match="expected a number of at least 0"):
        criterion(torch.ones(2), None, 2)


def test_a_count_may_be_a_sum_of_weights() -> None:
    outputs, labels = torch.randn(3, 2), torch.randn(3, 2)
    loss_sum, count = Criterion(WeightedSquares())(outputs, labels, 3)
    torch.testing.assert_close(loss_sum / count, ((outputs - labels) ** 2).sum() / 3)


def test_a_loss_without_gradient_is_refused() -> None:
    """It would train nothing, silently."""

    def detached(outputs: Tensor, labels: Tensor) -> tuple[Tensor, int]:
        return outputs.detach().sum(), len(labels)

    with pytest.raises(ModelError, match="the loss has no gradient"):
        run(
            Job(language_model(3), detached),
            make_plan(SHAPES["1-3"], 5),
            [Step(sentences(0, LENGTHS))],
        )
