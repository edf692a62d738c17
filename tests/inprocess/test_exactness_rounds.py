"""Gradients that are summed after every micro-batch, while backward goes on."""

from __future__ import annotations

import random

import pytest
import torch
from torch import nn

from tests.inprocess.exact_cases import (
    BATCH,
    assert_exact,
    blocks,
    language_model,
    make_plan,
    ragged_lengths,
    sentences,
    squared_error,
    token_sum,
    vectors,
    with_ties,
    without_targets,
)
from tests.inprocess.local_job import Job, Step, run
from tests.inprocess.plain_job import PlainModel
from tests.inprocess.test_exactness_precision import (
    LOW,
    adam,
    assert_masters,
    assert_rounded,
    batches,
    error_sum,
    layers,
    mixed_precision,
)
from zorse_ds.core.plan import Plan
from zorse_ds.errors import PlanError
from zorse_ds.runtime import assembly

SHAPES = {
    "equal": [[2, 2], [2, 2], [3]],
    "unlike counts": [[1, 1, 1, 1], [4, 2], [1]],
    "one rank": [[4, 4, 3]],
    "more at once": [[5], [1, 1, 1, 1, 1], [1]],
}


@pytest.fixture(autouse=True)
def small_lots(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two layers of the tests travel together."""
    monkeypatch.setattr(assembly, "LEAST_LOT", 40)


def plan_of(ranks: list[list[int]], num_layers: int, **options: object) -> Plan:
    """One stage of all layers on all ranks."""
    data = make_plan([ranks], num_layers, zero_levels=[2], **options).to_dict()  # type: ignore[arg-type]
    data["groups"][0]["reduce_after"] = "micro_batch"
    return Plan.from_dict(data)


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "ministage"])
@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize("shape", SHAPES)
def test_shapes(shape: str, recompute: str, schedule: str) -> None:
    plan = plan_of(SHAPES[shape], 5, recompute=recompute, schedule=schedule)
    steps = [Step(vectors(i, size)) for i, size in enumerate((BATCH, 2, BATCH, 7))]
    outcome = assert_exact(Job(blocks(5), squared_error), plan, steps)
    lots = [len(own.stages[0].buckets) for own in outcome.optimizers]
    assert lots == [3] * len(lots)


@pytest.mark.parametrize("seed", range(12))
def test_random_plans(seed: int) -> None:
    generator = random.Random(seed)
    ranks: list[list[int]] = [[] for _ in range(generator.randint(2, 4))]
    left = BATCH
    while left:
        size = min(left, generator.randint(1, 4))
        generator.choice(ranks).append(size)
        left -= size
    weights = [generator.choice([0, 1, 2.5]) for _ in ranks]
    plan = plan_of(ranks, 5, weights=weights)
    lengths = ragged_lengths(seed)
    masked = without_targets(sentences(seed, lengths), range(4))
    steps = [Step(sentences(seed, lengths), clip=0.1), Step(masked, loss_scale=8.0)]
    assert_exact(Job(language_model(3), token_sum), plan, steps)


def test_layers_that_are_used_twice_frozen_or_not_used() -> None:
    plan = plan_of(SHAPES["unlike counts"], 5)
    steps = [Step(vectors(i)) for i in range(2)]
    assert_exact(Job(with_ties(5, (0, 3), (1, 4)), squared_error), plan, steps)
    frozen = Job(blocks(5), squared_error, group_of=lambda name: None if "first" in name else 0)
    assert_exact(frozen, plan, steps)
    idle = [HalfUsed().double() for _ in range(5)]
    assert_exact(Job(idle, squared_error), plan, steps)


class HalfUsed(nn.Module):
    """A weight for some samples alone: a micro-batch without any makes no gradient of it."""

    def __init__(self) -> None:
        super().__init__()
        self.always = nn.Linear(3, 3)
        self.sometimes = nn.Parameter(torch.ones(3))

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        output = value + torch.tanh(self.always(value))
        chosen = value.detach().sum(1, keepdim=True) > 0
        return torch.where(chosen, output * self.sometimes, output) if chosen.any() else output


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", LOW, ids=str)
def test_sixteen_bits_on_the_wire_cost_no_precision(dtype: torch.dtype, shape: str) -> None:
    plan = plan_of(SHAPES[shape], 5)
    data = batches(dtype)
    job = Job(layers(False), error_sum, make_optimizer=adam, dtype=dtype)
    outcome = run(job, plan, [Step(samples, clip=0.5) for samples in data])
    values, norms = mixed_precision(PlainModel(layers(False)), plan, data, dtype, 0.5)
    assert outcome.norms == pytest.approx(norms, rel=1e-5)
    for at, expected in enumerate(values):
        assert_masters(outcome.masters[at], expected)
        assert_rounded(outcome.values[at], outcome.masters[at], dtype)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"zero_level": 1}, "groups[0].reduce_after is 'micro_batch', but zero_level of group"),
        ({"offload": "params"}, "groups[0].reduce_after is 'micro_batch', but offload of group"),
    ],
)
def test_what_it_needs_is_told(change: dict[str, object], problem: str) -> None:
    data = plan_of(SHAPES["equal"], 5).to_dict()
    data["groups"][0] |= change
    with pytest.raises(PlanError) as caught:
        Plan.from_dict(data)
    assert str(caught.value).startswith(problem)


def test_a_pipeline_is_refused() -> None:
    data = make_plan([[[BATCH]], [[5], [6]]], 5, zero_levels=[2]).to_dict()
    data["groups"][1]["reduce_after"] = "micro_batch"
    with pytest.raises(PlanError, match="but the plan has 2 stages; expected 'step'"):
        Plan.from_dict(data)
