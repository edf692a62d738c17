"""Parameters that several stages use: one owner with the optimizer state, copies elsewhere.

Gradients of the copies flow to the owner before its reduction, its new values back after its step.
So copies are bit-identical after every step, count once in the norm, and cost no optimizer state.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from zorse_ds.core.shards import ShardLayout, shard_layout
from zorse_ds.ranges import Range
from zorse_ds.runtime.flat import FlatParameters, master_dtype
from zorse_ds.runtime.process_groups import ProcessGroup


class OwnedTie:
    """The owning stage's side on one of its ranks: windows of its flat vectors."""

    def __init__(self, places: Sequence[tuple[FlatParameters, Range]]) -> None:
        self._places = tuple(places)

    @property
    def numel(self) -> int:
        """Elements of all tied parameters together."""
        return sum(window.size for _, window in self._places)

    @property
    def values(self) -> Tensor:
        """The current values as one vector."""
        return torch.cat([flat.data[window.as_slice()] for flat, window in self._places])

    def no_grads(self) -> Tensor:
        """Zeros in the dtype gradients accumulate in."""
        first = self._places[0][0].data
        return torch.zeros(self.numel, dtype=master_dtype(first.dtype), device=first.device)

    def add_to_grads(self, part: Range, grads: Tensor) -> None:
        """Add gradients of the elements `part` of the tied vector."""
        start = 0
        for flat, window in self._places:
            here = Range(start, start + window.size).intersect(part)
            if here.size and flat.grad is not None:
                target = here.relative_to(start - window.start).as_slice()
                flat.grad[target] += grads[here.relative_to(part.start).as_slice()]
            start += window.size


class TiedParameters:
    """One tie as one rank sees it.

    `owned` is set on ranks of the owning group, `copies` holds the copies of the rank's other
    stages. All ranks of `process_group` call `reduce_grads` and `broadcast_values` together.
    """

    def __init__(
        self,
        process_group: ProcessGroup,
        owner_ranks: Sequence[int],
        owned: OwnedTie | None,
        copies: Sequence[FlatParameters],
    ) -> None:
        self._group = process_group
        self._owned = owned
        self._copies = tuple(copies)
        numel = owned.numel if owned is not None else copies[0].numel
        weights = [float(rank in owner_ranks) for rank in process_group.ranks]
        self._layout: ShardLayout = shard_layout(numel, process_group.ranks, weights)

    def open_grads(self) -> None:
        """Zero the copies' gradients at the start of a step."""
        for copy in self._copies:
            copy.open_grads()

    def reduce_grads(self) -> None:
        """Collective: every rank of the owner gets the sum of one part of the copies' gradients."""
        total = self._sum_of_own_copies()
        part = self._group.reduce_shards(total, self._layout)
        if self._owned is not None:
            self._owned.add_to_grads(self._layout.of(self._group.rank), part)
        for copy in self._copies:
            copy.drop_grads()

    def broadcast_values(self) -> None:
        """Collective: every rank of the owner sends its part; copies take the whole."""
        if self._owned is not None:
            values = self._owned.values
        else:
            values = torch.empty_like(self._copies[0].data)
        self._group.gather_shards(values, self._layout)
        for copy in self._copies:
            copy.data.copy_(values)

    def _sum_of_own_copies(self) -> Tensor:
        grads = [copy.grad for copy in self._copies if copy.grad is not None]
        if not grads:
            assert self._owned is not None, "a rank of a tie owns it or holds a copy"
            return self._owned.no_grads()
        return grads[0] if len(grads) == 1 else torch.stack(grads).sum(0)
