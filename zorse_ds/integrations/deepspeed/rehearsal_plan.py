"""Rehearsing a plan: a miniature of its model, trained by the real engine on virtual GPUs."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from deepspeed.pipe import LayerSpec
from torch.utils.checkpoint import set_checkpoint_early_stop

from zorse_ds.core.plan import Plan
from zorse_ds.core.shards import LEAST_LOT
from zorse_ds.cost.dtypes import DTYPE_BYTES, dtype_of
from zorse_ds.cost.setting import Setting
from zorse_ds.errors import RehearsalError
from zorse_ds.integrations.deepspeed.initialize import initialize
from zorse_ds.integrations.deepspeed.layers import LayerListStage, LayerListStages
from zorse_ds.integrations.deepspeed.module import ZorsePipelineModule, init_distributed
from zorse_ds.integrations.deepspeed.rehearsal import attach
from zorse_ds.rehearsal.clock import Pace
from zorse_ds.rehearsal.figures import StepFigures
from zorse_ds.rehearsal.gpu import VirtualGpu
from zorse_ds.rehearsal.miniature import Miniature
from zorse_ds.rehearsal.slowdowns import Slowdown, factor_at
from zorse_ds.runtime import assembly

SEED = 1234


@dataclass(frozen=True, slots=True)
class PlanRun:
    """What a rehearsal does."""

    plan: Plan
    setting: Setting
    pace: Pace
    num_steps: int
    optimizer_step: str = "delayed"
    slowdowns: tuple[Slowdown, ...] = ()
    adapts: bool = False
    """Micro-batches move to the ranks that are quicker, as `zorse.adapt_shares` says."""


@dataclass(frozen=True, slots=True)
class RankRun:
    """What it was on one rank."""

    steps: tuple[StepFigures, ...]
    losses: tuple[float, ...]
    counts: tuple[tuple[int, ...], ...]
    """For each step the number of micro-batches of every rank."""


def check_rehearsable(plan: Plan, setting: Setting) -> None:
    """Raises `RehearsalError` for what virtual GPUs do not know."""
    for group in plan.groups:
        if group.offload != "none":
            raise RehearsalError(
                f"group {group.name!r} has offload {group.offload!r}, which virtual GPUs do not "
                "have; expected 'none'"
            )
    if setting.model.tied:
        raise RehearsalError(
            f"model {setting.model.name!r} ties its head to its embedding, which a miniature does "
            "not; expected a shape without `tied`, or a folder with a copy of config.json in which "
            "tie_word_embeddings is false: all but the sum of the two gradients is then the same"
        )


def rehearse_rank(run: PlanRun, rank: int, tell: Callable[[Any], None]) -> RankRun:
    """Train some steps on one rank. Collective: every rank of the plan."""
    torch.set_num_threads(1)
    init_distributed()
    dtype = dtype_of(run.plan.group_of_rank(rank), run.setting)
    gpu = VirtualGpu(run.setting, rank, dtype, run.pace)
    lot = max(1, round(LEAST_LOT / gpu.miniature.ratio))
    with gpu.building(), mock.patch.object(assembly, "LEAST_LOT", lot):
        engine = make_engine(run, gpu.miniature)
        attach(engine, gpu)
    steps: list[StepFigures] = []
    losses: list[float] = []
    counts: list[tuple[int, ...]] = []
    for step in range(run.num_steps):
        gpu.slowness = factor_at(run.slowdowns, rank, step + 1)
        counts.append(_counts(engine.parts.traces.plan))
        steps.append(gpu.step(lambda: losses.append(float(engine.train_batch()))))
        tell(step + 1)
    return RankRun(tuple(steps), tuple(losses), tuple(counts))


def _counts(plan: Plan) -> tuple[int, ...]:
    shares = {gpu.rank: gpu for group in plan.groups for gpu in group.gpus}
    return tuple(len(shares[rank].micro_batches) for rank in range(plan.world_size))


def make_engine(run: PlanRun, mini: Miniature) -> Any:
    """The engine of a rank, on the miniature; no virtual GPU is under it yet."""
    plan, dtypes = _in_stored_dtypes(run.plan, run.setting)
    layers = _specs(run, mini)
    module = ZorsePipelineModule(
        plan=plan,
        source=MiniStages(layers, SEED, run.setting.recomputes),
        loss_fn=mini.loss(dtype_of(run.plan.group_of_stage(len(plan.stages) - 1), run.setting)),
    )
    config = {
        "gradient_clipping": 0.0,
        "steps_per_print": 10**9,
        "bf16": {"enabled": "bfloat16" in dtypes},
        "zorse": {
            "optimizer_step": run.optimizer_step,
            "data": {"shuffle": False},
            "adapt_shares": run.adapts,
        },
    }
    data = mini.samples(2 * plan.global_batch_size)
    return initialize(model=module, config=config, optimizer=optimizer, training_data=data)[0]


def optimizer(groups: Any) -> torch.optim.Optimizer:
    """Fused: it makes no temporaries, as on a GPU."""
    return torch.optim.AdamW(groups, lr=1e-3, fused=True)


def _in_stored_dtypes(plan: Plan, setting: Setting) -> tuple[Plan, set[str]]:
    """The plan with dtypes that a CPU computes in: one of 16 bits stands for both."""
    groups, dtypes = [], set()
    for group in plan.groups:
        small = DTYPE_BYTES[dtype_of(group, setting)] == DTYPE_BYTES["bfloat16"]
        dtypes.add("bfloat16" if small else "float32")
        groups.append(group.model_copy(update={"dtype": "bfloat16" if small else "float32"}))
    return plan.model_copy(update={"groups": tuple(groups)}), dtypes


def _specs(run: PlanRun, mini: Miniature) -> list[LayerSpec]:
    specs: list[LayerSpec] = []
    for stage in run.plan.stages:
        layers = mini.layers(dtype_of(run.plan.group_named(stage.group), run.setting))
        specs += [LayerSpec(kind, *made) for kind, made in layers[stage.layers.as_slice()]]
    return specs


class MiniStages(LayerListStages):
    """Stages of a miniature."""

    def make_stage(self, *parts: Any) -> LayerListStage:
        """See `LayerListStages.make_stage`."""
        return MiniStage(*parts)


class MiniStage(LayerListStage):
    """Layers that recompute would stop early would not take their time."""

    def forward(self, value: Any) -> Any:
        """See `LayerListStage.forward`."""
        with set_checkpoint_early_stop(False):
            return super().forward(value)
