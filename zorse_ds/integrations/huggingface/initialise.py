"""Random weights that do not depend on how the layers are cut into stages."""

from collections.abc import Iterable

import torch
from transformers import PreTrainedModel

from zorse_ds.integrations.huggingface.prune import kept_parts
from zorse_ds.integrations.huggingface.structure import ModelStructure

SEED_STRIDE = 1_000_003


def initialise(
    model: PreTrainedModel, structure: ModelStructure, start: int, stop: int, seed: int
) -> None:
    """Give a pruned model on the meta device the weights of its own `_init_weights`, on the CPU.

    Each pipeline layer draws from a generator seeded by its index, and tied parameters from one
    more, so that a tied head draws what the embeddings do wherever it is.
    """
    model.to_empty(device="cpu")
    layers: dict[int, list[str]] = {}
    for name, _ in model.named_parameters(remove_duplicate=False):
        layer = structure.layer_of(name)
        tied = name in structure.tied_sources
        layers.setdefault(structure.num_layers if tied else layer, []).append(name)
    units = _modules_by_layer(model, structure, start, stop)
    for layer in sorted(layers):
        owner = 0 if layer == structure.num_layers else layer
        _draw(model, layers[layer], units[owner], seed * SEED_STRIDE + layer)
    inside = {path for paths in units.values() for path in paths}
    _draw(model, [], [path for path, _ in model.named_modules() if path not in inside], seed)
    model.tie_weights(recompute_mapping=False)


def _modules_by_layer(
    model: PreTrainedModel, structure: ModelStructure, start: int, stop: int
) -> dict[int, list[str]]:
    """Paths of the local modules of each layer; those that enclose the layers are in none."""
    roots = set(kept_parts(structure, start, stop))
    roots.update(f"{structure.blocks_path}.{i}" for i in range(structure.num_blocks))
    units: dict[int, list[str]] = {}
    for path, _ in model.named_modules():
        if any(path == root or path.startswith(f"{root}.") for root in roots):
            units.setdefault(structure.layer_of(path), []).append(path)
    return units


def _draw(
    model: PreTrainedModel, names: Iterable[str], module_paths: Iterable[str], seed: int
) -> None:
    """Run the model's initialisation with everything but the given names held back."""
    names, module_paths = set(names), set(module_paths)
    enclosing = _enclosing(module_paths)
    for name, parameter in model.named_parameters(remove_duplicate=False):
        parameter._is_hf_initialized = name not in names  # type: ignore[attr-defined]
    for path, module in model.named_modules():
        module._is_hf_initialized = path not in module_paths | enclosing
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed % 2**63)
        model.initialize_weights()


def _enclosing(paths: Iterable[str]) -> set[str]:
    """Paths of the modules around those given: some models initialise a child from its parent."""
    names = [path.split(".") for path in paths]
    return {".".join(path[:i]) for path in names for i in range(len(path))}
