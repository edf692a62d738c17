"""Low-precision parameters with float32 masters, against mixed precision written in plain PyTorch.

The reference sums in the same micro-batches as the plan, because a low-precision gradient is
rounded once a micro-batch; everything else it does in one process.
"""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_

from tests.inprocess.exact_cases import BATCH, SHAPES, Block, blocks, make_plan, vectors
from tests.inprocess.local_job import Job, Step, run
from tests.inprocess.plain_job import PlainModel, Sample
from zorse_ds.core.layout import lay_out
from zorse_ds.core.plan import Plan

LOW = [torch.bfloat16, torch.float16]
ROUNDING = 1e-6
"""Of float32: only the order of sums differs."""
NUM_LAYERS = 5


def error_sum(outputs: Tensor, labels: Tensor) -> tuple[Tensor, int]:
    """In float32, so that the loss itself is not rounded."""
    return (outputs.float() - labels.float()).square().sum(), len(outputs)


def adam(groups: list[dict[str, object]]) -> torch.optim.Optimizer:
    """With an eps that keeps rounding of tiny gradients small."""
    return torch.optim.AdamW(groups, lr=0.02, weight_decay=0.1, eps=1e-2)


def layers(tied: bool) -> list[nn.Module]:
    """In float32; the last one may be the first."""
    made = [layer.float() for layer in blocks(NUM_LAYERS)]
    if tied:
        made[-1] = made[0]
    return made


def batches(dtype: torch.dtype) -> list[list[Sample]]:
    """Three steps of vectors."""
    return [[(x.to(dtype), y.float()) for x, y in vectors(i)] for i in range(3)]


def mixed_precision(
    model: PlainModel, plan: Plan, steps: list[list[Sample]], dtype: torch.dtype, clip: float
) -> tuple[list[dict[str, Tensor]], list[float]]:
    """Masters and norms after each step. Parameters of `model` are the masters."""
    masters = model.named_parameters()
    optimizer = adam([{"params": list(masters.values())}])
    values, norms = [], []
    for samples in steps:
        for master in masters.values():
            master.grad = torch.zeros_like(master)
        low = copy.deepcopy(model)
        for layer in low.layers:
            layer.to(dtype)
        for stage, micro_batches in enumerate(lay_out(plan).micro_batches):
            for micro_batch in micro_batches:
                start, stop = micro_batch.samples
                add_grads(low, masters, samples[start:stop], plan.stages[stage].layers)
        norms.append(float(clip_grad_norm_(masters.values(), clip)))
        optimizer.step()
        values.append({name: master.detach().clone() for name, master in masters.items()})
    return values, norms


def add_grads(
    low: PlainModel, masters: dict[str, nn.Parameter], samples: list[Sample], own: tuple[int, int]
) -> None:
    """Run some samples through the whole model and add the gradients of a stage's layers.

    A tied layer is used through a copy at each place, so that each use has a gradient of its own.
    """
    layers = [copy.deepcopy(layer) for layer in low.layers]
    value = torch.stack([x for x, _ in samples])
    for layer in layers:
        value = layer(value)
    loss, _ = error_sum(value, torch.stack([y for _, y in samples]))
    (loss * (1 / BATCH)).backward()
    for index in range(*own):
        first = next(i for i, layer in enumerate(low.layers) if layer is low.layers[index])
        for name, parameter in layers[index].named_parameters():
            assert parameter.grad is not None
            masters[f"{first}.{name}"].grad += parameter.grad.float()  # type: ignore[operator]


@pytest.mark.parametrize("zero_level", [0, 1, 2, 3])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", LOW, ids=str)
def test_masters_are_those_of_mixed_precision(
    dtype: torch.dtype, shape: str, zero_level: int
) -> None:
    plan = make_plan(SHAPES[shape], NUM_LAYERS, zero_levels=[zero_level])
    for tied in (False, True):
        data = batches(dtype)
        job = Job(layers(tied), error_sum, make_optimizer=adam, dtype=dtype)
        outcome = run(job, plan, [Step(samples, clip=0.5) for samples in data])
        values, norms = mixed_precision(PlainModel(layers(tied)), plan, data, dtype, 0.5)
        assert outcome.norms == pytest.approx(norms, rel=1e-5)
        for at, expected in enumerate(values):
            assert_masters(outcome.masters[at], expected)
            assert_rounded(outcome.values[at], outcome.masters[at], dtype)


def assert_masters(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    """Every element of every master is held by somebody, and right."""
    held = dict.fromkeys(expected, 0)
    for key, part in found.items():
        name, start, stop = place(key)
        assert (part - expected[name].flatten()[start:stop]).abs().max() < ROUNDING, key
        held[name] += part.numel()
    assert held == {name: tensor.numel() for name, tensor in expected.items()}


def assert_rounded(
    values: dict[str, Tensor], masters: dict[str, Tensor], dtype: torch.dtype
) -> None:
    """Parameters are the masters, rounded."""
    for key, part in masters.items():
        name, start, stop = place(key)
        assert part.dtype == torch.float32 and values[name].dtype == dtype
        assert values[name].flatten()[start:stop].equal(part.to(dtype))


def place(key: str) -> tuple[str, int, int]:
    """`name[start:stop]`."""
    name, _, bounds = key.removesuffix("]").partition("[")
    start, stop = bounds.split(":")
    return name, int(start), int(stop)


def test_masters_keep_the_bits_that_casting_loses() -> None:
    """Before the first step moves anything (learning rate 0) masters are the original weights."""
    job = Job(
        layers(False),
        error_sum,
        make_optimizer=lambda groups: torch.optim.SGD(groups, lr=0.0),
        dtype=torch.bfloat16,
    )
    original = PlainModel(layers(False)).named_parameters()
    for shape in SHAPES.values():
        outcome = run(job, make_plan(shape, NUM_LAYERS), [Step(batches(torch.bfloat16)[0])])
        for key, part in outcome.masters[0].items():
            name, start, stop = place(key)
            assert part.equal(original[name].detach().flatten()[start:stop])
            assert not name.endswith("weight") or not part.equal(part.bfloat16().float())


@pytest.mark.parametrize("shape", SHAPES)
def test_loss_scale_saves_small_float16_gradients(shape: str) -> None:
    """Unscaled they are rounded away; scaled by a power of two they are those of a larger loss."""
    factor = 2.0**-22

    def tiny(outputs: Tensor, labels: Tensor) -> tuple[Tensor, int]:
        total, count = error_sum(outputs, labels)
        return total * factor, count

    plan = make_plan(SHAPES[shape], NUM_LAYERS)
    samples = batches(torch.float16)[0]
    job = Job(layers(False), tiny, dtype=torch.float16)
    scaled = run(job, plan, [Step(samples, loss_scale=2.0**22)])
    plain = run(Job(layers(False), error_sum, dtype=torch.float16), plan, [Step(samples)])
    unscaled = run(job, plan, [Step(samples)])
    assert scaled.norms[0] == pytest.approx(plain.norms[0] * factor, rel=1e-6)
    assert scaled.losses[0] == pytest.approx(plain.losses[0] * factor, rel=1e-6)
    assert abs(unscaled.norms[0] / scaled.norms[0] - 1) > 0.1


@pytest.mark.parametrize("dtype", LOW, ids=str)
def test_float32_and_low_precision_side_by_side(dtype: torch.dtype) -> None:
    """Two buckets a stage: one whose masters are the parameters, one whose masters are copies."""

    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.low, self.high = Block().to(dtype), Block()

        def forward(self, value: Tensor) -> Tensor:
            return self.high(self.low(value.to(dtype)).float())

    torch.manual_seed(0)
    made = [Mixed() for _ in range(3)]
    for shape in SHAPES.values():
        steps = [Step([(x.float(), y.float()) for x, y in vectors(i)]) for i in range(2)]
        outcome = run(Job(made, error_sum), make_plan(shape, 3), steps)
        alone = run(Job(made, error_sum), make_plan([[[BATCH]]], 3), steps)
        for name, tensor in outcome.values[1].items():
            tolerance = 0.01 if ".low." in name else 0.002
            assert (tensor.float() - alone.values[1][name].float()).abs().max() < tolerance, name
