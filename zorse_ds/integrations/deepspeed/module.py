"""`ZorsePipelineModule`: DeepSpeed's `PipelineModule` for a ragged plan."""

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol
from unittest import mock

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.pipe import module as deepspeed_module
from deepspeed.runtime.pipe.module import PipelineModule
from torch import nn

from zorse_ds.core.plan import Plan
from zorse_ds.core.recompute import Recomputed
from zorse_ds.errors import ConfigError, ModelError, PlanError
from zorse_ds.integrations.deepspeed.agreement import agree_on_model, together
from zorse_ds.integrations.deepspeed.config import settled_plan
from zorse_ds.integrations.deepspeed.data import CollateFn
from zorse_ds.integrations.deepspeed.layers import Layer, LayerListStages
from zorse_ds.integrations.deepspeed.roll_call import call_roll
from zorse_ds.integrations.deepspeed.topology import ZorseGrid, ZorseTopology
from zorse_ds.ranges import Range
from zorse_ds.runtime.losses import LossFn
from zorse_ds.schedule.residency import GATHERED_LEVEL
from zorse_ds.schedule.trace import Tie, ties_between_stages

_ALONE = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
"""Of a process that no launcher started."""
_LAUNCHED = (
    *(*_ALONE, "OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "PMIX_RANK"),
    *("AZUREML_EXPERIMENT_ID", "SM_TRAINING_ENV"),
)
"""Who has one of these was started by somebody, whom DeepSpeed knows to ask."""


class StageSource(Protocol):
    """Where the models of stages come from."""

    @property
    def tied_layers(self) -> Sequence[Sequence[int]]:
        """For each set of shared parameters, the pipeline layers that use them."""

    @property
    def layer_names(self) -> Sequence[str]:
        """One name a pipeline layer."""

    @property
    def fingerprint(self) -> str:
        """What tells the weights from others; empty where the first rank's are taken anyway."""

    def build(
        self, layers: Range, *, recomputed: Recomputed, owns: Callable[[int], bool]
    ) -> nn.Module:
        """A `StageModel` of a range of pipeline layers; `owns(tie)`: it is a tie's first stage.

        `recomputed`: what is made anew in backward.
        """


class ZorsePipelineModule(PipelineModule):
    """The layers of a model, of which this rank builds the stages that the plan gives it.

    `layers` is what `PipelineModule` takes: `LayerSpec`, `TiedLayerSpec`, modules, functions.
    `loss_fn(outputs, labels)` returns `(loss_sum, num_targets)` or a scalar mean over the samples
    of a micro-batch. `plan` may be left out when `config`, the DeepSpeed JSON, names one. Dim 0 of
    what layers exchange is the sample axis. Initial weights do not depend on the plan (`base_seed`
    + layer index). Raises `PlanError` when the plan is for another world or number of layers,
    `WorldError` when ranks have unlike plans or models. Collective: every rank constructs it.
    """

    engine_class: type | None = None
    """What DeepSpeed makes of it, with the seam of `patches/`; set by the engine's module."""

    def __init__(
        self,
        layers: Sequence[Layer] | None = None,
        plan: Plan | None = None,
        loss_fn: LossFn | None = None,
        *,
        config: str | Path | dict[str, Any] | None = None,
        base_seed: int = 1234,
        source: StageSource | None = None,
        collate_fn: CollateFn | None = None,
    ) -> None:
        plan = settled_plan(plan, config)
        if plan is None:
            raise PlanError(
                "ZorsePipelineModule was given no plan; expected plan=Plan.load(path), or a config "
                "with zorse.plan (of which 'auto' is for Hugging Face models)"
            )
        init_distributed()
        with together("reading the layers"):
            stages = source or LayerListStages(list(layers or ()), base_seed)
        agree_on_model(plan, stages.layer_names, stages.fingerprint)
        check_plan(plan, len(stages.layer_names), dist.get_world_size())
        self.__dict__.update(plan=plan, source=stages, collate_fn=collate_fn)
        self.ties: tuple[Tie, ...] = ties_between_stages(plan, stages.tied_layers)
        specs = list(layers or stages.layer_names)
        with _ragged_grid():
            super().__init__(
                specs, topology=ZorseTopology(plan), loss_fn=loss_fn, base_seed=base_seed
            )

    @property
    def stage_models(self) -> dict[int, Any]:
        """This rank's stages → their models."""
        return {int(stage): model for stage, model in self.stages.items()}

    def forward(self, value: Any) -> Any:
        """Run this rank's stages one after the other."""
        for model in self.stages.values():
            value = model(value)
        return value

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """This rank's parameters; `ModelError` where they are not whole, see `engine.whole`."""
        for stage, model in self.stage_models.items():
            level = self.plan.group_of_stage(stage).zero_level
            if level == GATHERED_LEVEL and not any(p.numel() for p in model.parameters()):
                raise ModelError(
                    f"state_dict was called while the parameters of stage {stage} are in shards "
                    f"(zero_level {level}); expected engine.save_pretrained(folder) or "
                    f"save_checkpoint(folder), or `with engine.whole({stage}):` around it"
                )
        own: dict[str, Any] = super().state_dict(*args, **kwargs)
        return own

    def stage_owner(self, layer_idx: int) -> int:
        """Index of the stage that holds a pipeline layer."""
        return int(self.plan.stage_of_layer(layer_idx))

    def _partition_layers(self, method: str = "plan") -> None:
        self.parts = [0, *(stage.layers.stop for stage in self.plan.stages)]
        own = [self.plan.stages[i].layers for i in self.plan.stages_of_rank(self.global_rank)]
        self._set_bounds(own[0].start, own[-1].stop)

    def _build(self) -> None:
        with together("building the stages"):
            self._build_stages()

    def _build_stages(self) -> None:
        owners = {tie.index: tie.owner for tie in self.ties}
        self.stages = nn.ModuleDict()
        for stage in self.plan.stages_of_rank(self.global_rank):
            recomputed = self.plan.recomputed(stage)

            def owns(tie: int, stage: int = stage) -> bool:
                return owners.get(tie, stage) == stage

            model = self.source.build(
                self.plan.stages[stage].layers, recomputed=recomputed, owns=owns
            )
            self.stages[str(stage)] = model
            self.forward_funcs.append(model)

    def _index_tied_modules(self) -> dict[str, Any]:
        return {}

    def _synchronize_tied_weights(self) -> None:
        """The engine makes copies equal when it builds the optimizer."""


@contextmanager
def _ragged_grid() -> Iterator[None]:
    """While the base class is constructed, it makes our grid instead of a rectangular one."""
    with mock.patch.object(deepspeed_module, "PipelineParallelGrid", ZorseGrid):
        yield


def check_plan(plan: Plan, num_layers: int, world_size: int) -> None:
    """Refuse a plan for another model or world. Raises `PlanError` with one sentence each."""
    problems = []
    if plan.num_layers != num_layers:
        problems.append(
            f"stages of the plan cover {plan.num_layers} pipeline layers, but the model has "
            f"{num_layers}; expected stages[{len(plan.stages) - 1}].layers to end at {num_layers}"
        )
    if plan.world_size != world_size:
        problems.append(
            f"the plan names {plan.world_size} ranks, but {world_size} were started; expected "
            f"{plan.world_size} processes, as `deepspeed --num_gpus {plan.world_size}` starts them"
        )
    if problems:
        raise PlanError(problems)


def init_distributed() -> None:
    """Start `torch.distributed` if nobody has, from the launcher's environment, or alone.

    Raises `ConfigError` where a part of that environment is missing, `WorldError` on all processes
    where a rank was started twice or not at all.

    On CPU, DeepSpeed would first compile an operator that this engine does not use and that leaves
    66 MiB of shared memory behind on every rank; it is switched off.
    """
    if dist.is_initialized() and deepspeed.comm.is_initialized():
        return
    if get_accelerator().device_name() == "cpu":
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    if not any(name in os.environ for name in _LAUNCHED):
        os.environ.update(_ALONE)
    os.environ.setdefault("LOCAL_RANK", os.environ.get("RANK", "0"))
    store = None if dist.is_initialized() else call_roll()
    try:
        deepspeed.init_distributed(dist_backend=get_accelerator().communication_backend_name())
    except ModuleNotFoundError as problem:  # DeepSpeed asks MPI for what is missing
        missing = [name for name in _ALONE if name not in os.environ]
        raise ConfigError(
            f"the environment lacks {', '.join(missing)}, and there is no {problem.name} to ask "
            "MPI for them; expected a process that deepspeed or torchrun starts, or none of these"
        ) from problem
    del store


def device_of_rank() -> torch.device:
    """The accelerator of this process."""
    accelerator = get_accelerator()
    return torch.device(accelerator.device_name(int(os.environ.get("LOCAL_RANK", "0"))))
