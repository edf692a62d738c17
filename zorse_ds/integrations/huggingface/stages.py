"""The factory of stages: reads a folder or configuration once, then builds any run of layers."""

import copy
from pathlib import Path

import torch
from transformers import PretrainedConfig, PreTrainedModel

from zorse_ds.core.recompute import KEPT
from zorse_ds.errors import ModelError
from zorse_ds.integrations.huggingface.adapters import (
    Adapters,
    AdapterSource,
    find_targets,
    read_adapters,
)
from zorse_ds.integrations.huggingface.loading import (
    build_on_meta,
    create_stage_model,
    load_stage_model,
    read_config,
)
from zorse_ds.integrations.huggingface.probe import probe
from zorse_ds.integrations.huggingface.router_probe import without_router_loss
from zorse_ds.integrations.huggingface.stage import CausalLMStage
from zorse_ds.integrations.huggingface.structure import ModelStructure
from zorse_ds.ranges import Range


class CausalLMStages:
    """Builds the pruned model of one pipeline stage out of a Hugging Face folder or configuration.

    Attributes: `layer_names`, one per pipeline layer; `tied_layers`, tuples of layers that share
    parameters; `parameter_counts`, parameters per pipeline layer (a tied head counts in both);
    `adapters`, where LoRA is asked for (all else is frozen then); `config`, `dtype`, `structure`,
    `seed`, and `folder` (None for random weights).
    """

    def __init__(
        self,
        config: PretrainedConfig,
        *,
        folder: Path | None,
        dtype: torch.dtype,
        attn_implementation: str | None,
        seed: int,
        adapters: AdapterSource | None = None,
    ) -> None:
        lora = None if adapters is None else read_adapters(adapters)
        if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
            raise ModelError(f"dtype is {dtype!r}; expected one such as torch.float32")
        where = str(folder / "config.json") if folder else f"the {type(config).__name__} given"
        model = build_on_meta(config, where, attn_implementation)
        shapes = [(n, p.numel()) for n, p in model.named_parameters(remove_duplicate=False)]
        # A composite model's language model goes by its own part of the configuration.
        self.config: PretrainedConfig = copy.deepcopy(model.config)
        self._running_config = _as_run(self.config, dtype)
        self.structure: ModelStructure = probe(model)
        self.adapters: Adapters | None = None
        if lora is not None:
            whole = build_on_meta(config, where, attn_implementation)
            self.adapters = find_targets(whole, lora, seed)
        self.folder = folder
        self.dtype = dtype
        self._attn_implementation = attn_implementation
        self.seed = seed
        self.layer_names: tuple[str, ...] = self.structure.layer_names
        last = self.structure.num_layers - 1
        self.tied_layers: tuple[tuple[int, ...], ...] = ((0, last),) if self.structure.ties else ()
        counts = [0] * self.structure.num_layers
        for name, size in shapes:
            counts[self.structure.layer_of(name)] += size
        if self.adapters is not None:
            own = self.adapters.sizes_by_layer(self.structure)
            counts = [size + more for size, more in zip(counts, own, strict=True)]
        self.parameter_counts: tuple[int, ...] = tuple(counts)

    @classmethod
    def from_folder(
        cls,
        folder: str | Path,
        *,
        dtype: torch.dtype = torch.float32,
        attn_implementation: str | None = None,
        adapters: AdapterSource | None = None,
        seed: int = 0,
    ) -> "CausalLMStages":
        """Read and probe the configuration in `folder`; weights are read by `build`.

        `adapters` is what `read_adapters` takes; their first values depend on `seed` alone.

        Raises ModelError when the folder is no checkpoint of a causal language model with
        weights (safetensors or `.bin`), or its model cannot be cut into stages.
        """
        if not isinstance(folder, str | Path) or not str(folder):
            raise ModelError(
                f"the folder is {folder!r}; expected the path of a Hugging Face checkpoint"
            )
        folder = Path(folder)
        return cls(
            read_config(folder),
            folder=folder,
            dtype=dtype,
            attn_implementation=attn_implementation,
            seed=seed,
            adapters=adapters,
        )

    @classmethod
    def from_config(
        cls,
        config: PretrainedConfig,
        *,
        dtype: torch.dtype = torch.float32,
        seed: int = 0,
        attn_implementation: str | None = None,
        adapters: AdapterSource | None = None,
    ) -> "CausalLMStages":
        """Probe a configuration; `build` draws weights that `seed` and nothing else decides.

        Raises ModelError when its model cannot be cut into stages.
        """
        if not isinstance(config, PretrainedConfig):
            raise ModelError(
                f"the configuration is a {type(config).__name__}; expected one of transformers', "
                "such as LlamaConfig(...)"
            )
        if type(seed) is not int or seed < 0:
            raise ModelError(f"seed is {seed!r}; expected a whole number from 0")
        return cls(
            copy.deepcopy(config),
            folder=None,
            dtype=dtype,
            attn_implementation=attn_implementation,
            seed=seed,
            adapters=adapters,
        )

    def build(
        self,
        start: int,
        stop: int,
        *,
        recomputed: Range = KEPT.layers,
        device: str | torch.device = "cpu",
    ) -> CausalLMStage:
        """The stage of pipeline layers [start, stop), with weights, in training mode.

        Blocks of `recomputed` keep only their input and run again in the backward pass. Raises
        ModelError for an empty range, one outside the model, or weights that are not there.
        """
        num_layers = self.structure.num_layers
        if not 0 <= start < stop <= num_layers:
            raise ModelError(
                f"layers [{start}, {stop}) are no stage of {self.structure.model_class.__name__}; "
                f"expected a non-empty range within [0, {num_layers})"
            )
        model = self._model(start, stop)
        if self.adapters is not None:
            self.adapters.attach(model, self.structure, range(start, stop))
        model.to(torch.device(device))
        return CausalLMStage(model, self.structure, start, stop, recomputed=recomputed)

    def _model(self, start: int, stop: int) -> PreTrainedModel:
        """The pruned model, with weights from the folder or from the seed."""
        if self.folder is not None:
            return load_stage_model(
                self.folder,
                self._running_config,
                self.structure,
                (start, stop),
                dtype=self.dtype,
                attn_implementation=self._attn_implementation,
            )
        return create_stage_model(
            self._running_config,
            self.structure,
            (start, stop),
            dtype=self.dtype,
            attn_implementation=self._attn_implementation,
            seed=self.seed,
        )


def _as_run(config: PretrainedConfig, dtype: torch.dtype) -> PretrainedConfig:
    """The configuration stages run with: nothing on that wants all blocks, or another dtype."""
    config = copy.deepcopy(config)
    without_router_loss(config)
    if dtype == torch.float64 and config._experts_implementation == "grouped_mm":
        # The fused matrix products over experts do not know float64.
        config._experts_implementation = "eager"
    return config
