"""`from_pretrained`, `from_config`: Hugging Face models as `ZorsePipelineModule`s, and back."""

import hashlib
from collections.abc import Callable, Iterator, Mapping
from collections.abc import Set as AbstractSet
from contextlib import AbstractContextManager, contextmanager
from functools import reduce
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from transformers import PretrainedConfig
from transformers.utils import logging

from zorse_ds.core.plan import Plan
from zorse_ds.core.recompute import Recomputed
from zorse_ds.errors import ConfigError, ModelError, PlanError
from zorse_ds.integrations.deepspeed.agreement import together
from zorse_ds.integrations.deepspeed.auto_plan import auto_plan, wants_auto
from zorse_ds.integrations.deepspeed.config import (
    check_config,
    load_config,
    settings_of,
    settled_plan,
)
from zorse_ds.integrations.deepspeed.module import ZorsePipelineModule, init_distributed
from zorse_ds.integrations.huggingface.adapter_saving import (
    join_adapter_parts,
    write_adapter_config,
    write_adapter_part,
)
from zorse_ds.integrations.huggingface.adapters import Adapters, AdapterSource
from zorse_ds.integrations.huggingface.collate import collate_for
from zorse_ds.integrations.huggingface.loss import CausalLMLoss
from zorse_ds.integrations.huggingface.saving import (
    copy_other_files,
    weights_file_name,
    write_config,
    write_index_and_config,
)
from zorse_ds.integrations.huggingface.shape import model_shape
from zorse_ds.integrations.huggingface.stage import CausalLMStage
from zorse_ds.integrations.huggingface.stage_weights import write_stage_weights
from zorse_ds.integrations.huggingface.stages import CausalLMStages
from zorse_ds.integrations.huggingface.target import SaveTarget
from zorse_ds.integrations.huggingface.weight_files import fingerprint_of
from zorse_ds.ranges import Range
from zorse_ds.runtime.dist_world import DistWorld


def from_pretrained(
    folder: str | Path,
    plan: Plan | None = None,
    *,
    config: str | Path | dict[str, Any] | None = None,
    dtype: torch.dtype = torch.float32,
    attn_implementation: str | None = None,
    adapters: AdapterSource | None = None,
    seed: int = 1234,
) -> ZorsePipelineModule:
    """The causal language model in `folder`, of which each rank loads its own stages alone.

    Pipeline layers are the embedding (0), each decoder block, and final norm with head. `plan` may
    be left out when `config`, the DeepSpeed JSON, names one; with `config` its contradictions to
    the plan are found before any weight is read. Weights are held in `dtype`; the engine casts
    them if the config enables bf16 or fp16 and keeps masters in full precision. With `adapters`
    (or `zorse.adapters` in `config`), a LoRA configuration as `read_adapters` takes it, they alone
    are trained; their first values depend on `seed` and not on the plan. Raises `ModelError`,
    `PlanError` or `ConfigError`. Collective: every rank calls it.
    """
    lora = _adapters_of(adapters, config)

    def read() -> CausalLMStages:
        return CausalLMStages.from_folder(
            folder,
            dtype=dtype,
            attn_implementation=attn_implementation,
            adapters=lora,
            seed=seed,
        )

    return _module_of(read, plan, config, lora, "from_pretrained")


def from_config(
    hf_config: PretrainedConfig,
    plan: Plan | None = None,
    *,
    config: str | Path | dict[str, Any] | None = None,
    seed: int = 1234,
    dtype: torch.dtype = torch.float32,
    attn_implementation: str | None = None,
    adapters: AdapterSource | None = None,
) -> ZorsePipelineModule:
    """The causal language model of a transformers configuration, with random weights.

    For training from the beginning: weights are drawn as the model's own initialisation does, and
    depend on `seed` alone, not on the plan. All else is as in `from_pretrained`; `save_pretrained`
    of the engine writes a folder without a tokenizer. Collective: every rank calls it.
    """
    lora = _adapters_of(adapters, config)

    def read() -> CausalLMStages:
        return CausalLMStages.from_config(
            hf_config,
            dtype=dtype,
            seed=seed,
            attn_implementation=attn_implementation,
            adapters=lora,
        )

    return _module_of(read, plan, config, lora, "from_config")


def _adapters_of(
    adapters: AdapterSource | None, config: str | Path | dict[str, Any] | None
) -> AdapterSource | None:
    """The LoRA configuration given here or in the DeepSpeed JSON. Raises `ConfigError` for two."""
    named = None if config is None else settings_of(load_config(config)).adapters
    if adapters is not None and named is not None:
        raise ConfigError("adapters are given twice, here and as zorse.adapters; expected one")
    return named if adapters is None else adapters


def _module_of(
    read: Callable[[], CausalLMStages],
    plan: Plan | None,
    config: str | Path | dict[str, Any] | None,
    lora: AdapterSource | None,
    caller: str,
) -> ZorsePipelineModule:
    """The module of the stages that `read` gives. Collective."""
    settings = None if config is None else load_config(config)
    plan = settled_plan(plan, config)
    if plan is None and not wants_auto(settings):
        raise PlanError(
            f"{caller} was given no plan; expected plan=Plan.load(path), or a config with "
            "zorse.plan"
        )
    if settings is not None and plan is not None:
        check_config(settings, plan)
    init_distributed()
    with together("reading the model"):
        stages = read()
    if plan is None:
        assert settings is not None
        plan = auto_plan(settings, lambda: model_shape(stages.folder or stages.config, lora))
        check_config(settings, plan)
    return ZorsePipelineModule(
        plan=plan,
        loss_fn=CausalLMLoss(stages.structure.router_loss),
        source=PretrainedStages(stages),
        collate_fn=collate_for(stages.structure),
    )


class PretrainedStages:
    """`CausalLMStages` as the source of a pipeline module's stages. See `StageSource`."""

    def __init__(self, stages: CausalLMStages) -> None:
        self._stages = stages
        self.tied_layers = stages.tied_layers
        self.layer_names = stages.layer_names

    @property
    def fingerprint(self) -> str:
        """See `StageSource.fingerprint`: of the files, or of configuration and seed."""
        stages = self._stages
        if stages.folder is not None:
            return f"{fingerprint_of(stages.folder)} {stages.adapters}"
        facts = f"{stages.config.to_json_string(use_diff=False)} {stages.seed} {stages.dtype}"
        facts += str(stages.adapters)
        return hashlib.sha256(facts.encode()).hexdigest()

    def build(
        self, layers: Range, *, recomputed: Recomputed, owns: Callable[[int], bool]
    ) -> CausalLMStage:
        """See `StageSource.build`; every stage holds its own copy of tied weights."""
        if recomputed.every > 1:
            raise ModelError(
                f"recompute_every is {recomputed.every}, but a Hugging Face model's own forward "
                "runs block by block; expected 1"
            )
        with _one_progress_bar():
            return self._stages.build(layers.start, layers.stop, recomputed=recomputed.layers)

    def write_model_files(self, folder: Path) -> None:
        """Configuration and tokenizer, so that a checkpoint can be exported without the source."""
        stages = self._stages
        write_config(stages.folder or stages.config, folder, dtype=stages.dtype)
        if stages.adapters is not None:
            write_adapter_config(stages.adapters, folder, stages.folder)

    def save_pretrained(
        self,
        folder: str | Path,
        plan: Plan,
        models: Mapping[int, CausalLMStage],
        world: DistWorld,
        whole: Callable[[int], AbstractContextManager[None]],
        *,
        merge_adapters: bool = False,
    ) -> None:
        """Write weights, index, config and tokenizer so that transformers loads them.

        A model with adapters gives these alone, so that `PeftModel.from_pretrained` loads them over
        the base, or with `merge_adapters` a model with them in its weights.

        The first rank of each group writes its stages, one after the other; `whole(stage)` makes a
        stage's parameters whole meanwhile. All is written into a hidden folder inside `folder` and
        moved in at the end, the index last. Raises `ModelError` on all ranks when one cannot write.
        Collective: every rank; `folder` must be seen by all of them.
        """
        target = SaveTarget(folder, world)
        adapters = self._stages.adapters
        if adapters is not None and not merge_adapters:
            self._save_adapters(adapters, target, plan, models, world, whole)
            return
        weight_map: dict[str, tuple[str, int]] = {}
        writes = world.rank == plan.group_of_rank(world.rank).ranks[0]
        for stage, model in models.items():
            name = weights_file_name(stage, len(plan.stages))
            owns_tied = stage == 0 or not self.tied_layers
            # Making parameters whole takes all ranks of the group, so a failure waits for the end.
            with whole(stage), target.attempt():
                if writes:
                    weight_map |= write_stage_weights(
                        model, target.unfinished, name, owns_tied=owns_tied
                    )
        maps = target.agree(weight_map)
        dtypes = target.agree([p.dtype for model in models.values() for p in model.parameters()])
        with target.attempt():
            if world.rank == 0:
                merged = {key: at for own in maps for key, at in own.items()}
                self._finish(target, merged, {dtype for own in dtypes for dtype in own})
        target.agree(None)

    def _save_adapters(
        self,
        adapters: Adapters,
        target: SaveTarget,
        plan: Plan,
        models: Mapping[int, CausalLMStage],
        world: DistWorld,
        whole: Callable[[int], AbstractContextManager[None]],
    ) -> None:
        """The adapters of all stages as one, with the tokenizer."""
        writes = world.rank == plan.group_of_rank(world.rank).ranks[0]
        for stage, model in models.items():
            with whole(stage), target.attempt():
                if writes:
                    write_adapter_part(model, target.unfinished, stage)
        target.agree(None)
        with target.attempt():
            if world.rank == 0:
                join_adapter_parts(target.unfinished)
                write_adapter_config(adapters, target.unfinished, self._stages.folder)
                if self._stages.folder is not None:
                    copy_other_files(self._stages.folder, target.unfinished)
                target.finish()
        target.agree(None)

    def _finish(
        self,
        target: SaveTarget,
        weight_map: dict[str, tuple[str, int]],
        dtypes: AbstractSet[torch.dtype],
    ) -> None:
        """Complete the folder; its config names a dtype that loses nothing of any group's."""
        dtype = reduce(torch.promote_types, dtypes, next(iter(dtypes)))
        source = self._stages.folder or self._stages.config
        write_index_and_config(source, target.unfinished, weight_map, dtype=dtype)
        target.finish()


@contextmanager
def _one_progress_bar() -> Iterator[None]:
    """Only rank 0 shows how transformers loads weights."""
    if dist.get_rank() == 0 or not logging.is_progress_bar_enabled():
        yield
        return
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.enable_progress_bar()
