"""Parameters that several stages use: one owner with the optimizer state, copies elsewhere.

Gradients of the copies flow to the owner before its reduction, its new values back after its step.
So copies are bit-identical after every step, count once in the norm, and cost no optimizer state.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from zorse_ds.core.shards import ShardLayout
from zorse_ds.ranges import Range, consecutive
from zorse_ds.runtime.bucket import Bucket
from zorse_ds.runtime.flat import FlatParameters
from zorse_ds.runtime.process_groups import ProcessGroup, gather_shards
from zorse_ds.runtime.sharded import ShardedFlat

_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True, slots=True)
class OwnedPlace:
    """Where a tied parameter lies at its owner: a window of a bucket's flat vector."""

    bucket: Bucket
    window: Range

    @property
    def own(self) -> Range:
        """The part of the window that this rank's shard holds."""
        return self.bucket.own.intersect(self.window)

    def values(self) -> Tensor:
        """The current values of that part, in the precision of the master."""
        master = self.bucket.master.detach()
        return master[self.own.relative_to(self.bucket.window.start).as_slice()]

    def add_to_grads(self, grads: Tensor) -> None:
        """Add gradients of that part to this rank's share of the sum."""
        grad = self.bucket.flat.grad
        assert grad is not None, "the owner's gradients are open until they are reduced"
        grad[self.own.as_slice()] += grads


@dataclass(frozen=True, slots=True)
class TiedCopy:
    """A stage's copy of tied parameters, laid one behind the other by name."""

    flat: FlatParameters
    sharded: ShardedFlat | None
    """Set when the copy is whole only while its stage runs."""

    def take(self, values: Tensor) -> None:
        """Take over new values (numel)."""
        if self.sharded is None:
            self.flat.data.copy_(values)
        else:
            self.sharded.shard.copy_(values[self.sharded.window.as_slice()])


class TiedParameters:
    """One tie, owned by stage `owner`, as one rank sees it.

    `places` is set on ranks of the owning group, by name; `copies` are those of the rank's other
    stages. All ranks of `process_group` construct it and call its methods together.
    """

    def __init__(
        self,
        process_group: ProcessGroup,
        places: Sequence[OwnedPlace],
        copies: Sequence[TiedCopy],
        device: torch.device,
        owner: int,
    ) -> None:
        self.owner = owner
        self._group = process_group
        self._places = tuple(places)
        self._copies = tuple(copies)
        sizes = [place.window.size for place in places] or [w.size for w in copies[0].flat.windows]
        self._windows = consecutive(sizes)
        some = places[0].bucket.flat if places else copies[0].flat
        self._device, self._grad_dtype = device, some.grad_dtype
        self._layouts = self._agreed_layouts()
        self._dtype = self._agreed_dtype(some.dtype)

    def reduce_grads(self) -> None:
        """Collective: every rank of the owner gets the copies' gradients of its own part."""
        total = self._sum_of_own_copies()
        for i, (window, layout) in enumerate(zip(self._windows, self._layouts, strict=True)):
            part = self._group.reduce_shards(total[window.as_slice()], layout)
            if self._places:
                self._places[i].add_to_grads(part)
        for copy in self._copies:
            copy.flat.drop_grads()

    def broadcast_values(self) -> None:
        """Collective: every rank of the owner sends its own part; copies take the whole."""
        values = torch.empty(self._windows[-1].stop, dtype=self._dtype, device=self._device)
        for i, (window, layout) in enumerate(zip(self._windows, self._layouts, strict=True)):
            target = values[window.as_slice()]
            if self._places:
                target[layout.of(self._group.rank).as_slice()] = self._places[i].values()
            gather_shards(self._group, target, layout)
        for copy in self._copies:
            copy.take(values)

    def _agreed_layouts(self) -> list[ShardLayout]:
        """Collective: who holds which part of each parameter; only the owner's ranks can tell."""
        ranks = self._group.ranks
        sizes = torch.zeros(len(self._windows), len(ranks), dtype=torch.int64, device=self._device)
        for i, place in enumerate(self._places):
            sizes[i, ranks.index(self._group.rank)] = place.own.size
        self._group.all_reduce(sizes)
        return [ShardLayout(ranks, consecutive(row)) for row in sizes.tolist()]

    def _agreed_dtype(self, own: torch.dtype) -> torch.dtype:
        """Collective: what values travel in: the ranks' dtype, or the master's if they differ."""
        number = _DTYPES.index(own)
        bounds = torch.tensor([number, -number], device=self._device)
        self._group.all_reduce(bounds, "max")
        return own if int(bounds[0]) == -int(bounds[1]) else self._grad_dtype

    def _sum_of_own_copies(self) -> Tensor:
        grads = [copy.flat.grad for copy in self._copies if copy.flat.grad is not None]
        if not grads:
            numel = self._windows[-1].stop
            return torch.zeros(numel, dtype=self._grad_dtype, device=self._device)
        return grads[0] if len(grads) == 1 else torch.stack(grads).sum(0)
