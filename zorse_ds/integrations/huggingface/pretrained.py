"""`from_pretrained`: a Hugging Face folder as a `ZorsePipelineModule`, and the way back."""

import shutil
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch

from zorse_ds.core.plan import Plan
from zorse_ds.errors import ModelError, PlanError
from zorse_ds.integrations.deepspeed.config import check_config, load_config, plan_from_config
from zorse_ds.integrations.deepspeed.module import ZorsePipelineModule, init_distributed
from zorse_ds.integrations.huggingface.collate import collate_causal_lm
from zorse_ds.integrations.huggingface.loading import fingerprint_of
from zorse_ds.integrations.huggingface.loss import CausalLMLoss
from zorse_ds.integrations.huggingface.saving import (
    weights_file_name,
    write_index_and_config,
    write_stage_weights,
)
from zorse_ds.integrations.huggingface.stage import CausalLMStage
from zorse_ds.integrations.huggingface.stages import CausalLMStages
from zorse_ds.ranges import Range
from zorse_ds.runtime.dist_world import DistWorld


def from_pretrained(
    folder: str | Path,
    plan: Plan | None = None,
    *,
    config: str | Path | dict[str, Any] | None = None,
    dtype: torch.dtype = torch.float32,
    attn_implementation: str | None = None,
) -> ZorsePipelineModule:
    """The causal language model in `folder`, of which each rank loads its own stages alone.

    Pipeline layers are the embedding (0), each decoder block, and final norm with head. `plan` may
    be left out when `config`, the DeepSpeed JSON, names one; with `config` its contradictions to
    the plan are found before any weight is read. Weights are held in `dtype`; the engine casts
    them if the config enables bf16 or fp16 and keeps masters in full precision. Raises
    `ModelError`, `PlanError` or `ConfigError`. Collective: every rank calls it.
    """
    if plan is None and config is not None:
        plan = plan_from_config(config)
    if plan is None:
        raise PlanError(
            "from_pretrained was given no plan; expected plan=Plan.load(path), or a config with "
            "zorse.plan"
        )
    if config is not None:
        check_config(load_config(config), plan)
    init_distributed()
    stages = CausalLMStages.from_folder(
        folder, dtype=dtype, attn_implementation=attn_implementation
    )
    return ZorsePipelineModule(
        plan=plan,
        loss_fn=CausalLMLoss(),
        source=PretrainedStages(stages),
        collate_fn=collate_causal_lm,
    )


class PretrainedStages:
    """`CausalLMStages` as the source of a pipeline module's stages. See `StageSource`."""

    def __init__(self, stages: CausalLMStages) -> None:
        self._stages = stages
        self.tied_layers = stages.tied_layers
        self.layer_names = stages.layer_names

    @property
    def fingerprint(self) -> str:
        """See `StageSource.fingerprint`: the files' names, sizes and both ends."""
        return fingerprint_of(self._stages.folder)

    def build(self, layers: Range, *, recompute: int, owns: Callable[[int], bool]) -> CausalLMStage:
        """See `StageSource.build`; every stage holds its own copy of tied weights."""
        if recompute > 1:
            raise ModelError(
                f"recompute_every is {recompute}, but a Hugging Face model's own forward runs "
                "block by block; expected 1"
            )
        return self._stages.build(layers.start, layers.stop, recompute=bool(recompute))

    def save_pretrained(
        self,
        folder: str | Path,
        plan: Plan,
        models: Mapping[int, CausalLMStage],
        world: DistWorld,
        whole: Callable[[int], AbstractContextManager[None]],
    ) -> None:
        """Write weights, index, config and tokenizer so that transformers loads them.

        The first rank of each group writes its stages, one after the other; `whole(stage)` makes a
        stage's parameters whole meanwhile. All is written beside `folder` and moved in
        at the end, the index last. Collective: every rank; `folder` must be seen by all of them.
        """
        folder = Path(folder)
        unfinished = folder.with_name(f".{folder.name}.unfinished")
        if world.rank == 0:
            shutil.rmtree(unfinished, ignore_errors=True)
            unfinished.mkdir(parents=True)
        world.gather_objects(None)
        weight_map: dict[str, tuple[str, int]] = {}
        writes = world.rank == plan.group_of_rank(world.rank).ranks[0]
        for stage, model in models.items():
            name = weights_file_name(stage, len(plan.stages))
            owns_tied = stage == 0 or not self.tied_layers
            with whole(stage):
                if writes:
                    weight_map |= write_stage_weights(model, unfinished, name, owns_tied=owns_tied)
        maps = world.gather_objects(weight_map)
        if world.rank == 0:
            merged = {key: at for own in maps for key, at in own.items()}  # type: ignore[attr-defined]
            self._finish(folder, unfinished, merged, next(iter(models.values())))
        world.gather_objects(None)

    def _finish(
        self,
        folder: Path,
        unfinished: Path,
        weight_map: dict[str, tuple[str, int]],
        model: CausalLMStage,
    ) -> None:
        dtype = next((p.dtype for p in model.parameters()), self._stages.dtype)
        source = self._stages.folder or self._stages.config
        write_index_and_config(source, unfinished, weight_map, dtype=dtype)
        folder.mkdir(parents=True, exist_ok=True)
        for old in folder.glob("model*.safetensors*"):
            old.unlink()
        for path in sorted(unfinished.iterdir(), key=lambda path: path.name.endswith("index.json")):
            target = folder / path.name
            if target.is_dir():
                shutil.rmtree(target)
            path.replace(target)
        unfinished.rmdir()
