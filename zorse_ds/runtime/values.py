"""What layers hand to each other, taken apart into leaves and put together again.

A value is a tensor, or a tuple, list or dict of values; its leaves are tensors, `None` and plain
constants. Dim 0 of a tensor is the sample axis when its size is that of the micro-batch; any other
tensor is shared by all samples and must not need a gradient. So that a shared tensor is never taken
for one with a row a sample, layers give it one row (a mask of shape [1, …], not [length, …]).
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


def merge(messages: Sequence[Message], sizes: Sequence[int]) -> Message:
    """Join messages of `sizes` samples along the sample axis, in the order given.

    Pieces whose other dims differ (padded to different lengths) are padded with zeros on the right.
    What all samples share must be the same in all messages; a shared tensor of one row that is not
    is repeated for each sample. Raises `ModelError` when messages do not fit together.
    """
    first = messages[0]
    if len(messages) == 1:
        return first
    if any(message.structure != first.structure for message in messages):
        raise ModelError(
            "micro-batches of one stage returned values of different structure, "
            f"{first.structure} beside others; expected the same from each"
        )
    shared = [_is_shared(messages, i) for i in range(len(first.leaves))]
    leaves = [
        first.leaves[i]
        if shared[i]
        else torch.cat(pad_alike([_rows(*piece, i) for piece in zip(messages, sizes, strict=True)]))
        for i in range(len(shared))
    ]
    grads = [any(message.needs_grad[i] for message in messages) for i in range(len(leaves))]
    extent = max(message.extent for message in messages)
    return Message(first.structure, leaves, [not own for own in shared], grads, extent)


def _is_shared(messages: Sequence[Message], i: int) -> bool:
    """All samples of all messages have the same leaf; compares the values of shared tensors."""
    if any(message.per_sample[i] for message in messages):
        return False
    first, *others = (message.leaves[i] for message in messages)
    if isinstance(first, Tensor):
        return all(isinstance(other, Tensor) and torch.equal(first, other) for other in others)
    # As text, because NaN is not equal to itself, and 1, 1.0 and True are.
    return all(repr(first) == repr(other) for other in others)


def _rows(message: Message, size: int, i: int) -> Tensor:
    """A leaf with a row for each of the `size` samples."""
    leaf = message.leaves[i]
    if isinstance(leaf, Tensor) and (message.per_sample[i] or (leaf.dim() and len(leaf) == 1)):
        return leaf if message.per_sample[i] else leaf.expand(size, *leaf.shape[1:])
    found = f"a tensor of shape {list(leaf.shape)}" if isinstance(leaf, Tensor) else repr(leaf)
    raise ModelError(
        f"micro-batches of one stage returned {found} beside something else at the same place; "
        "expected the same from each, or tensors with a row for each sample or one row for all"
    )


def converted(message: Message, source: torch.dtype, target: torch.dtype) -> Message:
    """The message with its tensors of dtype `source` in dtype `target`."""
    message.leaves = [
        leaf.to(target) if isinstance(leaf, Tensor) and leaf.dtype == source else leaf
        for leaf in message.leaves
    ]
    return message


def pad_alike(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Zero-pad all dims but the first, on the right, to the largest size of each."""
    shapes = [tensor.shape[1:] for tensor in tensors]
    if len({len(shape) for shape in shapes}) > 1:
        found = [list(tensor.shape) for tensor in tensors]
        raise ModelError(
            f"micro-batches of one stage returned tensors of shapes {found} at the same place; "
            "expected as many dims in each"
        )
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


def trim(value: Any, found: int, wanted: int, labels: Any) -> Any:
    """Drop the padding that neighbours brought: dim 1 of every tensor from `found` to `wanted`.

    Only for labels of that length: others pair nothing with positions, and then dim 1 of an output
    may be of size `found` by chance (as many classes, say).
    """
    if not 0 < wanted < found or not _has_length(labels, wanted):
        return value
    structure, leaves = flatten(value)
    return unflatten(structure, [_trim(leaf, found, wanted) for leaf in leaves])


def _has_length(value: Any, length: int) -> bool:
    _, leaves = flatten(value)
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.dim() > 1]
    return any(tensor.shape[1] == length for tensor in tensors)


def _trim(leaf: Leaf, found: int, wanted: int) -> Leaf:
    fits = isinstance(leaf, Tensor) and leaf.dim() > 1 and leaf.shape[1] == found
    return leaf[:, :wanted] if fits and isinstance(leaf, Tensor) else leaf
