"""Widths, micro-batch sizes and batches that do not fit each other."""

from __future__ import annotations

import math

import pytest

from tests.inprocess.exact_cases import (
    BATCH,
    FOUR_GROUPS,
    SHAPES,
    assert_exact,
    asymmetric_plans,
    blocks,
    language_model,
    make_plan,
    plainly,
    ragged_lengths,
    sentences,
    squared_error,
    token_sum,
    vectors,
)
from tests.inprocess.local_job import Job, Step, run
from tests.inprocess.plain_job import mean_loss
from zorse_ds.core.plan import Plan

ODD_SIZES = {
    "differ within a rank": [[[1, 7, 3]], [[5, 1, 5]]],
    "differ within a group": [[[6], [1, 1, 1, 1, 1]], [[2, 2], [7]]],
    "differ between groups": [[[1] * 11], [[11]], [[4, 4, 3]]],
    "whole batch at once, then one by one": [[[11]], [[1] * 6, [1] * 5]],
    "four groups": FOUR_GROUPS,
}


def steps_of(*sizes: int) -> list[Step]:
    """One step a size."""
    return [Step(vectors(i, size)) for i, size in enumerate(sizes)]


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
@pytest.mark.parametrize("shape", SHAPES)
def test_widths(shape: str, schedule: str) -> None:
    plan = make_plan(SHAPES[shape], 5, schedule=schedule)
    assert_exact(Job(blocks(5), squared_error), plan, steps_of(BATCH, BATCH, BATCH))


@pytest.mark.parametrize("shape", ODD_SIZES)
def test_micro_batch_sizes(shape: str) -> None:
    plan = make_plan(ODD_SIZES[shape], 5)
    assert_exact(Job(blocks(5), squared_error), plan, steps_of(BATCH, BATCH, BATCH))


@pytest.mark.parametrize("zero_level", [0, 1, 2, 3])
def test_zero_levels(zero_level: int) -> None:
    for plan in asymmetric_plans(4, zero_levels=[zero_level]).values():
        assert_exact(Job(blocks(4), squared_error), plan, steps_of(BATCH, BATCH))


@pytest.mark.parametrize("shape", SHAPES)
def test_a_short_last_batch(shape: str) -> None:
    """Down to fewer samples than ranks: some have nothing to do, and still take part."""
    plan = make_plan(SHAPES[shape], 3)
    assert not all(gpu.micro_batches for group in plan.resized(1).groups for gpu in group.gpus)
    assert_exact(Job(blocks(3), squared_error), plan, steps_of(BATCH, 4, 1, BATCH, 7))


def test_a_longer_batch_than_planned() -> None:
    for plan in asymmetric_plans(3).values():
        assert_exact(Job(blocks(3), squared_error), plan, steps_of(BATCH, 29))


def in_turn() -> list[Step]:
    """Training and evaluation, each with sizes of its own."""
    sizes = [
        (BATCH, True),
        (5, False),
        (BATCH, True),
        (1, False),
        (20, False),
        (6, True),
        (11, False),
    ]
    return [
        Step(sentences(i, ragged_lengths(i, size)), trains=trains)
        for i, (size, trains) in enumerate(sizes)
    ]


@pytest.mark.parametrize("shape", SHAPES)
def test_training_and_evaluation_in_turn(shape: str) -> None:
    job = Job(language_model(3), token_sum)
    steps = in_turn()
    outcome = assert_exact(job, make_plan(SHAPES[shape], 5), steps)
    for at, step in enumerate(steps):
        if not step.trains:
            model, _ = plainly(job, [other for other in steps[:at] if other.trains])
            loss, targets = mean_loss(model, token_sum, step.samples)
            assert abs(outcome.losses[at] - float(loss.detach())) < 1e-12
            assert outcome.reports[at].num_targets == targets
            assert math.isnan(outcome.norms[at])
            assert all(
                tensor.equal(outcome.values[at - 1][name])
                for name, tensor in outcome.values[at].items()
            )


@pytest.mark.parametrize("shape", SHAPES)
def test_outputs_of_an_evaluation(shape: str) -> None:
    """Those of each sample, in the order of the samples, without anybody's padding."""
    job = Job(language_model(2), token_sum)
    samples = sentences(1, ragged_lengths(1))
    plan = make_plan(SHAPES[shape], 4)
    outcome = run(job, plan, [Step(samples, trains=False)])
    model, _ = plainly(job, [])
    rows = [row for _, output in sorted(outcome.outputs[0].items()) for row in output]
    assert len(rows) == len(samples)
    for (inputs, _), row in zip(samples, rows, strict=True):
        alone = model(inputs[None])[0]
        assert (row[: len(inputs)] - alone).abs().max() < 1e-12
        assert len(row) <= max(len(other) for other, _ in samples)


def test_more_ranks_than_elements() -> None:
    """A stage of one parameter of three elements on four ranks, one of them with weight 0."""
    layers = blocks(2)
    for parameter in [layers[1].first.weight, layers[1].first.bias, layers[1].second.weight]:
        parameter.requires_grad_(False)
    for zero_level in (0, 1, 2, 3):
        plan = make_plan(
            [[[6], [5]], [[3], [3], [3], [2]]],
            2,
            zero_levels=[zero_level],
            weights=[1, 5, 0, 1],
        )
        outcome = assert_exact(Job(layers, squared_error), plan, steps_of(BATCH, BATCH))
        sizes = [
            sum(b.layout.of(rank).size for b in optimizer.buckets)
            for rank, optimizer in enumerate(outcome.optimizers)
        ]
        assert sum(sizes[2:]) == 3 and 0 in sizes[2:]


def test_state_follows_the_shard_weights() -> None:
    """A rank with weight 0 holds no master and no optimizer state, and trains all the same."""
    plan: Plan = make_plan([[[4], [4], [3]]], 2, zero_levels=[2], weights=[3, 0, 1])
    outcome = assert_exact(Job(blocks(2), squared_error), plan, steps_of(BATCH, BATCH))
    held = [
        sum(state["exp_avg"].numel() for state in optimizer.inner.state.values())
        for optimizer in outcome.optimizers
    ]
    assert held == [36, 0, 12]
