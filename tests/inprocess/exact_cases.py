"""Layers, samples and asymmetric plans that the exactness tests share."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.inprocess.local_job import Job, Outcome, Step, run
from tests.inprocess.plain_job import NO_TARGET, PlainModel, PlainOutcome, Sample, train_plainly
from zorse_ds.core.plan import Plan

WIDTH = 3
VOCAB = 7
TOLERANCE = 1e-12

BATCH = 11
"""A prime: no micro-batch size of more than one sample divides it."""
SHAPES = {
    "1-3": [[[2, 3, 1, 5]], [[2, 2], [4], [1, 1, 1]]],
    "3-1": [[[2, 2], [4], [1, 2]], [[3, 5, 3]]],
    "2-1-2": [[[4, 2], [1, 1, 1, 2]], [[6, 5]], [[3, 3], [5]]],
}
"""Name → groups → ranks → sizes of micro-batches."""
FOUR_GROUPS = [[[5], [6]], [[1, 4], [3], [3]], [[11]], [[2, 2, 2], [5]]]


class Block(nn.Module):
    """Position-wise, with a residual."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.first = nn.Linear(width, width)
        self.second = nn.Linear(width, width)

    def forward(self, value: Tensor) -> Tensor:
        return value + self.second(torch.tanh(self.first(value)))


class CausalMix(nn.Module):
    """Each position sees itself and those before, so padding on the right changes nothing."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.mix = nn.Linear(width, width)

    def forward(self, value: Tensor) -> Tensor:
        past = value.cumsum(1) / torch.arange(1, value.shape[1] + 1)[:, None]
        return value + torch.tanh(self.mix(past))


def blocks(count: int, seed: int = 0) -> list[nn.Module]:
    """Layers for vectors."""
    torch.manual_seed(seed)
    return [Block().double() for _ in range(count)]


def language_model(num_blocks: int, seed: int = 0) -> list[nn.Module]:
    """Embedding, causal layers, head: token ids to logits."""
    torch.manual_seed(seed)
    body = [CausalMix() if i % 2 else Block() for i in range(num_blocks)]
    layers = [nn.Embedding(VOCAB, WIDTH), *body, nn.Linear(WIDTH, VOCAB)]
    return [layer.double() for layer in layers]


def with_ties(count: int, *ties: Sequence[int]) -> list[nn.Module]:
    """Blocks, of which those of one tie are the same module."""
    layers = blocks(count)
    for first, *others in ties:
        for other in others:
            layers[other] = layers[first]
    return layers


def tied_language_model(num_blocks: int) -> list[nn.Module]:
    """Head and embedding are different modules with one weight; the head has a bias as well."""
    torch.manual_seed(0)
    embedding, head = nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, VOCAB)
    layers = [embedding, *(CausalMix() for _ in range(num_blocks)), head]
    for layer in layers:
        layer.double()
    head.weight = embedding.weight
    return layers


def squared_error(outputs: Tensor, labels: Tensor) -> Tensor:
    """A mean over samples."""
    return ((outputs - labels) ** 2).mean()


class CountedError:
    """A sum of squared errors; each sample counts as one target, as labels alone tell."""

    def __call__(self, outputs: Tensor, labels: Tensor) -> tuple[Tensor, int]:
        return (outputs - labels).square().sum(), self.count_targets(labels)

    def count_targets(self, labels: Tensor) -> int:
        return int((~labels.isnan()).flatten(1).all(1).sum())


def token_sum(logits: Tensor, labels: Tensor) -> tuple[Tensor, int]:
    """Sum over unmasked targets, and their number."""
    total = F.cross_entropy(
        logits.flatten(0, 1), labels.flatten(), ignore_index=NO_TARGET, reduction="sum"
    )
    return total, int((labels != NO_TARGET).sum())


class CountedTokenSum:
    """`token_sum` whose divisor is known before the first backward."""

    def __call__(self, logits: Tensor, labels: Tensor) -> tuple[Tensor, int]:
        return token_sum(logits, labels)

    def count_targets(self, labels: Tensor) -> int:
        return int((labels != NO_TARGET).sum())


def vectors(seed: int, count: int = BATCH) -> list[Sample]:
    """Random vectors with vectors as labels."""
    generator = torch.Generator().manual_seed(seed)
    made = torch.randn(count, 2, WIDTH, generator=generator, dtype=torch.float64)
    return [(inputs, labels) for inputs, labels in made]


def sentences(seed: int, lengths: Sequence[int], masked_share: float = 0.3) -> list[Sample]:
    """Random token ids with token ids as labels, a share of which is masked."""
    generator = torch.Generator().manual_seed(seed)
    made = []
    for length in lengths:
        ids, labels = torch.randint(VOCAB, (2, length), generator=generator)
        masked = torch.rand(length, generator=generator) < masked_share
        made.append((ids, labels.masked_fill(masked, NO_TARGET)))
    return made


def without_targets(samples: Sequence[Sample], which: Sequence[int]) -> list[Sample]:
    """The same samples, some of them masked altogether."""
    return [
        (inputs, torch.full_like(labels, NO_TARGET)) if i in which else (inputs, labels)
        for i, (inputs, labels) in enumerate(samples)
    ]


def ragged_lengths(seed: int, count: int = BATCH, longest: int = 6) -> list[int]:
    """Random lengths of at least 1."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(1, longest + 1, (count,), generator=generator).tolist()


def make_plan(
    groups: Sequence[Sequence[Sequence[int]]],
    num_layers: int,
    *,
    zero_levels: Sequence[int] = (2, 1, 0),
    weights: Sequence[float] = (1, 0, 2.5),
    schedule: str = "1f1b",
    recompute: str = "none",
    cut: Sequence[int] | None = None,
) -> Plan:
    """A plan out of micro-batch sizes. `zero_levels` go round the groups, `weights` round the ranks
    of each group; where all are 0 the last rank gets 1.

    `cut`: first layers of all stages but the first; default: as even as can be.
    """
    bounds = [0, *(cut or _even_cut(num_layers, len(groups))), num_layers]
    first = 0
    data: list[dict[str, Any]] = []
    for index, ranks in enumerate(groups):
        gpus = [
            {
                "rank": first + i,
                "micro_batches": list(sizes),
                "shard_weight": weights[i % len(weights)],
            }
            for i, sizes in enumerate(ranks)
        ]
        if not any(gpu["shard_weight"] for gpu in gpus):
            gpus[-1]["shard_weight"] = 1
        zero_level = zero_levels[index % len(zero_levels)]
        group = {"name": f"g{index}", "gpus": gpus, "zero_level": zero_level}
        data.append({**group, "recompute": recompute})
        first += len(ranks)
    stages = [{"group": f"g{i}", "layers": [bounds[i], bounds[i + 1]]} for i in range(len(groups))]
    size = sum(sum(sizes) for sizes in groups[0])
    return Plan.from_dict(
        {"global_batch_size": size, "schedule": schedule, "groups": data, "stages": stages}
    )


def _even_cut(num_layers: int, parts: int) -> list[int]:
    return [num_layers * i // parts for i in range(1, parts)]


def asymmetric_plans(num_layers: int, **options: Any) -> dict[str, Plan]:
    """One plan of each shape."""
    return {name: make_plan(shape, num_layers, **options) for name, shape in SHAPES.items()}


def plainly(
    job: Job, steps: Sequence[Step], calls: Sequence[Callable[..., Any] | None] | None = None
) -> tuple[PlainModel, PlainOutcome]:
    """The job without a plan; `layers` must be plain modules and functions."""
    model = PlainModel(job.layers, calls)
    outcome = train_plainly(
        model,
        job.loss_fn,
        steps,
        job.make_optimizer,
        job.options,
        job.group_of,
        job.make_scheduler,
    )
    return model, outcome


def assert_exact(job: Job, plan: Plan, steps: Sequence[Step]) -> Outcome:
    """`job` under `plan` equals plain PyTorch after every step."""
    outcome = run(job, plan, steps)
    _, plain = plainly(job, steps)
    trained = [i for i, step in enumerate(steps) if step.trains]
    assert_same(outcome, plain, trained)
    return outcome


def assert_same(outcome: Outcome, plain: PlainOutcome, trained: Sequence[int]) -> None:
    """Losses, norms and values of the steps `trained` are those of `plain`."""
    assert len(trained) == len(plain.values)
    for at, loss, norm, values in zip(
        trained, plain.losses, plain.norms, plain.values, strict=True
    ):
        report = outcome.reports[at]
        assert _close(report.loss, loss), (at, report.loss, loss)
        if report.skipped is None:
            assert _close(report.grad_norm, norm), (at, report.grad_norm, norm)
        assert_values(outcome.values[at], values)


def assert_values(
    found: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float = TOLERANCE
) -> None:
    """The same parameters with the same values."""
    assert sorted(found) == sorted(expected)
    for name, tensor in expected.items():
        error = float((found[name] - tensor).abs().max()) if tensor.numel() else 0.0
        assert error <= tolerance, f"{name} is {error:.1e} off"


def _close(found: float, expected: float) -> bool:
    if math.isnan(expected):
        return math.isnan(found)
    return abs(found - expected) <= TOLERANCE * max(1.0, abs(expected))
