"""What layers hand to each other, taken apart into leaves and put together again.

A value is a tensor, or a tuple, list or dict of values; its leaves are tensors, `None` and plain
constants. Dim 0 of a tensor is the sample axis when its size is that of the micro-batch; any other
tensor is shared by all samples and must not need a gradient.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from zorse_ds.errors import ModelError
from zorse_ds.ranges import Range

Leaf = Tensor | int | float | bool | str | None
Structure = Any
"""A nested list that JSON can hold: `"*"` for a leaf, `["tuple", …]`, `["list", …]` or
`["dict", [keys], …]`."""


@dataclass(slots=True)
class Message:
    """Leaves on their way from one micro-batch to another."""

    structure: Structure
    leaves: list[Leaf]
    per_sample: list[bool]
    """Which leaves are cut along dim 0 by samples."""
    needs_grad: list[bool]
    extent: int = 0
    """Padded length (dim 1) of the inputs that the samples were loaded with; 0 = unknown."""


def flatten(value: Any) -> tuple[Structure, list[Leaf]]:
    """Take a value apart. Raises `ModelError` for a type that cannot travel."""
    leaves: list[Leaf] = []
    return _flatten(value, leaves), leaves


def _flatten(value: Any, leaves: list[Leaf]) -> Structure:
    if value is None or isinstance(value, Tensor | int | float | bool | str):
        leaves.append(value)
        return "*"
    if type(value) in (tuple, list):
        return [type(value).__name__, *(_flatten(item, leaves) for item in value)]
    if isinstance(value, dict) and all(isinstance(key, str) for key in value):
        return ["dict", list(value), *(_flatten(item, leaves) for item in value.values())]
    raise ModelError(
        f"a layer returned a {type(value).__name__}; expected tensors, None or plain constants in "
        "tuples, lists or dicts"
    )


def unflatten(structure: Structure, leaves: Sequence[Leaf]) -> Any:
    """Put a value together again."""
    return _unflatten(structure, iter(leaves))


def _unflatten(structure: Structure, leaves: Any) -> Any:
    if structure == "*":
        return next(leaves)
    kind, *parts = structure
    if kind == "dict":
        keys, *parts = parts
        return {key: _unflatten(part, leaves) for key, part in zip(keys, parts, strict=True)}
    items = (_unflatten(part, leaves) for part in parts)
    return tuple(items) if kind == "tuple" else list(items)


def cut(
    structure: Structure, leaves: Sequence[Leaf], size: int, window: Range, extent: int
) -> Message:
    """The message that holds the samples `window` (relative) of a micro-batch of `size` samples."""
    per_sample = [
        isinstance(leaf, Tensor) and leaf.dim() > 0 and len(leaf) == size for leaf in leaves
    ]
    needs_grad = [isinstance(leaf, Tensor) and leaf.requires_grad for leaf in leaves]
    for leaf, own, grad in zip(leaves, per_sample, needs_grad, strict=True):
        if grad and not own:
            shape = list(leaf.shape) if isinstance(leaf, Tensor) else []
            raise ModelError(
                f"a tensor of shape {shape} that needs a gradient leaves a stage with {size} "
                f"samples; expected its dim 0 to be the sample axis, [{size}, …]"
            )
    whole = window.size == size
    cut_leaves = [
        leaf.detach()[slice(None) if whole or not own else window.as_slice()]
        if isinstance(leaf, Tensor) and leaf.dim() > 0
        else leaf.detach()
        if isinstance(leaf, Tensor)
        else leaf
        for leaf, own in zip(leaves, per_sample, strict=True)
    ]
    return Message(structure, cut_leaves, per_sample, needs_grad, extent)


def merge(messages: Sequence[Message]) -> Message:
    """Join messages along the sample axis, in the order given.

    Pieces whose other dims differ (padded to different lengths) are padded with zeros on the right.
    """
    first = messages[0]
    if len(messages) == 1:
        return first
    if any(message.structure != first.structure for message in messages):
        raise ModelError(
            "micro-batches of one stage returned values of different structure, "
            f"{first.structure} beside others; expected the same from each"
        )
    leaves = [
        _join([message.leaves[i] for message in messages], own)
        for i, own in enumerate(first.per_sample)
    ]
    grads = [any(message.needs_grad[i] for message in messages) for i in range(len(leaves))]
    extent = max(message.extent for message in messages)
    return Message(first.structure, leaves, first.per_sample, grads, extent)


def _join(pieces: Sequence[Leaf], per_sample: bool) -> Leaf:
    tensors = [piece for piece in pieces if isinstance(piece, Tensor)]
    if not per_sample or len(tensors) != len(pieces):
        if len(tensors) not in (0, len(pieces)):
            raise ModelError(
                "micro-batches of one stage returned a tensor beside None at the same place; "
                "expected the same from each"
            )
        return pieces[0]
    return torch.cat(pad_alike(tensors))


def pad_alike(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Zero-pad all dims but the first, on the right, to the largest size of each."""
    shapes = [tensor.shape[1:] for tensor in tensors]
    if all(shape == shapes[0] for shape in shapes):
        return list(tensors)
    target = [max(sizes) for sizes in zip(*shapes, strict=True)]
    return [F.pad(tensor, _padding(tensor.shape[1:], target)) for tensor in tensors]


def _padding(shape: Sequence[int], target: Sequence[int]) -> list[int]:
    """`F.pad` counts dims from the last."""
    amounts = [wanted - size for size, wanted in zip(shape, target, strict=True)]
    return [amount for pair in ((0, extra) for extra in reversed(amounts)) for amount in pair]


def unpad(tensor: Tensor, shape: Sequence[int]) -> Tensor:
    """Undo `pad_alike`: the part of `tensor` that has `shape` beyond dim 0."""
    window = (slice(None), *(slice(0, size) for size in shape[1:]))
    return tensor if tensor.shape[1:] == tuple(shape)[1:] else tensor[window]


def extent_of(value: Any) -> int:
    """Padded length of collated inputs: dim 1 of their first tensor that has one, or 0."""
    _, leaves = flatten(value)
    return next(
        (leaf.shape[1] for leaf in leaves if isinstance(leaf, Tensor) and leaf.dim() > 1), 0
    )


def trim(value: Any, found: int, wanted: int) -> Any:
    """Drop the padding that neighbours brought: dim 1 of every tensor from `found` to `wanted`."""
    if not 0 < wanted < found:
        return value
    structure, leaves = flatten(value)
    return unflatten(structure, [_trim(leaf, found, wanted) for leaf in leaves])


def _trim(leaf: Leaf, found: int, wanted: int) -> Leaf:
    fits = isinstance(leaf, Tensor) and leaf.dim() > 1 and leaf.shape[1] == found
    return leaf[:, :wanted] if fits and isinstance(leaf, Tensor) else leaf
