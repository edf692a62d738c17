"""A small tied language model, eight unlike plans, and saving and loading with ranks as threads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tests.inprocess.exact_cases import (
    FOUR_GROUPS,
    SHAPES,
    CountedTokenSum,
    make_plan,
    ragged_lengths,
    sentences,
    tied_language_model,
)
from tests.inprocess.local_job import Hook, Job, Rank, Step
from tests.inprocess.ministage_cases import NUM_LAYERS, ministage_plan
from zorse_ds.core.plan import Plan
from zorse_ds.runtime.checkpoint.capture import capture
from zorse_ds.runtime.checkpoint.holdings import RankState
from zorse_ds.runtime.checkpoint.loading import load_together, open_together
from zorse_ds.runtime.checkpoint.saving import SaveRequest, save
from zorse_ds.runtime.optimizer import ShardedOptimizer

PLANS = {
    "one process": make_plan([[[4, 4, 3]]], NUM_LAYERS, zero_levels=[0]),
    "1-3": make_plan(SHAPES["1-3"], NUM_LAYERS),
    "3-1": make_plan(SHAPES["3-1"], NUM_LAYERS, zero_levels=[0, 2], weights=[0, 3, 1]),
    "2-1-2": make_plan(SHAPES["2-1-2"], NUM_LAYERS, zero_levels=[1, 0], recompute="full"),
    "four groups": make_plan(FOUR_GROUPS, NUM_LAYERS, zero_levels=[2, 1], schedule="gpipe"),
    "abab": ministage_plan("abab", zero_levels=[3]),
    "abaca": ministage_plan("abaca", zero_levels=[3, 1, 2], offload="params"),
    "aaa": ministage_plan("aaa", zero_levels=[3], offload="params+activations"),
}
STEPS = [Step(sentences(seed, ragged_lengths(seed)), clip=0.5) for seed in range(6)]
SAVED_AT = 3
FROZEN = "3."
"""What the names of parameters that are not trained begin with."""


def adam(groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    """Moments and counts of steps; an eps that keeps rounding of tiny gradients small."""
    return torch.optim.AdamW(groups, lr=0.02, eps=1e-2)


def layers(dtype: torch.dtype = torch.float32) -> list[nn.Module]:
    """Embedding, causal layers with a buffer, head tied to the embedding."""
    made = tied_language_model(NUM_LAYERS - 2)
    return [layer.to(dtype) for layer in made]


def group_of(name: str) -> int | None:
    """Biases in a group of their own; one layer frozen."""
    return None if name.startswith(FROZEN) else int(name.endswith("bias"))


def job(**options: Any) -> Job:
    """Two param groups, a tie, a frozen layer."""
    base = Job(
        layers(),
        CountedTokenSum(),
        adam,
        options=({"weight_decay": 0.1}, {"weight_decay": 0.0, "lr": 0.01}),
        group_of=group_of,
    )
    return replace(base, **options)


def state_of(rank: Rank, optimizer: ShardedOptimizer) -> RankState:
    """What checkpoints ask of a rank."""
    return RankState(rank.rank, rank.plan, rank.ties, rank.models, optimizer)


def request_of(plan: Plan, root: Path, **options: Any) -> SaveRequest:
    """A request with as little beside the tensors as can be."""
    return SaveRequest(
        root, plan=plan.to_dict(), versions={}, **{"tag": "t", "state": {}} | options
    )


def saving(root: Path, *, with_frozen: bool = True, **options: Any) -> Hook:
    """Save at the end."""

    def hook(rank: Rank, optimizer: ShardedOptimizer) -> None:
        taken = capture(state_of(rank, optimizer), with_frozen=with_frozen)
        save(request_of(rank.plan, root, **options), taken, rank.world.exchange(rank.rank))

    return hook


def loading(root: Path, **options: Any) -> Hook:
    """Load at the start."""

    def hook(rank: Rank, optimizer: ShardedOptimizer) -> None:
        exchange = rank.world.exchange(rank.rank)
        reader = open_together(root, None, exchange)
        assert reader is not None
        load_together(reader, state_of(rank, optimizer), exchange, **options)

    return hook


def differ(found: Sequence[float], expected: Sequence[float]) -> float:
    """The largest deviation."""
    return max(abs(a - b) for a, b in zip(found, expected, strict=True))
