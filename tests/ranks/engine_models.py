"""Small layers, losses, samples and plans for the engine's tests."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WIDTH = 6
VOCABULARY = 11
Sample = tuple[Any, Any]


class Block(nn.Module):
    """A residual block, so that depth does not make gradients vanish."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.inner = nn.Linear(width, width)
        self.outer = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.outer(torch.tanh(self.inner(x)))


class FrozenBlock(Block):
    """A block that does not train."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__(width)
        self.requires_grad_(False)


class CausalBlock(Block):
    """A block that mixes positions (dim 1), each with those before it: padding must not leak."""

    def forward(self, x: Tensor) -> Tensor:
        positions = torch.arange(1, x.shape[1] + 1, dtype=x.dtype).view(1, -1, 1)
        return super().forward(x.cumsum(1) / positions)


class TokenLoss:
    """Cross entropy summed over targets, with a count that labels alone give."""

    def __call__(self, logits: Tensor, labels: Tensor) -> tuple[Tensor, int]:
        return sum_and_count(logits, labels)

    def count_targets(self, labels: Tensor) -> int:
        return int((labels != -100).sum())


class CountedError:
    """A sum of squared errors, one target a sample."""

    def __call__(self, outputs: Tensor, labels: Tensor) -> tuple[Tensor, int]:
        return (outputs - labels).square().sum(), self.count_targets(labels)

    def count_targets(self, labels: Tensor) -> int:
        return len(labels)


def sum_and_count(logits: Tensor, labels: Tensor) -> tuple[Tensor, int]:
    """Cross entropy summed over targets, and their number."""
    loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
    return loss, int((labels != -100).sum())


def mean_of_sample(outputs: Tensor, labels: Tensor) -> tuple[Tensor, int]:
    """What `nn.MSELoss` means for one sample: one mean, counted once."""
    return F.mse_loss(outputs, labels), 1


def mlp(num_layers: int = 6) -> list[nn.Module]:
    """The same modules in every process."""
    torch.manual_seed(7)
    return [nn.Linear(WIDTH, WIDTH), *(Block() for _ in range(num_layers - 1))]


def token_model(num_blocks: int = 4) -> list[nn.Module]:
    """Token ids `[N, S]` → logits `[N, S, VOCABULARY]`."""
    torch.manual_seed(8)
    blocks = [CausalBlock() for _ in range(num_blocks)]
    return [nn.Embedding(VOCABULARY, WIDTH), *blocks, nn.Linear(WIDTH, VOCABULARY)]


def vectors(count: int, seed: int = 3) -> list[Sample]:
    """Samples `(inputs, labels)` for `mlp`."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(count, 2, WIDTH, generator=generator)
    return [(value[0], value[1]) for value in values]


def sentences(lengths: Sequence[int], seed: int = 4, masked: Sequence[int] = ()) -> list[Sample]:
    """Samples of token ids and shifted labels; some labels masked, all of them for `masked`."""
    generator = torch.Generator().manual_seed(seed)
    samples = []
    for index, length in enumerate(lengths):
        tokens = torch.randint(VOCABULARY, (length + 1,), generator=generator)
        labels = tokens[1:].clone()
        labels[torch.rand(length, generator=generator) < 0.4] = -100
        if index in masked:
            labels[:] = -100
        samples.append((tokens[:-1], labels))
    return samples


def pad_batch(samples: list[Sample]) -> tuple[Tensor, Tensor]:
    """Pad to the longest of a micro-batch, masked where there is padding."""
    inputs, labels = zip(*samples, strict=True)
    pad = nn.utils.rnn.pad_sequence
    return pad(inputs, batch_first=True), pad(labels, batch_first=True, padding_value=-100)


def plan_of(
    groups: Sequence[Sequence[Sequence[int]]],
    cuts: Sequence[int],
    *,
    zero: Sequence[int] = (),
    weights: Sequence[float] = (),
    **options: Any,
) -> dict[str, Any]:
    """A plan with one stage a group. `groups[g][i]`: micro-batches of the i-th rank of group g."""
    rank = 0
    made = []
    for index, sizes in enumerate(groups):
        gpus = []
        for micro_batches in sizes:
            weight = weights[rank] if weights else 1.0
            gpus.append(
                {"rank": rank, "micro_batches": list(micro_batches), "shard_weight": weight}
            )
            rank += 1
        level = zero[index] if zero else 0
        made.append({"name": f"g{index}", "zero_level": level, "gpus": gpus})
    stages = [
        {"group": f"g{i}", "layers": [cuts[i], cuts[i + 1]]} | options for i in range(len(groups))
    ]
    batch = sum(sum(micro_batches) for micro_batches in groups[0])
    return {"version": 1, "global_batch_size": batch, "groups": made, "stages": stages}


def batches_of(samples: Sequence[Sample], sizes: Sequence[int]) -> list[list[Sample]]:
    """Global batches of these sizes, one behind the other."""
    starts = [sum(sizes[:i]) for i in range(len(sizes))]
    return [list(samples[start : start + size]) for start, size in zip(starts, sizes, strict=True)]


def lengths_of(count: int, seed: int = 5) -> list[int]:
    """Sequence lengths from 1 to 9."""
    rng = random.Random(seed)
    return [rng.randint(1, 9) for _ in range(count)]
