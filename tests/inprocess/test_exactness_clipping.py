"""One norm over all ragged groups, and one decision whether to step."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

from tests.inprocess.exact_cases import (
    BATCH,
    SHAPES,
    Block,
    assert_exact,
    blocks,
    make_plan,
    squared_error,
    vectors,
)
from tests.inprocess.local_job import Job, Outcome, Step, run
from zorse_ds.runtime.bucket import sum_of_squares

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]


@pytest.mark.parametrize("clip", [0.01, 0.3, 1.0, 1e9])
@pytest.mark.parametrize("shape", SHAPES)
def test_clipping(shape: str, clip: float) -> None:
    """SGD, unlike Adam, shows every factor."""
    job = Job(blocks(5), squared_error, make_optimizer=lambda g: torch.optim.SGD(g, lr=0.5))
    plan = make_plan(SHAPES[shape], 5)
    outcome = assert_exact(job, plan, [Step(vectors(i), clip) for i in range(3)])
    clipped = [norm > clip for norm in outcome.norms]
    assert clipped == [clip < 0.1] * 3 or clip in (0.3, 1.0)


@pytest.mark.parametrize("zero_level", [0, 1, 2, 3])
def test_each_element_counts_once_in_the_norm(zero_level: int) -> None:
    """However many ranks hold it, in a tie as well."""
    layers = blocks(5)
    layers[4] = layers[0]
    for shape in SHAPES.values():
        plan = make_plan(shape, 5, zero_levels=[zero_level], weights=[2, 1, 0.5])
        assert_exact(Job(layers, squared_error), plan, [Step(vectors(0), 0.2)] * 2)


class Poisoned(nn.Module):
    """Hands on what it gets; the gradient it hands back is not finite for samples with a mark."""

    def forward(self, value: Tensor) -> Tensor:
        if value.requires_grad:
            marked = (value.detach()[:, :1] > 100).to(value.dtype)
            value.register_hook(lambda grad: grad + marked * float("inf") if marked.any() else grad)
        return value


class Keep(Block):
    """A block that lets a mark pass."""

    def forward(self, value: Tensor) -> Tensor:
        return value + 0.1 * torch.tanh(self.second(torch.tanh(self.first(value / 256))))


def marked(seed: int, which: int) -> list[tuple[Tensor, Tensor]]:
    """Samples, one of which carries the mark."""
    return [
        (inputs + (1000.0 if i == which else 0.0), labels)
        for i, (inputs, labels) in enumerate(vectors(seed))
    ]


def poisoned_layers() -> list[nn.Module]:
    """The poison is in the third layer of five."""
    torch.manual_seed(0)
    return [Keep(), Keep(), Poisoned(), Keep(), Keep()]


def bounded_error(outputs: Tensor, labels: Tensor) -> Tensor:
    """Finite whatever the outputs are."""
    return (torch.tanh(outputs.float()) - labels).square().mean()


def runs(dtype: torch.dtype, steps: list[Step]) -> Iterator[Outcome]:
    """The poisoned job under asymmetric plans and all ZeRO levels."""
    cast = [
        Step([(x.to(dtype), y) for x, y in step.samples], step.clip, step.loss_scale)
        for step in steps
    ]
    layers = [
        layer.to(torch.float32 if dtype.itemsize == 2 else dtype) for layer in poisoned_layers()
    ]
    job = Job(layers, bounded_error, dtype=dtype)
    for shape in SHAPES.values():
        for zero_levels in ([0, 1, 2], [2, 0, 1], [3, 2, 3]):
            yield run(job, make_plan(shape, 5, zero_levels=zero_levels), cast)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_gradient_that_is_not_finite_skips_the_step_everywhere(dtype: torch.dtype) -> None:
    good = [Step(vectors(0)), Step(vectors(2), clip=0.1)]
    for which in (0, BATCH - 1):
        bad = Step(marked(1, which), clip=0.1)
        poisoned = runs(dtype, [good[0], bad, good[1]])
        for outcome, clean in zip(poisoned, runs(dtype, good), strict=True):
            assert [report.skipped for report in outcome.reports] == [None, "overflow", None]
            assert outcome.reports[1].num_targets == BATCH
            _assert_equal(outcome.masters[1], outcome.masters[0])
            _assert_equal(outcome.values[1], outcome.values[0])
            _assert_equal(outcome.masters[2], clean.masters[1])
            _assert_equal(outcome.values[2], clean.values[1])
            assert not outcome.values[2]["0.first.weight"].equal(
                outcome.values[0]["0.first.weight"]
            )


def _assert_equal(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    assert all(tensor.equal(expected[name]) for name, tensor in found.items())


@pytest.mark.parametrize("size", [0, 1, 1023, 1024, 1025, 2**24 + 7])
def test_a_long_sum_of_squares_is_as_exact_as_a_short_one(size: int) -> None:
    """In one float32 sum, 2²⁴ elements come out short by more than 10⁻⁴."""
    values = torch.randn(size, generator=torch.Generator().manual_seed(0)) * 1e-3
    expected = sum(float(part.double().square().sum()) for part in values.split(2**20))
    assert sum_of_squares(values) == pytest.approx(expected, rel=1e-7)
