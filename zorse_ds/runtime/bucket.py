"""One flat lot of trainable parameters with this rank's master shard of it."""

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn import Parameter

from zorse_ds.core.plan import GpuGroup
from zorse_ds.core.shards import ShardLayout, cut_into_shards
from zorse_ds.ranges import Range
from zorse_ds.runtime.flat import FlatParameters
from zorse_ds.runtime.host_memory import HostMemory
from zorse_ds.runtime.process_groups import ProcessGroup, Reducing, gather_shards
from zorse_ds.runtime.sharded import ShardedFlat

_ROW = 1024
"""Elements that are summed in float32."""


class Bucket:
    """Parameters of one stage, one param group and one dtype.

    `master` is what the optimizer steps: at `zero_level` 0 the whole vector, else the own shard.
    It is the parameters' own memory unless they are of lower precision or `host` keeps it. From
    level 2 gradients are kept as shards alone, at level 3 parameters too (`sharded` is set).
    """

    def __init__(
        self,
        flat: FlatParameters,
        group: GpuGroup,
        process_group: ProcessGroup,
        originals: Mapping[str, Tensor],
        host: HostMemory | None = None,
        wire: torch.dtype | None = None,
    ) -> None:
        self.flat = flat
        self.wire = wire
        """What gradients travel in to be summed up; None: what they accumulate in."""
        self.layout: ShardLayout = cut_into_shards(flat.numel, group)
        self.zero_level = group.zero_level
        self._group = process_group
        self._host = host
        self.own = self.layout.of(process_group.rank)
        self.window = self.own if self.zero_level else Range(0, flat.numel)
        self.counted = self.own if not self.zero_level else Range(0, self.own.size)
        """The part of the master that this rank counts in the gradient norm."""
        separate = self._separate_master(originals)
        self.sharded: ShardedFlat | None = None
        if self.zero_level == 3:
            self.sharded = ShardedFlat(flat, self.layout, process_group, host)
        self.master = Parameter(self._own_memory() if separate is None else separate)

    def reduce(self) -> None:
        """Collective over the group: sum gradients; the master's part becomes its gradient."""
        grad = self.flat.grad
        assert grad is not None, "gradients are open from the first backward on"
        shard = self._group.reduce_shards(grad, self.layout, self.wire)
        if self.zero_level >= 2:
            self.master.grad = shard if self._host is None else self._host.store(shard)
            self.flat.drop_grads()
            return
        if shard is not grad:
            grad[self.own.as_slice()] = shard
        if self.zero_level == 0:
            gather_shards(self._group, grad, self.layout)
        own = grad[self.window.as_slice()]
        self.master.grad = own if self._host is None else self._host.store(own)

    def start_reduce(self) -> Reducing:
        """Collective over the group: start to sum what `flat.grad` holds of one micro-batch."""
        grad = self.flat.grad
        assert grad is not None, "somebody took the gradients, or zeros"
        return self._group.start_reduce(grad, self.layout, self.wire or grad.dtype)

    def finish_reduce(self, reducing: Reducing) -> None:
        """Add the own shard of a sum to the master's gradient."""
        if self.master.grad is None:
            self.master.grad = torch.zeros_like(self.master)
        reducing.add_to(self.master.grad)
        self.flat.drop_grads()

    def sum_of_squares(self) -> float:
        """Of the gradients this rank answers for: over all ranks each element counts once."""
        if self.master.grad is None or not self.counted.size:
            return 0.0
        return sum_of_squares(self.master.grad[self.counted.as_slice()])

    def publish(self) -> None:
        """Collective over the group below level 3: stepped masters go into the parameters."""
        if self.master_is_separate:
            self._own_memory().copy_(self.master.detach())
        if self.zero_level in (1, 2):
            gather_shards(self._group, self.flat.data, self.layout)

    @property
    def master_is_separate(self) -> bool:
        """The master has memory of its own beside the parameters'."""
        return self.master.data_ptr() != self._own_memory().data_ptr()

    def _own_memory(self) -> Tensor:
        """The parameters that the master stands for."""
        if self.sharded is not None:
            return self.sharded.shard
        return self.flat.data[self.window.as_slice()]

    def _separate_master(self, originals: Mapping[str, Tensor]) -> Tensor | None:
        """A copy with all the bits there were, or None where the parameters' own memory serves."""
        wanted = self.flat.grad_dtype
        if wanted == self.flat.dtype and (self._host is None or self.zero_level == 3):
            return None
        master = self.flat.data[self.window.as_slice()].to(wanted)
        for name, window in zip(self.flat.names, self.flat.windows, strict=True):
            common = window.intersect(self.window)
            if name in originals and common.size:
                source = originals[name].reshape(-1)[common.relative_to(window.start).as_slice()]
                master[common.relative_to(self.window.start).as_slice()] = source
        return master if self._host is None else self._host.store(master)


def sum_of_squares(values: Tensor) -> float:
    """Of a flat tensor, row by row: one float32 sum over 10⁸ elements may be a percent short."""
    whole = len(values) // _ROW * _ROW
    rows = torch.linalg.vector_norm(values[:whole].view(-1, _ROW), dim=1)
    rest = torch.linalg.vector_norm(values[whole:])
    return float(rows.double().square().sum() + rest.double().square())
