"""Collectives over one group of ranks, with uneven shards.

`ProcessGroup` is what the runtime needs; `TorchProcessGroup` does it with `torch.distributed`.
The order of every sum is fixed (ascending rank), so two runs give the same bits.
"""

from collections.abc import Sequence
from typing import Any, Literal, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from zorse_ds.core.shards import ShardLayout
from zorse_ds.ranges import Range, apportion, consecutive
from zorse_ds.runtime.failures import wires

ReduceOp = Literal["sum", "max"]
BUCKET_NUMEL = 1024 * 1024
"""Elements that a reduction holds at once beside its input: bounds its extra memory."""


class ProcessGroup(Protocol):
    """Ranks that communicate collectively; every method is called by all of them alike."""

    @property
    def rank(self) -> int:
        """The own rank in the world."""

    @property
    def ranks(self) -> tuple[int, ...]:
        """The members' ranks in the world, ascending."""

    def all_reduce(self, tensor: Tensor, op: ReduceOp = "sum") -> None:
        """Collective: replace `tensor` by the sum or maximum over the members."""

    def start_gather(self, flat: Tensor, layout: ShardLayout) -> "Gathering":
        """Collective: start to fill `flat` (numel) with every member's shard.

        The own shard must be in its place; nothing may touch `flat` before `wait`.
        """

    def reduce_shards(
        self, flat: Tensor, layout: ShardLayout, wire: torch.dtype | None = None
    ) -> Tensor:
        """Collective: the own shard of the sum of all members' `flat` (numel), in its dtype.

        Contributions travel in `wire`, to which they are rounded before they are summed up.
        """

    def start_reduce(self, flat: Tensor, layout: ShardLayout, wire: torch.dtype) -> "Reducing":
        """Collective: start to sum all members' `flat` (numel), which must stay as it is."""


class Gathering(Protocol):
    """Shards under way into a flat vector."""

    def wait(self) -> None:
        """Block until the vector is whole."""


class Reducing(Protocol):
    """Contributions to the own shard of a sum, under way."""

    def add_to(self, shard: Tensor) -> None:
        """Block until they are here, and add them to `shard` in rank order."""


def gather_shards(group: ProcessGroup, flat: Tensor, layout: ShardLayout) -> None:
    """Collective: fill `flat` (numel) so that every member has every member's shard."""
    group.start_gather(flat, layout).wait()


class Arrived:
    """A `Gathering` with nothing left to wait for."""

    def wait(self) -> None:
        """See `Gathering.wait`."""


class _Works:
    """Collectives under way, and what they read until they end."""

    def __init__(
        self,
        group: ProcessGroup,
        works: Sequence[dist.Work | None],
        source: Tensor | None = None,
    ) -> None:
        self._group, self._works, self._source = group, works, source

    def wait(self) -> None:
        """See `Gathering.wait`."""
        with wires(self._group.rank, "gather shards", self._group.ranks):
            for work in self._works:
                if work is not None:
                    work.wait()
        self._source = None


class Contributions:
    """A `Reducing` of the own shard of everybody, `received` one behind the other."""

    def __init__(self, group: ProcessGroup, received: Tensor, work: Any = None) -> None:
        self._group, self._received, self._work = group, received, work

    def add_to(self, shard: Tensor) -> None:
        """See `Reducing.add_to`."""
        if self._work is not None:
            with wires(self._group.rank, "reduce shards", self._group.ranks):
                self._work.wait()
        for contribution in self._received.view(len(self._group.ranks), len(shard)):
            shard += contribution


class TorchProcessGroup:
    """A `torch.distributed` process group (gloo or NCCL)."""

    def __init__(self, rank: int, ranks: Sequence[int], handle: dist.ProcessGroup | None) -> None:
        self.rank = rank
        self.ranks = tuple(ranks)
        self.handle = handle
        self._backend = dist.get_backend(handle) if rank in self.ranks else "none"

    def all_reduce(self, tensor: Tensor, op: ReduceOp = "sum") -> None:
        """See `ProcessGroup.all_reduce`."""
        if len(self.ranks) > 1:
            ops = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX}
            with wires(self.rank, "reduce", self.ranks):
                dist.all_reduce(tensor, op=ops[op], group=self.handle)

    def start_gather(self, flat: Tensor, layout: ShardLayout) -> Gathering:
        """See `ProcessGroup.start_gather`.

        Equal shards on NCCL take the single-tensor call. Otherwise one broadcast a shard into its
        place, all under way at once: on gloo padding and all-to-all are slower for megabytes, and
        messages pair by pair slower with two ranks, within noise with four
        (`benchmarks.collectives`).
        """
        if len(self.ranks) == 1:
            return Arrived()
        own = layout.of(self.rank)
        if self._backend == "nccl" and len(set(layout.sizes)) == 1:
            source = flat[own.as_slice()].clone()
            work = dist.all_gather_into_tensor(flat, source, group=self.handle, async_op=True)
            return _Works(self, [work], source)
        with wires(self.rank, "gather shards", self.ranks):
            works = [
                dist.broadcast(flat[shard.as_slice()], src=owner, group=self.handle, async_op=True)
                for owner, shard in zip(layout.ranks, layout.shards, strict=True)
                if shard.size
            ]
        return _Works(self, works)

    def reduce_shards(
        self, flat: Tensor, layout: ShardLayout, wire: torch.dtype | None = None
    ) -> Tensor:
        """See `ProcessGroup.reduce_shards`.

        Equal shards on NCCL take the single-tensor call, where it sums in the dtype of `flat`.
        Otherwise the shards are exchanged all to all and summed here in rank order; gloo's own
        reduce-scatter moves twice the bytes.
        """
        own = layout.of(self.rank)
        wire = wire or flat.dtype
        if len(self.ranks) == 1:
            return flat
        if self._backend == "nccl" and len(set(layout.sizes)) == 1 and wire == flat.dtype:
            shard = flat.new_empty(own.size)
            dist.reduce_scatter_tensor(shard, flat, group=self.handle)
            return shard
        with wires(self.rank, "reduce shards", self.ranks):
            return self._exchange_and_sum(flat, layout, wire)

    def start_reduce(self, flat: Tensor, layout: ShardLayout, wire: torch.dtype) -> Reducing:
        """See `ProcessGroup.start_reduce`: an exchange all to all, summed when it is there."""
        sent = flat.to(wire)
        if len(self.ranks) == 1:
            return Contributions(self, sent)
        own = layout.of(self.rank).size
        received = sent.new_empty(len(self.ranks) * own)
        with wires(self.rank, "reduce shards", self.ranks):
            work = dist.all_to_all_single(
                received,
                sent,
                [own] * len(self.ranks),
                list(layout.sizes),
                group=self.handle,
                async_op=True,
            )
        return Contributions(self, received, _Works(self, [work], sent))

    def _exchange_and_sum(self, flat: Tensor, layout: ShardLayout, wire: torch.dtype) -> Tensor:
        me = layout.ranks.index(self.rank)
        shard = flat.new_empty(layout.sizes[me])
        filled = 0
        for pieces in _buckets(layout):
            sizes = [piece.size for piece in pieces]
            whole = sum(sizes) == layout.numel
            sent = flat if whole else torch.cat([flat[piece.as_slice()] for piece in pieces])
            sent = sent.to(wire)
            received = sent.new_empty(len(sizes) * sizes[me])
            dist.all_to_all_single(
                received, sent, [sizes[me]] * len(sizes), sizes, group=self.handle
            )
            target = shard[filled : filled + sizes[me]]
            _sum_in_order(target, received.view(len(sizes), sizes[me]))
            filled += sizes[me]
        return shard


def _sum_in_order(target: Tensor, contributions: Tensor) -> None:
    target.copy_(contributions[0])
    for contribution in contributions[1:]:
        target += contribution


def _buckets(layout: ShardLayout) -> list[list[Range]]:
    """Cut all shards into equally many pieces; the k-th pieces of all shards travel together."""
    count = max(1, -(-layout.numel // BUCKET_NUMEL))
    cuts = [consecutive(apportion(shard.size, [1] * count), shard.start) for shard in layout.shards]
    return [[cut[k] for cut in cuts] for k in range(count)]
