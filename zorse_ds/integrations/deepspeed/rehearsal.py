"""Virtual GPUs under a `ZorseEngine`: its groups, messages, layers and optimizer take time."""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from math import ceil, inf
from unittest import mock

import torch
from torch import Tensor

from zorse_ds.core.shards import ShardLayout
from zorse_ds.cost.collectives import Collective, gather, reduce_scatter
from zorse_ds.cost.network import Network
from zorse_ds.cost.optimizer import lot_sum_s, opening_s, reduction_s
from zorse_ds.integrations.deepspeed.engine import ZorseEngine
from zorse_ds.rehearsal.gpu import Key, VirtualGpu
from zorse_ds.rehearsal.links import agreement
from zorse_ds.rehearsal.slowdowns import VirtualStopwatch
from zorse_ds.runtime import process_groups
from zorse_ds.runtime.dist_transport import RECEIVES_AHEAD
from zorse_ds.runtime.optimizer import ShardedOptimizer
from zorse_ds.runtime.process_groups import (
    BUCKET_NUMEL,
    Gathering,
    ProcessGroup,
    ReduceOp,
    Reducing,
)
from zorse_ds.runtime.transport import Receive, Transport
from zorse_ds.runtime.values import Message

MOST_PIECES = 64
"""That a reduction is cut into; the miniature's pieces would be too many."""


def attach(engine: ZorseEngine, gpu: VirtualGpu) -> None:
    """Let an engine's rank be a virtual GPU. The engine has been made and knows nothing of it."""
    gpu.watch(engine.module)
    worker = engine._worker
    if engine.optimizer is not None:
        gpu.watch_optimizer(engine.basic_optimizer)
        gpu.pool.know(engine.optimizer.sharded.tensors)
        _watch_opening(engine.optimizer.sharded, gpu)
    worker.ledger = gpu.pool
    gpu.counting = nullcontext
    for group in engine.parts.world._groups.values():
        if len(group.ranks) > 1:
            impose_on_group(group, gpu)
    worker.transport = VirtualTransport(worker.transport, gpu)
    engine.parts.measure_by(VirtualStopwatch(gpu), worker)


def _watch_opening(sharded: ShardedOptimizer, gpu: VirtualGpu) -> None:
    """Zeroing the gradients of a stage takes time, in its first backward of a step."""
    real = sharded.open_grads

    def open_grads(stage: int) -> None:
        is_first = stage not in sharded._open and sharded.stages[stage].rounds is None
        real(stage)
        if is_first:
            own = sharded.stages[stage]
            numel = sum(flat.numel for flat in (*(b.flat for b in own.buckets), *own.copies))
            seconds = opening_s(gpu.gpu.type, numel * gpu.miniature.ratio)
            gpu.work("BackwardPass", seconds)

    sharded.open_grads = open_grads  # type: ignore[method-assign]


def impose_on_group(group: ProcessGroup, gpu: VirtualGpu) -> None:
    """Replace a process group's methods by ones that also take virtual time."""
    for name, method in vars(_GroupTimes(group, gpu)).items():
        if not name.startswith("_"):
            setattr(group, name, method)


class _GroupTimes:
    """The methods of one process group, with their times."""

    def __init__(self, group: ProcessGroup, gpu: VirtualGpu) -> None:
        self._ranks, self._rank, self._gpu = group.ranks, group.rank, gpu
        self._all_reduce, self._start, self._reduce, self._start_sum = (
            group.all_reduce,
            group.start_gather,
            group.reduce_shards,
            group.start_reduce,
        )
        self._sums = _Sums(gpu)
        self.all_reduce: Callable[..., None] = self._agree
        self.start_gather: Callable[..., Gathering] = self._gather
        self.reduce_shards: Callable[..., Tensor] = self._sum
        self.start_reduce: Callable[..., Reducing] = self._start_reduce

    def _agree(self, tensor: Tensor, op: ReduceOp = "sum") -> None:
        """The runtime reduces nothing but a few numbers by this."""
        price = agreement(self._gpu.network, self._ranks)
        self._gpu.join(self._ranks, price, lambda: self._all_reduce(tensor, op))

    def _gather(self, flat: Tensor, layout: ShardLayout) -> Gathering:
        key = self._gpu.arrive(self._ranks, self._priced(gather, flat.dtype, layout))
        return _VirtualGathering(self._start(flat, layout), self._gpu, key)

    def _sum(self, flat: Tensor, layout: ShardLayout, wire: torch.dtype | None = None) -> Tensor:
        most = max(1, ceil(BUCKET_NUMEL / self._gpu.miniature.ratio), layout.numel // MOST_PIECES)

        def run() -> Tensor:
            with mock.patch.object(process_groups, "BUCKET_NUMEL", most):
                return self._reduce(flat, layout, wire)

        price = self._priced(reduce_scatter, wire or flat.dtype, layout)
        shard: Tensor = self._gpu.join(self._ranks, price, run)
        own = layout.of(self._rank).size / max(1, layout.numel)
        numel = layout.numel * self._gpu.miniature.ratio
        kind, dtype = self._gpu.gpu.type, self._gpu.dtype
        seconds = reduction_s(kind, dtype, numel, own, len(self._ranks))
        self._gpu.work("ReduceGrads", seconds)
        return shard

    def _start_reduce(self, flat: Tensor, layout: ShardLayout, wire: torch.dtype) -> Reducing:
        key = self._gpu.arrive(self._ranks, self._priced(reduce_scatter, wire, layout))
        own = layout.of(self._rank).size / max(1, layout.numel)
        numel = layout.numel * self._gpu.miniature.ratio
        kind, dtype = self._gpu.gpu.type, self._gpu.dtype
        seconds = lot_sum_s(kind, dtype, numel, own, len(self._ranks))
        real = self._start_sum(flat, layout, wire)
        return _VirtualReducing(real, self._gpu, key, seconds, self._sums)

    def _priced(
        self,
        kind: Callable[[Network, Sequence[int], Sequence[float]], Collective],
        dtype: torch.dtype,
        layout: ShardLayout,
    ) -> Collective:
        element = dtype.itemsize * self._gpu.miniature.ratio
        return kind(self._gpu.network, layout.ranks, [size * element for size in layout.sizes])


class _VirtualGathering:
    def __init__(self, real: Gathering, gpu: VirtualGpu, key: Key) -> None:
        self._real, self._gpu, self._key = real, gpu, key

    def wait(self) -> None:
        """See `Gathering.wait`."""
        passage = self._gpu.passage(self._key)
        self._real.wait()
        self._gpu.clock.wait_until(passage.stop_s)


class _Sums:
    """When a rank has summed up what came beside its passes: one thing after the other."""

    def __init__(self, gpu: VirtualGpu) -> None:
        self._gpu = gpu
        self._origin = self._until_s = 0.0

    def summed_s(self, arrived_s: float, seconds: float) -> float:
        """When something is summed up that took `seconds` from its arrival on."""
        if self._origin != self._gpu.clock.origin:
            self._origin, self._until_s = self._gpu.clock.origin, 0.0
        self._until_s = max(self._until_s, arrived_s) + seconds
        return self._until_s


class _VirtualReducing:
    def __init__(
        self, real: Reducing, gpu: VirtualGpu, key: Key, seconds: float, sums: _Sums
    ) -> None:
        self._real, self._gpu, self._key = real, gpu, key
        self._seconds, self._sums = seconds, sums

    def add_to(self, shard: Tensor) -> None:
        """See `Reducing.add_to`."""
        passage = self._gpu.passage(self._key)
        self._real.add_to(shard)
        self._gpu.clock.wait_until(self._sums.summed_s(passage.stop_s, self._seconds))


class VirtualTransport:
    """A transport whose messages also pass the virtual links, in the engine's order."""

    def __init__(self, real: Transport, gpu: VirtualGpu) -> None:
        self._real, self._gpu = real, gpu
        self._keys: dict[int, Key] = {}

    def begin(self, receives: Sequence[Receive]) -> None:
        """See `Transport.begin`."""
        own = self._gpu.rank
        self._keys = {each.tag: (each.peer, own, each.tag) for each in receives}
        self._gpu.wires.expect(self._gpu.clock.now_s, list(self._keys.values()), RECEIVES_AHEAD)
        self._real.begin(receives)

    def reached(self) -> None:
        """See `Transport.reached`."""
        self._gpu.wires.allow(self._gpu.clock.now_s)
        self._real.reached()

    def send(self, boundary: int, peer: int, tag: int, message: Message) -> None:
        """See `Transport.send`."""
        leaves = [leaf for leaf in message.leaves if isinstance(leaf, Tensor)]
        self._gpu.wires.send(
            self._gpu.clock.now_s,
            peer,
            (self._gpu.rank, peer, tag),
            sum(map(self._gpu.virtual_bytes, leaves)),
            ordered=True,
        )
        self._real.send(boundary, peer, tag, message)

    def take(self, tag: int) -> Message:
        """See `Transport.take`."""
        passage = self._gpu.passage(self._keys.pop(tag))
        message = self._real.take(tag)
        self._gpu.clock.wait_until(passage.stop_s)
        return message

    def end(self) -> None:
        """See `Transport.end`."""
        # Until the last message has left nothing more comes from here: others need not wait.
        self._gpu.wires.advance(inf)
        self._real.end()
