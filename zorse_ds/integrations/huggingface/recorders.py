"""Modules that stand in a model while it is probed, and write down how they are called."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map_only
from transformers.cache_utils import KVSharingDict

from zorse_ds.errors import ModelError
from zorse_ds.integrations.huggingface.prune import copy_facts, first_tensor

PLAIN_TYPES = (
    torch.Tensor,
    bool,
    int,
    float,
    str,
    type(None),
    torch.dtype,
    torch.device,
    torch.Size,
)


class RefusalError(ModelError):
    """Why a model cannot be cut into stages; becomes the reason in a ModelError."""


@dataclass
class BlockCall:
    """One call of a decoder block: its hidden state, its other arguments by path, its result."""

    index: int
    hidden_argument: int | str
    hidden: torch.Tensor
    others: dict[str, Any]
    output: torch.Tensor


@dataclass
class PartCall:
    """One call of a part, while `num_blocks_called` blocks had been called."""

    path: str
    num_blocks_called: int
    output: torch.Tensor
    takes_hidden: bool


@dataclass
class Recording:
    """All calls of one forward of the probed model."""

    blocks_return_tuple: bool
    blocks: list[BlockCall] = field(default_factory=list)
    parts: list[PartCall] = field(default_factory=list)


class Recorder:
    """Where the modules below write; `recording` is swapped for each forward."""

    def __init__(self, *, shares_keys: bool = False) -> None:
        self.recording = Recording(blocks_return_tuple=False)
        self.shares_keys = shares_keys
        """Whether some blocks use the keys and values of others."""


class BlockRecorder(nn.Module):
    """Stands for a decoder block: no compute, a fresh tensor as result."""

    def __init__(self, index: int, block: nn.Module, recorder: Recorder) -> None:
        super().__init__()
        copy_facts(block, self)
        self._index = index
        self._recorder = recorder

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Record the call; the result has the shape of the hidden state."""
        recording = self._recorder.recording
        where = _hidden_argument(args, kwargs)
        arguments: dict[int | str, Any] = dict(enumerate(args))
        arguments.update(kwargs)
        hidden = arguments.pop(where)
        output = pattern(hidden.shape, hidden.dtype, seed=self._index)
        others = {
            path: leaf
            for key, value in arguments.items()
            if self._recorder.shares_keys or not _is_unused(value)
            for path, leaf in _leaves(value, f"{key}")
        }
        recording.blocks.append(BlockCall(self._index, where, hidden, others, output))
        return (output,) if recording.blocks_return_tuple else output


class PartRecorder(nn.Module):
    """Stands for a part: computes shapes on the meta device, returns fresh numbers of that shape.

    The result depends on every floating-point input as far as autograd knows, and by value on none.
    """

    def __init__(self, path: str, part: nn.Module, recorder: Recorder) -> None:
        super().__init__()
        copy_facts(part, self)
        self._path = path
        self._recorder = recorder
        self._part = [part]  # in a list, so that the part's parameters are not this module's
        if isinstance(getattr(part, "weight", None), torch.Tensor):
            self.register_buffer("weight", torch.empty(0), persistent=False)

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Record the call."""
        meta_args, meta_kwargs = tree_map_only(
            torch.Tensor, lambda tensor: tensor.to("meta"), (args, kwargs)
        )
        with torch.no_grad():
            shape_only = self._part[0](*meta_args, **meta_kwargs)
        if not isinstance(shape_only, torch.Tensor) or not shape_only.is_floating_point():
            raise RefusalError(f"{self._path} does not return one floating-point tensor")
        output = pattern(shape_only.shape, shape_only.dtype, seed=len(self._path))
        for value in (*args, *kwargs.values()):
            if isinstance(value, torch.Tensor) and value.is_floating_point():
                output = output + 0 * value.sum().to(output.dtype)
        first = first_tensor(args, kwargs)
        takes_hidden = first is not None and first.is_floating_point() and first.ndim == output.ndim
        recording = self._recorder.recording
        call = PartCall(self._path, len(recording.blocks), output, takes_hidden)
        recording.parts.append(call)
        return output


def pattern(shape: torch.Size, dtype: torch.dtype, seed: int) -> torch.Tensor:
    """A fresh tensor that requires grad, with the same unequal numbers each time."""
    numbers = torch.linspace(-1, 1 + seed / 8, shape.numel()).reshape(shape).to(dtype)
    return numbers.requires_grad_()


def _hidden_argument(args: tuple[Any, ...], kwargs: dict[str, Any]) -> int | str:
    """Where a block gets its hidden state: its first argument, or the one of that name."""
    if args and isinstance(args[0], torch.Tensor):
        return 0
    if isinstance(kwargs.get("hidden_states"), torch.Tensor):
        return "hidden_states"
    raise RefusalError("its blocks get no hidden state as first argument or as hidden_states")


def _is_unused(value: Any) -> bool:
    """Whether this is what blocks that share keys would fill, where none does."""
    return isinstance(value, KVSharingDict) and not value


def _leaves(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    """Tensors and scalars in an argument of a block, with their paths.

    Anything else could carry something from block to block: a dict or list to be filled, a cache.
    """
    if isinstance(value, PLAIN_TYPES):
        yield path, value
    elif isinstance(value, tuple):
        for i, item in enumerate(value):
            yield from _leaves(item, f"{path}.{i}")
    else:
        raise RefusalError(
            f"its blocks get argument {path}, a {type(value).__name__}, which could carry more "
            "than the hidden state from block to block"
        )
