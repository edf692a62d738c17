"""What one rank contributes to a checkpoint, as ranges of tensors."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from zorse_ds.core.checkpoint.manifest import BUFFER, OPTIMIZER_PREFIX, STATE, VALUE
from zorse_ds.core.checkpoint.plain import Scalar, TensorRef, encode
from zorse_ds.ranges import Range, consecutive
from zorse_ds.runtime.bucket import Bucket
from zorse_ds.runtime.checkpoint.holdings import (
    Holding,
    RankState,
    buffers_of,
    holdings_of,
    places_in,
)
from zorse_ds.runtime.optimizer import ShardedOptimizer

ALIGNMENT = 8
"""Bytes; each piece of a file starts at a multiple, as all of torch's dtypes want it."""


@dataclass(frozen=True, slots=True)
class Entry:
    """A range of one flattened tensor, to be written."""

    name: str
    kind: str
    window: Range
    values: Tensor
    """1-D, on any device."""


@dataclass(frozen=True, slots=True)
class Capture:
    """A rank's part of a checkpoint. `entries` refer to live memory until `copied`."""

    entries: tuple[Entry, ...]
    shapes: dict[str, tuple[int, ...]]
    parameters: dict[str, dict[str, Any]]
    """See `Manifest.parameters`."""

    @property
    def num_bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(entry.values.nbytes for entry in self.entries)

    def with_state(self, name: str, tensor: Tensor) -> "Capture":
        """Also a tensor that belongs to no parameter."""
        flat = tensor.detach().reshape(-1)
        entry = Entry(name, STATE, Range(0, flat.numel()), flat)
        shapes = self.shapes | {name: tuple(tensor.shape)}
        return replace(self, entries=(*self.entries, entry), shapes=shapes)


def capture(state: RankState, *, with_frozen: bool = True) -> Capture:
    """All that this rank writes of parameters, masters, optimizer state and buffers."""
    trained = [] if state.optimizer is None else state.optimizer.buckets
    names = {name for bucket in trained for name in bucket.flat.names}
    entries: list[Entry] = []
    shapes: dict[str, tuple[int, ...]] = {}
    for holding in holdings_of(state):
        if with_frozen or holding.name in names:
            shapes[holding.name] = holding.shape
            entries += _entry_of(holding, VALUE, holding.values, holding.window)
    parameters: dict[str, dict[str, Any]] = {name: {} for name in shapes}
    for bucket in trained:
        assert state.optimizer is not None, "buckets are an optimizer's"
        entries += _optimizer_entries(state.optimizer, bucket)
        scalars = _scalars(state.optimizer, bucket)
        parameters.update({p.holding.name: scalars for p in places_in(bucket) if p.at.size})
    for name, buffer, writes in buffers_of(state):
        if writes:
            shapes[name] = tuple(buffer.shape)
            flat = buffer.detach().reshape(-1)
            entries.append(Entry(name, BUFFER, Range(0, flat.numel()), flat))
    return Capture(tuple(entries), shapes, parameters)


def _entry_of(holding: Holding, kind: str, values: Tensor, window: Range) -> Iterator[Entry]:
    """The part of `values` (elements `window`) that this rank writes, if any."""
    if holding.own.size:
        part = values[holding.own.relative_to(window.start).as_slice()]
        yield Entry(holding.name, kind, holding.own, part)


def _optimizer_entries(optimizer: ShardedOptimizer, bucket: Bucket) -> Iterator[Entry]:
    """Those tensors of the inner optimizer's state that have an element for each of the master."""
    for key, value in optimizer.inner.state.get(bucket.master, {}).items():
        if _is_elementwise(value, bucket):
            for place in places_in(bucket):
                part = value.detach()[place.at.as_slice()]
                yield from _entry_of(
                    place.holding, OPTIMIZER_PREFIX + key, part, place.holding.window
                )


def _scalars(optimizer: ShardedOptimizer, bucket: Bucket) -> dict[str, Any]:
    """The rest of that state: counts of steps, for example."""
    return {
        key: encode(_counted(key, value), f"the optimizer's {key}", scalar_of)
        for key, value in optimizer.inner.state.get(bucket.master, {}).items()
        if value is not None and not _is_elementwise(value, bucket)
    }


def _counted(key: str, value: Any) -> Any:
    """Steps as a whole number: torch makes its tensor of it, other optimizers keep it so."""
    return int(value) if key == "step" else value


def _is_elementwise(value: Any, bucket: Bucket) -> bool:
    return torch.is_tensor(value) and value.shape == bucket.master.shape


def scalar_of(value: Any) -> Scalar | None:
    """A tensor of no dimension as plain data; None for anything else."""
    if not torch.is_tensor(value) or value.dim():
        return None
    return Scalar(str(value.dtype).removeprefix("torch."), value.item())


def tensor_of(kept: Scalar | TensorRef) -> Tensor:
    """The inverse of `scalar_of`."""
    assert isinstance(kept, Scalar), "only tensors of no dimension are kept in JSON"
    return torch.tensor(kept.value, dtype=getattr(torch, kept.dtype))


class HostCopy:
    """Memory on the host that captures are copied into; kept, so that later copies are fast."""

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8)

    def take(self, capture: Capture) -> Capture:
        """The same capture, detached from what training goes on to change."""
        sizes = [_aligned(entry.values.nbytes) for entry in capture.entries]
        if self._memory.numel() < sum(sizes):
            pinned = any(entry.values.is_cuda for entry in capture.entries)
            self._memory = torch.empty(sum(sizes), dtype=torch.uint8, pin_memory=pinned)
        copied = [
            replace(entry, values=self._copy(entry.values, place))
            for entry, place in zip(capture.entries, consecutive(sizes), strict=True)
        ]
        if self._memory.is_pinned():
            torch.cuda.synchronize()
        return replace(capture, entries=tuple(copied))

    def _copy(self, values: Tensor, place: Range) -> Tensor:
        target = self._memory[place.start : place.start + values.nbytes].view(values.dtype)
        return target.copy_(values, non_blocking=True)


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


def merged_shapes(captures: Sequence[dict[str, tuple[int, ...]]]) -> dict[str, tuple[int, ...]]:
    """The shapes that all ranks told."""
    return {name: shape for shapes in captures for name, shape in shapes.items()}
