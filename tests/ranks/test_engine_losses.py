"""Losses as sums over targets, and sequences whose length changes all the time."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from deepspeed.utils import logger
from torch import Tensor

from tests.ranks.engine_cases import (
    Case,
    Result,
    check,
    make_engine,
    run_cases,
    run_reference,
)
from tests.ranks.engine_models import (
    TokenLoss,
    batches_of,
    lengths_of,
    pad_batch,
    plan_of,
    sentences,
    sum_and_count,
    token_model,
)
from tests.ranks.harness import run_ranks

NARROW_WIDE = plan_of([[[3, 2, 2]], [[1, 2], [2, 2]]], [0, 2, 6], zero=[1, 2], weights=[1, 2, 1])
WIDE_NARROW = plan_of([[[3, 1], [2, 1]], [[3, 4]]], [0, 3, 6], zero=[2, 0], recompute="full")
THREE_STAGES = plan_of([[[1] * 7], [[4, 3]], [[2, 2, 3]]], [0, 1, 4, 6])
SIZE = 7
STEPS = 4
# Samples 4 to 6 are the last micro-batch of two plans; the whole second step has no target.
NO_TARGET = [4, 5, 6, *range(SIZE, 2 * SIZE)]


def token_case(name: str, plan: dict[str, Any], loss_fn: Any, **options: Any) -> Case:
    samples = sentences(lengths_of(STEPS * SIZE), masked=options.pop("masked", ()))
    return Case(
        name,
        plan,
        batches_of(samples, [SIZE] * STEPS),
        layers=token_model,
        loss_fn=loss_fn,
        sample_loss=sum_and_count,
        collate_fn=pad_batch,
        **options,
    )


def mean_over_samples(outputs: Tensor, labels: Tensor) -> Tensor:
    """A scalar mean that weighs every sample alike, however many positions it has."""
    per_sample = F.cross_entropy(outputs.transpose(1, 2), labels, reduction="none")
    valid = labels != -100
    return (per_sample.sum(1) / valid.sum(1).clamp(min=1)).mean()


def counted_once(outputs: Tensor, labels: Tensor) -> tuple[Tensor, int]:
    return mean_over_samples(outputs, labels), 1


CASES = [
    token_case("counted by labels, 1-2", NARROW_WIDE, TokenLoss()),
    token_case("counted by labels, 2-1 recomputed", WIDE_NARROW, TokenLoss()),
    token_case("(sum, count), 1-2", NARROW_WIDE, sum_and_count),
    token_case("(sum, count), 1-1-1", THREE_STAGES, sum_and_count),
    token_case("no target, counted by labels", NARROW_WIDE, TokenLoss(), masked=NO_TARGET),
    token_case("no target, (sum, count)", WIDE_NARROW, sum_and_count, masked=NO_TARGET),
    token_case(
        "no target, scheduled",
        THREE_STAGES,
        TokenLoss(),
        masked=NO_TARGET,
        config={"scheduler": {"type": "StepLR", "params": {"step_size": 1, "gamma": 0.5}}},
        scheduler=lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5),
    ),
    Case(
        "scalar mean over samples",
        NARROW_WIDE,
        batches_of(sentences(lengths_of(STEPS * SIZE)), [SIZE] * STEPS),
        layers=token_model,
        loss_fn=mean_over_samples,
        sample_loss=counted_once,
        collate_fn=pad_batch,
    ),
]


@pytest.fixture(scope="module")
def results() -> dict[str, list[Result]]:
    return run_cases(CASES)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_loss_equals_one_process(case: Case, results: dict[str, list[Result]]) -> None:
    check(results[case.name], run_reference(case))


def test_lengths_change_inside_a_micro_batch_and_from_step_to_step() -> None:
    lengths = [[len(inputs) for inputs, _ in batch] for batch in CASES[0].batches]
    assert len({max(step) for step in lengths}) > 1
    assert len(set(lengths[0][:3])) > 1


def test_a_step_without_target_counts_as_skipped(results: dict[str, list[Result]]) -> None:
    for result in results["no target, scheduled"]:
        assert result.skipped_steps == 1
        assert result.rates == [0.05, 0.05, 0.025, 0.0125]


def warnings_of(rank: int) -> tuple[list[str], list[str]]:
    """What DeepSpeed's logger says in a step with targets, and in one without."""
    heard: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = heard.append  # type: ignore[method-assign]
    logger.addHandler(handler)
    case = CASES[4]
    engine = make_engine(case)
    engine.set_dataiterator(iter(case.batches))
    told = []
    for _ in range(2):
        heard.clear()
        engine.train_batch()
        told.append([r.getMessage() for r in heard if r.levelno == logging.WARNING])
    engine.destroy()
    return told[0], told[1]


def test_one_rank_warns_of_a_step_without_target() -> None:
    first, *others = run_ranks(3, warnings_of, timeout_s=60)
    assert first == ([], ["step 2 made no update: no targets"])
    assert others == [([], [])] * 2
