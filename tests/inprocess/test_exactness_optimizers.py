"""Optimizers that treat elements one by one work on uneven shards; schedulers see their groups."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.inprocess.exact_cases import (
    BATCH,
    SHAPES,
    assert_exact,
    blocks,
    make_plan,
    squared_error,
    vectors,
    with_ties,
)
from tests.inprocess.local_job import Job, Step

optim = torch.optim
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "SGD": lambda g: optim.SGD(g, lr=0.3),
    "SGD momentum": lambda g: optim.SGD(g, lr=0.3, momentum=0.9, nesterov=True, weight_decay=0.1),
    "Adam": lambda g: optim.Adam(g, lr=0.02, weight_decay=0.1),
    "AdamW": lambda g: optim.AdamW(g, lr=0.02, weight_decay=0.1, amsgrad=True),
    "AdamW foreach": lambda g: optim.AdamW(g, lr=0.02, foreach=True),
    "Adagrad": lambda g: optim.Adagrad(g, lr=0.05, initial_accumulator_value=0.1),
    "RMSprop": lambda g: optim.RMSprop(g, lr=0.01, momentum=0.5, centered=True),
}
GROUPS = [
    {"lr": 0.2, "weight_decay": 0.0},
    {"lr": 0.03, "weight_decay": 0.3},
    {"weight_decay": 0.01},
]


def steps(count: int = 3) -> list[Step]:
    """With clipping, and a short batch at the end."""
    return [Step(vectors(i, BATCH if i < count - 1 else 6), clip=0.3) for i in range(count)]


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("shape", SHAPES)
def test_inner_optimizers(shape: str, optimizer: str) -> None:
    job = Job(with_ties(5, (0, 4)), squared_error, make_optimizer=OPTIMIZERS[optimizer])
    assert_exact(job, make_plan(SHAPES[shape], 5), steps())


def decay_of(name: str) -> int:
    """Biases, first halves, second halves."""
    return 0 if name.endswith("bias") else 1 if "first" in name else 2


@pytest.mark.parametrize("optimizer", ["SGD momentum", "AdamW"])
@pytest.mark.parametrize("shape", SHAPES)
def test_param_groups_keep_their_options(shape: str, optimizer: str) -> None:
    job = Job(
        blocks(5),
        squared_error,
        make_optimizer=OPTIMIZERS[optimizer],
        options=GROUPS,
        group_of=decay_of,
    )
    outcome = assert_exact(job, make_plan(SHAPES[shape], 5), steps())
    for sharded in outcome.optimizers:
        rates = [group["lr"] for group in sharded.inner.param_groups]
        assert rates[:2] == [0.2, 0.03] and len(rates) == 3


def by_layer(name: str) -> int:
    """A param group a layer: most ranks have nothing of most groups."""
    return int(name.split(".")[0])


@pytest.mark.parametrize("shape", SHAPES)
def test_schedulers_on_ranks_that_own_nothing(shape: str) -> None:
    """Ranks with shard weight 0, and ranks whose stages have nothing of a param group."""
    job = Job(
        blocks(4),
        squared_error,
        make_optimizer=OPTIMIZERS["AdamW"],
        options=[{"lr": 0.1 / (i + 1)} for i in range(4)],
        group_of=by_layer,
        make_scheduler=lambda o: optim.lr_scheduler.LambdaLR(o, lambda epoch: 0.5**epoch),
    )
    plan = make_plan(SHAPES[shape], 4, weights=[0, 1, 0])
    outcome = assert_exact(job, plan, steps(4))
    for sharded in outcome.optimizers:
        rates = [group["lr"] for group in sharded.inner.param_groups]
        assert rates == pytest.approx([0.1 / (i + 1) / 16 for i in range(4)])
