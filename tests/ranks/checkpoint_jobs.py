"""Engines that save, load and go on, over real processes."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from deepspeed.pipe import LayerSpec
from torch import Tensor, nn

import zorse_ds
from tests.ranks.engine_models import WIDTH, Block, Sample, plan_of, vectors
from zorse_ds import Plan, ZorseEngine, ZorsePipelineModule

SIZE = 7
NUM_SAMPLES = 24
"""No multiple of the batch: epochs end in short batches of 3."""
PLANS: dict[str, dict[str, Any]] = {
    "3 ranks": plan_of([[[3, 1], [2, 1]], [[2, 5]]], [0, 3, 6], zero=[2, 1], weights=[1, 2, 1]),
    "3 other ranks": plan_of([[[7]], [[4], [1, 2]]], [0, 1, 6], zero=[0, 2], weights=[1, 0, 3]),
    "2 ranks": plan_of(
        [
            [
                [2, 2, 3],
            ],
            [[7]],
        ],
        [0, 4, 6],
        zero=[1, 0],
    ),
    "1 rank": plan_of([[[4, 3]]], [0, 6]),
}
MINISTAGES = {
    "global_batch_size": SIZE,
    "schedule": "ministage",
    "groups": [
        {
            "name": "a",
            "zero_level": 3,
            "gpus": [
                {"rank": 0, "micro_batches": [2, 2], "shard_weight": 2},
                {"rank": 1, "micro_batches": [3]},
            ],
        },
        {"name": "b", "zero_level": 3, "gpus": [{"rank": 2, "micro_batches": [3, 4]}]},
    ],
    "stages": [
        {"group": group, "layers": layers}
        for group, layers in zip("abab", [[0, 1], [1, 3], [3, 5], [5, 6]], strict=True)
    ],
}
PLANS["ministages"] = MINISTAGES
CONFIG: dict[str, Any] = {
    "optimizer": {"type": "AdamW", "params": {"lr": 0.01, "eps": 1e-3, "torch_adam": True}},
    "scheduler": {
        "type": "WarmupDecayLR",
        "params": {"warmup_num_steps": 4, "total_num_steps": 12, "warmup_max_lr": 0.02},
    },
    "gradient_clipping": 0.5,
    "steps_per_print": None,
}


class Numbered(list[Sample]):
    """Samples that note which of them were read."""

    def __init__(self, count: int = NUM_SAMPLES) -> None:
        super().__init__(vectors(count))
        self.read: list[int] = []

    def __getitem__(self, index: int) -> Sample:  # type: ignore[override]
        self.read.append(index)
        return super().__getitem__(index)


def world_size(name: str) -> int:
    return Plan.from_dict(PLANS[name]).world_size


def job_layers() -> list[LayerSpec]:
    """The layers of all jobs."""
    return [LayerSpec(nn.Linear, WIDTH, WIDTH), *(LayerSpec(Block) for _ in range(5))]


def make_engine(name: str, dataset: Any = None, **config: Any) -> ZorseEngine:
    """Collective: the engine of a plan."""
    model = ZorsePipelineModule(job_layers(), Plan.from_dict(PLANS[name]), loss_fn=nn.MSELoss())
    engine, *_ = zorse_ds.initialize(
        model=model,
        config=CONFIG | config,
        training_data=Numbered() if dataset is None else dataset,
    )
    return engine


@dataclass
class Trail:
    """What a rank saw of some steps."""

    losses: list[float] = field(default_factory=list)
    rates: list[float] = field(default_factory=list)
    read: list[list[int]] = field(default_factory=list)
    """Ids that this rank read, step by step."""
    counters: tuple[int, ...] = ()
    random: tuple[float, ...] = ()
    """The next random number of each generator."""
    scale: float = 1.0
    client: Any = None
    path: str | None = None


def train(engine: ZorseEngine, num_steps: int) -> Trail:
    """Collective: some steps."""
    trail, dataset = Trail(), engine.training_dataloader.dataset
    for _ in range(num_steps):
        dataset.read.clear()
        trail.losses.append(float(engine.train_batch()))
        trail.rates.append(engine.optimizer.param_groups[0]["lr"])
        trail.read.append(list(dataset.read))
    trail.counters = (engine.global_steps, engine.global_samples, engine.skipped_steps)
    trail.scale = engine.optimizer.cur_scale
    return trail


def draw() -> tuple[float, ...]:
    """A random number of each generator."""
    return (random.random(), float(np.random.rand()), float(torch.rand(())))


def seed_all(rank: int) -> None:
    """Each rank its own random numbers."""
    random.seed(rank)
    np.random.seed(rank)
    torch.manual_seed(rank)


def client_state() -> dict[str, Any]:
    """Plain data and tensors of all sorts."""
    return {
        "best": 0.25,
        "names": ["a", ("b", 2)],
        7: None,
        "ema": {"weight": torch.arange(6.0).view(2, 3), "step": torch.tensor(4)},
    }


def whole_run(
    rank: int, name: str, root: Path, saved_at: int, num_steps: int, **config: Any
) -> tuple[Trail, tuple[float, ...]]:
    """Never interrupted; saves once on its way. Also the random numbers drawn after that."""
    engine = make_engine(name, **config)
    first = train(engine, saved_at)
    seed_all(rank)
    draw()
    assert engine.save_checkpoint(str(root), client_state=client_state())
    drawn = draw()
    trail = train(engine, num_steps - saved_at)
    for field_name in ("losses", "rates", "read"):
        setattr(trail, field_name, getattr(first, field_name) + getattr(trail, field_name))
    engine.destroy()
    return trail, drawn


def next_parts(rank: int, name: str, roots: Sequence[Path], num_steps: int) -> list[Trail]:
    """One resumed run for each folder."""
    return [next_part(rank, name, root, num_steps) for root in roots]


def next_part(
    rank: int, name: str, root: Path, num_steps: int, config: Any = None, **options: Any
) -> Trail:
    """Load and go on."""
    engine = make_engine(name, **(config or {}))
    path, client = engine.load_checkpoint(str(root), **options)
    drawn = draw()
    trail = train(engine, num_steps)
    trail.client, trail.path, trail.random = client, path, drawn
    engine.destroy()
    return trail


def ids_of(trails: Sequence[Trail], name: str) -> list[list[int]]:
    """The ids of each global batch, sorted: what the first stage's ranks read between them."""
    plan = Plan.from_dict(PLANS[name])
    ranks = plan.group_of_stage(0).ranks
    steps = range(len(trails[0].read))
    return [sorted({i for rank in ranks for i in trails[rank].read[step]}) for step in steps]


def same(a: Any, b: Any) -> bool:
    """Equal, tensors included."""
    if isinstance(a, Tensor):
        return isinstance(b, Tensor) and a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    return type(a) is type(b) and a == b
