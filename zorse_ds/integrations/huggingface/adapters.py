"""LoRA through `peft`: which modules get an adapter, and adapters on the modules of one stage.

`peft` sees a stage as a model of its own. So targets are found once, on the whole model without
weights, and given to each stage by their full names; and each adapter draws its first values from
its own name, so that they do not depend on where the layers are.
"""

import copy
import hashlib
import math
from collections.abc import Iterator
from dataclasses import MISSING, Field, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformers import PreTrainedModel

from zorse_ds.core.strict import suggestion
from zorse_ds.errors import ConfigError
from zorse_ds.files import read_json
from zorse_ds.integrations.huggingface.structure import ModelStructure
from zorse_ds.runtime.flat import master_dtype

if TYPE_CHECKING:
    from peft import LoraConfig
    from peft.tuners.lora import LoraLayer

ADAPTER = "default"
CONFIG_NAME = "adapter_config.json"
WEIGHTS_NAME = "adapter_model.safetensors"

AdapterSource = str | Path | dict[str, Any]

_FREE = (
    *("r", "lora_alpha", "lora_dropout", "use_rslora", "rank_pattern", "alpha_pattern"),
    *("target_modules", "exclude_modules", "layers_to_transform", "layers_pattern"),
    *("fan_in_fan_out", "inference_mode", "base_model_name_or_path", "revision", "peft_version"),
)
"""Keys that may have any value that `peft` takes."""
_OTHER_NAMES = {"rank": "r", "alpha": "lora_alpha", "dropout": "lora_dropout"}
_OTHER_NAMES |= dict.fromkeys(("modules", "lora_target_modules", "targets"), "target_modules")
_ONLY: dict[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",),
    "task_type": ("CAUSAL_LM", None),
    "init_lora_weights": (True, False, "gaussian"),
}
"""All others keep their default: they would train or change the base, so that the adapter alone
could not give it back, or make adapters of other forms."""


@dataclass(frozen=True)
class Adapters:
    """LoRA on some modules of a model."""

    config: "LoraConfig"
    """As the user gave it."""
    targets: tuple[str, ...]
    """Full names of the modules that get one."""
    sizes: tuple[int, ...]
    """Parameters of each."""
    seed: int

    @property
    def num_params(self) -> int:
        """Trainable parameters of the whole model."""
        return sum(self.sizes)

    def sizes_by_layer(self, structure: ModelStructure) -> list[int]:
        """Parameters of adapters in each pipeline layer."""
        sizes = [0] * structure.num_layers
        for name, size in zip(self.targets, self.sizes, strict=True):
            sizes[structure.layer_of(f"{name}.weight")] += size
        return sizes

    def attach(self, model: PreTrainedModel, structure: ModelStructure, layers: range) -> None:
        """Put adapters on the modules of a stage and freeze everything else, in place."""
        from peft import inject_adapter_in_model

        model.requires_grad_(False)
        local = [t for t in self.targets if structure.layer_of(f"{t}.weight") in layers]
        if not local:
            return
        inject_adapter_in_model(_exactly(self.config, local), model, ADAPTER)
        for name, module in lora_layers(model):
            for parameter in (p for p in _module(module).parameters() if p.requires_grad):
                # As peft does: too coarse a type would swallow small updates.
                parameter.data = parameter.data.to(master_dtype(parameter.dtype))
            _draw(module, f"{self.seed} {name}", self.config.init_lora_weights)


def read_adapters(source: AdapterSource) -> "LoraConfig":
    """A LoRA configuration: an object of `peft.LoraConfig`'s fields, a file of it, or its folder.

    Raises `ConfigError` with one sentence a problem.
    """
    from peft import LoraConfig

    if isinstance(source, dict):
        where, given = "adapters", dict(source)
    else:
        path = Path(source)
        path = path / CONFIG_NAME if path.is_dir() else path
        where, given = str(path), read_json(path, ConfigError)
    known = {field.name: _default(field) for field in fields(LoraConfig)}
    problems = list(_problems(given, known))
    if problems:
        raise ConfigError("\n".join(f"{where}.{problem}" for problem in problems))
    try:
        return LoraConfig(**{**given, "task_type": "CAUSAL_LM", "inference_mode": False})
    except (TypeError, ValueError) as problem:
        raise ConfigError(
            f"{where}: {_first_line(problem)}; expected what LoraConfig takes"
        ) from None


def find_targets(model: PreTrainedModel, config: "LoraConfig", seed: int = 1234) -> Adapters:
    """The modules of the whole model, on the meta device and used up by this, that get an adapter.

    Raises `ConfigError` when there is none, or one on weights that the head shares.
    """
    from peft import inject_adapter_in_model
    from peft.tuners.lora import ParamWrapper

    tied = {name for pair in model.all_tied_weights_keys.items() for name in pair}
    try:
        # A copy, for peft changes configurations for models whose experts are one parameter.
        inject_adapter_in_model(copy.deepcopy(config), model, ADAPTER, low_cpu_mem_usage=True)
    except (ValueError, TypeError, AttributeError) as problem:
        raise ConfigError(
            f"adapters: {_first_line(problem)}; expected target_modules that "
            f"{type(model).__name__} has, such as 'all-linear'"
        ) from None
    layers = dict(lora_layers(model))
    shared = [name for name in layers if f"{name}.weight" in tied]
    if shared:
        raise ConfigError(
            f"adapters.target_modules takes in {shared[0]}, whose weights embedding and head "
            "share; expected modules of the blocks, such as 'all-linear'"
        )
    fused = [name for name, layer in layers.items() if isinstance(layer, ParamWrapper)]
    if fused:
        raise ConfigError(
            f"adapters.target_modules takes in {fused[0]}, which is no linear layer; "
            "expected other modules, such as ['q_proj', 'k_proj', 'v_proj', 'o_proj']"
        )
    sizes = [
        sum(p.numel() for name, p in _module(layer).named_parameters() if "lora_" in name)
        for layer in layers.values()
    ]
    return Adapters(config, tuple(layers), tuple(sizes), seed)


def lora_layers(model: torch.nn.Module) -> Iterator[tuple[str, "LoraLayer"]]:
    """Modules with an adapter, by their names."""
    from peft.tuners.lora import LoraLayer

    yield from ((n, m) for n, m in model.named_modules() if isinstance(m, LoraLayer))


def is_adapter(name: str) -> bool:
    """Whether a parameter belongs to an adapter, by its name."""
    return any(part.startswith("lora_") for part in name.split("."))


def has_adapters(model: torch.nn.Module) -> bool:
    """Whether some module of a stage has an adapter."""
    return any(is_adapter(name) for name, _ in model.named_parameters())


def name_on_disk(name: str) -> str:
    """The name that `PeftModel.from_pretrained` knows a parameter of an adapter by."""
    return "base_model.model." + name.replace(f".{ADAPTER}.", ".").removesuffix(f".{ADAPTER}")


def merged_weight(layer: "LoraLayer") -> torch.Tensor:
    """The weight of a module with an adapter as that of the base, in new memory.

    The model stays as it is.
    """
    base: Any = layer.get_base_layer()
    kept = base.weight.data
    layer.merge(safe_merge=True, adapter_names=[ADAPTER])
    merged: torch.Tensor = base.weight.data
    # Not `unmerge`, which would leave the base rounded.
    base.weight.data = kept
    layer.merged_adapters.clear()
    return merged


def _problems(given: dict[str, Any], known: dict[str, Any]) -> Iterator[str]:
    for key, value in given.items():
        if key not in known:
            here = _OTHER_NAMES.get(key)
            near = f"; did you mean {here!r}?" if here else suggestion(key, [*known])
            yield f"{key} is not a known key; expected one of peft.LoraConfig's{near}"
        elif key in _ONLY and value not in _ONLY[key]:
            yield f"{key} is {value!r}; expected {' or '.join(map(repr, _ONLY[key]))}"
        elif key not in (*_FREE, *_ONLY) and value not in (known[key], None):
            yield (
                f"{key} is {value!r}, which stages of a pipeline do not carry; expected "
                f"{known[key]!r} or no such key"
            )
    rank = given.get("r", 1)
    if type(rank) is not int or rank < 1:
        yield f"r is {rank!r}; expected a whole number above 0"


def _default(field: Field[Any]) -> Any:
    return field.default if field.default_factory is MISSING else field.default_factory()


def _exactly(config: "LoraConfig", names: list[str]) -> "LoraConfig":
    """The configuration for these modules and no others."""
    from peft import LoraConfig

    settings = {f.name: getattr(config, f.name) for f in fields(LoraConfig) if f.init}
    settings |= {"target_modules": names, "exclude_modules": None}
    settings |= {"layers_to_transform": None, "layers_pattern": None}
    return LoraConfig(**settings)


def _draw(layer: "LoraLayer", key: str, init: bool | str) -> None:
    """First values of an adapter: A random, B zero; both random where `init` is false."""
    seed = int.from_bytes(hashlib.sha256(key.encode()).digest()[:7])
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed)
        for name, parameter in _module(layer).named_parameters():
            if name.startswith(f"lora_A.{ADAPTER}") or (init is False and "lora_B" in name):
                if init == "gaussian":
                    parameter.normal_(std=1 / layer.r[ADAPTER])
                else:
                    torch.nn.init.kaiming_uniform_(parameter, a=math.sqrt(5))
            elif name.startswith("lora_embedding_B") or (init is False and "embedding_A" in name):
                parameter.normal_()


def _module(layer: "LoraLayer") -> torch.nn.Module:
    """peft's layers are modules by their other bases."""
    assert isinstance(layer, torch.nn.Module), "an adapter is a module"
    return layer


def _first_line(problem: Exception) -> str:
    return (str(problem).strip() or type(problem).__name__).splitlines()[0].rstrip(".")
