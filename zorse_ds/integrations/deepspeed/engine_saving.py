"""What an engine writes and reads: checkpoints, and folders for transformers."""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

from zorse_ds.core.plan import Plan
from zorse_ds.errors import ConfigError, ModelError
from zorse_ds.integrations.deepspeed.checkpoint import Checkpoints
from zorse_ds.integrations.deepspeed.engine_parts import EngineParts


class SavingEngine:
    """The part of `ZorseEngine` that saves and loads."""

    plan: Plan
    parts: EngineParts
    module: Any
    optimizer: Any
    _checkpoints: Checkpoints

    def save_checkpoint(
        self,
        save_dir: str,
        tag: str | None = None,
        client_state: dict[str, Any] | None = None,
        save_latest: bool = True,
        exclude_frozen_parameters: bool = False,
    ) -> bool:
        """Save everything that training goes on from into `save_dir/tag`, whole or not at all.

        Arguments are DeepSpeed's; `client_state` (the first rank's) holds plain data and tensors.
        With `zorse.checkpoint.async` training goes on while files are written. Raises
        `CheckpointError` on every rank alike, an earlier save's too. Collective: every rank.
        """
        self._checkpoints.save(
            save_dir, tag, client_state or {}, save_latest, not exclude_frozen_parameters
        )
        return True

    def load_checkpoint(
        self,
        load_dir: str,
        tag: str | None = None,
        load_module_strict: bool = True,
        load_optimizer_states: bool = True,
        load_lr_scheduler_states: bool = True,
        load_module_only: bool = False,
        custom_load_fn: Any = None,
    ) -> tuple[str | None, dict[str, Any] | None]:
        """Go on from a checkpoint that any plan saved; returns `(path, client_state)`.

        Without `tag` the one that `load_dir/latest` names; `(None, None)` when there is no such
        file. `load_module_only` takes the weights and begins anew. Stock DeepSpeed's checkpoints
        give their weights. Raises `CheckpointError` on every rank alike. Collective: every rank.
        """
        if custom_load_fn is not None:
            raise ConfigError("custom_load_fn was given; expected none, for files hold ranges")
        return self._checkpoints.load(
            load_dir,
            tag,
            strict=load_module_strict,
            optimizer=load_optimizer_states,
            scheduler=load_lr_scheduler_states,
            module_only=load_module_only,
        )

    def save_pretrained(self, folder: str, *, merge_adapters: bool = False) -> None:
        """Write the model as a Hugging Face folder. Collective: every rank.

        A model with adapters gives these alone unless `merge_adapters`. Raises `ModelError` when
        the model was not made by `from_pretrained`.
        """
        save = getattr(self.module.source, "save_pretrained", None)
        if save is None:
            raise ModelError(
                "save_pretrained was called on a model made of a layer list; expected one from "
                "zorse_ds.from_pretrained"
            )
        models, world = self.module.stage_models, self.parts.world
        save(folder, self.plan, models, world, self.whole, merge_adapters=merge_adapters)

    def whole(self, stage: int) -> AbstractContextManager[None]:
        """Inside, the parameters of one of this rank's stages can be read, at `zero_level` 3 too.

        What is written inside is lost at that level. Collective: every rank of the stage's group.
        """
        return nullcontext() if self.optimizer is None else self.optimizer.sharded.whole(stage)
