"""Reading a whole model's module tree: its list of blocks, its parts, its tied parameters."""

from collections import defaultdict
from collections.abc import Sequence

from torch import nn
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from zorse_ds.integrations.huggingface.recorders import RefusalError
from zorse_ds.integrations.huggingface.structure import ModelStructure


def find_blocks(model: PreTrainedModel) -> str:
    """Path of the one list of decoder blocks; RefusalError when there is none or several."""
    config = model.config.get_text_config(decoder=True)
    num_blocks = getattr(config, "num_hidden_layers", None)
    block_names = set(model._no_split_modules or ())
    paths = [
        path
        for path, module in model.named_modules()
        if isinstance(module, nn.ModuleList)
        and len(module) == num_blocks
        and all(_is_block(block, block_names) for block in module)
    ]
    if len(paths) != 1 or not num_blocks:
        raise RefusalError(f"it has {len(paths)} lists of num_hidden_layers={num_blocks} blocks")
    return paths[0]


def _is_block(module: nn.Module, block_names: set[str]) -> bool:
    """What transformers checkpoints as one, or keeps on one device, is a block."""
    return isinstance(module, GradientCheckpointingLayer) or type(module).__name__ in block_names


def find_parts(model: PreTrainedModel, blocks_path: str) -> list[str]:
    """Paths of the modules with parameters beside the list of blocks, in module order.

    They are the children of the modules that enclose the list; a parameter directly in one of
    those belongs to no layer and raises RefusalError.
    """
    names = blocks_path.split(".")
    enclosing = [".".join(names[:i]) for i in range(len(names))]
    paths = []
    for path in enclosing:
        module = model.get_submodule(path)
        for name, _ in module.named_parameters(recurse=False):
            raise RefusalError(f"parameter {path}.{name} is outside its blocks and parts")
        for name, child in module.named_children():
            child_path = f"{path}.{name}" if path else name
            leads_to_blocks = f"{blocks_path}.".startswith(f"{child_path}.")
            if not leads_to_blocks and any(True for _ in child.parameters()):
                paths.append(child_path)
    order = {path: i for i, (path, _) in enumerate(model.named_modules())}
    return sorted(paths, key=order.__getitem__)


def find_ties(model: PreTrainedModel) -> list[tuple[str, str]]:
    """Pairs (target, source) of names for one parameter; RefusalError for undeclared ones."""
    names_by_id = defaultdict(list)
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names_by_id[id(parameter)].append(name)
    declared = model.all_tied_weights_keys
    ties = []
    for names in names_by_id.values():
        targets = [name for name in names if name in declared]
        sources = [name for name in names if name not in declared]
        if len(sources) != 1:
            raise RefusalError(f"{' and '.join(sources)} share a parameter undeclared")
        ties += [(target, sources[0]) for target in targets]
    return ties


def keep_ties(
    structure: ModelStructure, ties: Sequence[tuple[str, str]], parameter_names: Sequence[str]
) -> tuple[tuple[str, str], ...]:
    """The ties between the first and the last layer; RefusalError for ties between others.

    Ties within one layer are left to the model. The tied part must hold nothing else, since the
    last stage keeps a copy of it.
    """
    kept = []
    for target, source in ties:
        layers = (structure.layer_of(source), structure.layer_of(target))
        if layers[0] == layers[1]:
            continue
        if layers != (0, structure.num_layers - 1):
            raise RefusalError(f"{target} is tied to {source}, across layers {layers}")
        kept.append((target, source))
    sources = {source for _, source in kept}
    for part in {structure.part_of(source) for source in sources}:
        others = [name for name in parameter_names if name.startswith(f"{part}.")]
        if not set(others) <= sources:
            raise RefusalError(f"{part} holds parameters besides the tied one")
    return tuple(kept)
