"""A list of layers, as `PipelineModule` takes it, as a source of stage models."""

import copy
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, TypeAlias

import torch
from deepspeed.runtime.pipe.module import LayerSpec, TiedLayerSpec
from torch import Tensor, nn
from torch.nn import Parameter
from torch.utils.checkpoint import checkpoint

from zorse_ds.core.recompute import Recomputed
from zorse_ds.errors import ModelError
from zorse_ds.ranges import Range

Layer: TypeAlias = LayerSpec | nn.Module | Callable[[Any], Any]


class LayerListStage(nn.Module):
    """The layers of one stage, called one after the other.

    Of each run of layers that is `again` only the input is kept; what lies between is made anew in
    backward (non-re-entrant).
    """

    def __init__(
        self,
        modules: dict[str, nn.Module],
        calls: Sequence[Callable[[Any], Any]],
        names: dict[str, str],
        ties: dict[str, int],
        runs: Sequence[tuple[Range, bool]],
    ) -> None:
        super().__init__()
        self.owned = nn.ModuleDict(modules)
        self._calls = tuple(calls)
        self._names = names
        self._ties = ties
        self._runs = tuple(runs)
        """Of the calls, by place, and whether they are made anew."""

    def forward(self, value: Any) -> Any:
        """The stage's input → its output."""
        kept = not (self.training and torch.is_grad_enabled())
        for run, again in self._runs:
            calls = self._calls[run.as_slice()]
            if kept or not again:
                value = _in_order(calls, value)
            else:
                value = checkpoint(_in_order, calls, value, use_reentrant=False)
        return value

    def global_parameters(self) -> Iterator[tuple[str, Parameter]]:
        """See `StageModel.global_parameters`."""
        for local, parameter in self.owned.named_parameters():
            yield self._names[local], parameter

    def global_buffers(self) -> Iterator[tuple[str, Tensor]]:
        """See `StageModel.global_buffers`: a layer's index or key, and the name there."""
        saved = self.owned.state_dict(keep_vars=True)
        yield from ((name, b) for name, b in self.owned.named_buffers() if name in saved)

    def tie_of(self, name: str) -> int | None:
        """See `StageModel.tie_of`."""
        return self._ties.get(name)


class LayerListStages:
    """Builds stages out of `LayerSpec`, `TiedLayerSpec`, modules and plain functions.

    Layers that share a key (`TiedLayerSpec`) or a parameter (modules) are tied, wherever a plan
    puts them. A `LayerSpec` is built under a seed of its own, `base_seed` + layer index, so initial
    weights do not depend on the plan.
    """

    def __init__(
        self,
        layers: Sequence[Layer],
        base_seed: int,
        can_recompute: Callable[[int], bool] = lambda layer: True,
    ) -> None:
        if not layers:
            raise ModelError("layers is empty; expected at least one pipeline layer")
        self._layers = list(layers)
        self._base_seed = base_seed
        self._can_recompute = can_recompute
        self._sharing = _Sharing(self._layers)
        self.tied_layers = self._sharing.tied_layers

    @property
    def layer_names(self) -> tuple[str, ...]:
        """One word a layer."""
        return tuple(_name_of(layer) for layer in self._layers)

    @property
    def fingerprint(self) -> str:
        """Nothing: modules made in code take the values of the first rank of their group."""
        return ""

    def layer_places(self, name: str) -> tuple[tuple[int, ...], str]:
        """Layers and local name of a parameter or buffer, given the name it has in the model.

        Of what is tied by a key these are all its layers, else the first that has it.
        """
        head, _, local = name.partition(".")
        if head == "tied":
            # A key may hold dots itself.
            keys = (key for key in self._sharing.layers_of_key if local.startswith(f"{key}."))
            key = max(keys, key=len)
            return self._sharing.layers_of_key[key], local.removeprefix(f"{key}.")
        return (int(head.removeprefix("tied_")),), local

    def build(
        self, layers: Range, *, recomputed: Recomputed, owns: Callable[[int], bool]
    ) -> LayerListStage:
        """The stage of `layers`; `owns(tie)`: it is the first to use those shared parameters."""
        own = self._layers[layers.as_slice()]
        own = self._copied_where_shared(own, layers, owns)
        modules: dict[str, nn.Module] = {}
        calls: list[Callable[[Any], Any]] = []
        for index, layer in enumerate(own, layers.start):
            key, module = self._module_of(index, layer, modules)
            if module is not None:
                modules[key] = module
            calls.append(_call_of(layer, module))
        names = {
            f"{key}.{local}": self._sharing.canonical(key, local, module)
            for key, module in modules.items()
            for local, _ in module.named_parameters(remove_duplicate=False)
        }
        ties = {
            name: tie
            for local, name in names.items()
            if (tie := self._sharing.tie_of(local, name)) is not None
        }
        runs = [
            (run.relative_to(layers.start), again)
            for run, again in recomputed.runs(layers, self._can_recompute)
        ]
        return self.make_stage(modules, calls, names, ties, runs)

    def make_stage(self, *parts: Any) -> LayerListStage:
        """A stage of what `LayerListStage` takes."""
        return LayerListStage(*parts)

    def _module_of(
        self, index: int, layer: Layer, built: dict[str, nn.Module]
    ) -> tuple[str, nn.Module | None]:
        if isinstance(layer, TiedLayerSpec):
            key = self._sharing.module_key(layer.key)
            first = self._sharing.first_of_key[layer.key]
            return key, built.get(key) or self._built(self._layers[first], first)
        key = str(index)
        if isinstance(layer, LayerSpec):
            return key, self._built(layer, index)
        return key, layer if isinstance(layer, nn.Module) else None

    def _built(self, spec: Any, seed_index: int) -> nn.Module:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self._base_seed + seed_index)
            module: nn.Module = spec.build()
            return module

    def _copied_where_shared(
        self, own: list[Layer], layers: Range, owns: Callable[[int], bool]
    ) -> list[Layer]:
        """A stage that only borrows shared modules trains copies of its own."""
        borrowed = self._sharing.ties_of_modules(layers)
        if all(owns(tie) for tie in borrowed):
            return own
        memo: dict[int, Any] = {}
        return [
            copy.deepcopy(layer, memo) if isinstance(layer, nn.Module) else layer for layer in own
        ]


class _Sharing:
    """Which layers of a list share parameters, and what the shared ones are called."""

    def __init__(self, layers: Sequence[Layer]) -> None:
        self.first_of_key: dict[str, int] = {}
        by_key: dict[str, list[int]] = {}
        users: dict[int, list[int]] = {}
        self._first_name: dict[int, str] = {}
        self._modules = {i: layer for i, layer in enumerate(layers) if isinstance(layer, nn.Module)}
        for index, layer in enumerate(layers):
            if isinstance(layer, TiedLayerSpec):
                self.first_of_key.setdefault(layer.key, index)
                by_key.setdefault(layer.key, []).append(index)
        for index, module in self._modules.items():
            for local, parameter in module.named_parameters():
                users.setdefault(id(parameter), []).append(index)
                self._first_name.setdefault(id(parameter), f"{index}.{local}")
        shared = {self._first_name[key]: tuple(at) for key, at in users.items() if len(at) > 1}
        sets = dict.fromkeys(shared.values())
        self._tie_of_layers = {at: i for i, at in enumerate(sets)}
        self._tie_of_name = {name: self._tie_of_layers[at] for name, at in shared.items()}
        self._key_of_module = {self.module_key(key): key for key in by_key}
        self._tie_of_module = {name: len(sets) + i for i, name in enumerate(self._key_of_module)}
        self.layers_of_key = {key: tuple(at) for key, at in by_key.items()}
        self.tied_layers = (*sets, *self.layers_of_key.values())

    def module_key(self, key: str) -> str:
        """What the module of a tied key is registered as: torch refuses the dots a key may have."""
        return f"tied_{self.first_of_key[key]}"

    def canonical(self, key: str, local: str, module: nn.Module) -> str:
        """The name of a parameter in the whole model: that of its first use."""
        if key in self._key_of_module:
            return f"tied.{self._key_of_module[key]}.{local}"
        original = self._modules.get(int(key))
        if original is None:
            return f"{key}.{local}"
        parameters = dict(original.named_parameters(remove_duplicate=False))
        return self._first_name[id(parameters[local])]

    def tie_of(self, local: str, name: str) -> int | None:
        """The tie of a parameter, given its names in the stage and in the whole model."""
        return self._tie_of_module.get(local.split(".")[0], self._tie_of_name.get(name))

    def ties_of_modules(self, layers: Range) -> list[int]:
        """Ties between modules that reach into a range of layers."""
        return [
            tie
            for at, tie in self._tie_of_layers.items()
            if any(layers.start <= index < layers.stop for index in at)
        ]


def _in_order(calls: Sequence[Callable[[Any], Any]], value: Any) -> Any:
    for call in calls:
        value = call(value)
    return value


def _call_of(layer: Layer, module: nn.Module | None) -> Callable[[Any], Any]:
    if isinstance(layer, TiedLayerSpec) and layer.forward_fn is not None:
        return partial(layer.forward_fn, module)
    if module is not None:
        return module
    if not callable(layer):
        raise ModelError(
            f"a layer is a {type(layer).__name__}; expected a LayerSpec, a module or a function"
        )
    return layer


def _name_of(layer: Layer) -> str:
    if isinstance(layer, LayerSpec):
        return str(layer.typename.__name__)
    return getattr(layer, "__name__", type(layer).__name__)
