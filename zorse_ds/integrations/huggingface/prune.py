"""Cutting a model down to one stage: taps instead of blocks, stubs instead of parts.

The model's own forward keeps running the whole way, so that masks, rotary embeddings, positions
and multipliers are made by the code that knows them. What is not local costs nothing there.
"""

from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from zorse_ds.integrations.huggingface.structure import ModelStructure


class StageExit(Exception):  # noqa: N818 - control flow, not a mistake
    """Leaves the model's forward behind the last local block, carrying its hidden state."""

    def __init__(self, hidden: torch.Tensor) -> None:
        super().__init__("end of stage")
        self.hidden = hidden


def pick_hidden(
    structure: ModelStructure, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> torch.Tensor:
    """The hidden state among the arguments of a block."""
    where = structure.hidden_argument
    hidden: torch.Tensor = args[where] if isinstance(where, int) else kwargs[where]
    return hidden


def copy_facts(source: nn.Module, target: nn.Module) -> None:
    """Give `target` the plain attributes of `source`: a forward may ask a block for its type."""
    for name, value in vars(source).items():
        plain = value is None or isinstance(value, (bool, int, float, str))
        if plain and not name.startswith("_") and name != "training":
            setattr(target, name, value)


class Tap(nn.Module):
    """Stands for a block in front of the stage: hands its hidden state through."""

    def __init__(self, block: nn.Module, structure: ModelStructure) -> None:
        super().__init__()
        copy_facts(block, self)
        self._structure = structure

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return the hidden state in the form in which the blocks of this model do."""
        hidden = pick_hidden(self._structure, args, kwargs)
        return (hidden,) if self._structure.blocks_return_tuple else hidden


class ExitTap(Tap):
    """Stands for a block behind the stage: ends the forward with what it is given."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Raise `StageExit` with the hidden state."""
        raise StageExit(pick_hidden(self._structure, args, kwargs))


class Stub(nn.Module):
    """Stands for a part that is not local.

    In front of the blocks its result never reaches a local block, only its shape and dtype may:
    hidden states pass through, and what would be looked up by ids is a zero that broadcasts.
    """

    def __init__(self, part: nn.Module, *, is_identity: bool) -> None:
        super().__init__()
        copy_facts(part, self)
        self._is_identity = is_identity
        if isinstance(getattr(part, "weight", None), torch.Tensor):
            # Some forwards read the dtype or device of a weight. Its shape fits no computation.
            self.register_buffer("weight", torch.empty(0), persistent=False)

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """The first tensor given, or a zero without dimensions."""
        tensor = first_tensor(args, kwargs)
        if self._is_identity and tensor is not None:
            return tensor
        return torch.zeros((), device=None if tensor is None else tensor.device)


def first_tensor(args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor | None:
    """The first tensor among the arguments of a call, if any."""
    values = (*args, *kwargs.values())
    return next((value for value in values if isinstance(value, torch.Tensor)), None)


def replace_module(model: nn.Module, path: str, new: nn.Module) -> None:
    """Put `new` where `model` has the module `path`."""
    parent, _, name = path.rpartition(".")
    setattr(model.get_submodule(parent), name, new)


def kept_parts(structure: ModelStructure, start: int, stop: int) -> frozenset[str]:
    """Paths of the parts a stage of layers [start, stop) holds, tied copies included."""
    kept: set[str] = set()
    if start == 0:
        kept.update(structure.parts_before)
    if stop == structure.num_layers:
        kept.update(structure.parts_after)
        kept.update(structure.part_of(source) for source in structure.tied_sources)
    return frozenset(kept)


def prune(model: PreTrainedModel, structure: ModelStructure, start: int, stop: int) -> None:
    """Drop from `model`, in place, all parameters outside pipeline layers [start, stop).

    A stage with the last layer keeps the tied parameters of layer 0, so that the model ties its
    head by itself.
    """
    kept = kept_parts(structure, start, stop)
    for path in structure.parts_before + structure.parts_after:
        if path not in kept:
            stub = Stub(model.get_submodule(path), is_identity=path in structure.identity_parts)
            replace_module(model, path, stub)
    blocks = model.get_submodule(structure.blocks_path)
    assert isinstance(blocks, nn.ModuleList)
    for i in range(structure.num_blocks):
        if i + 1 < start:
            blocks[i] = Tap(blocks[i], structure)
        elif i + 1 >= stop:
            blocks[i] = ExitTap(blocks[i], structure)
    present = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    model.all_tied_weights_keys = {
        target: source
        for target, source in model.all_tied_weights_keys.items()
        if {target, source} <= present
    }
