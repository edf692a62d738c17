"""Optimizer state, gradients and parameters cut into uneven shards inside each group (ZeRO 0-2).

Works around any optimizer that treats elements one by one: it sees flat master shards, never the
model's parameters.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from zorse_ds.core.plan import GpuGroup
from zorse_ds.core.shards import ShardLayout, cut_into_shards
from zorse_ds.ranges import Range
from zorse_ds.runtime.flat import FlatParameters, NamedParameter, master_dtype
from zorse_ds.runtime.process_groups import ProcessGroup
from zorse_ds.runtime.ties import TiedParameters

ParamGroup = dict[str, Any]
OptimizerFactory = Callable[[list[ParamGroup]], torch.optim.Optimizer]


class Bucket:
    """Parameters of one stage, one param group and one dtype, with this rank's master shard."""

    def __init__(
        self,
        flat: FlatParameters,
        group: GpuGroup,
        process_group: ProcessGroup,
        originals: Mapping[str, Tensor],
    ) -> None:
        self.flat = flat
        self.layout: ShardLayout = cut_into_shards(flat.numel, group)
        self.zero_level = group.zero_level
        self._group = process_group
        own = self.layout.of(process_group.rank)
        self.window = own if self.zero_level else Range(0, flat.numel)
        self.counted = own if not self.zero_level else Range(0, own.size)
        """The part of the master that this rank counts in the gradient norm."""
        self.master = Parameter(self._initial_master(originals))

    def reduce(self) -> None:
        """Collective over the group: sum gradients; the master's part becomes its gradient."""
        grad = self.flat.grad
        assert grad is not None, "gradients are reduced once, after the last backward"
        shard = self._group.reduce_shards(grad, self.layout)
        own = self.layout.of(self._group.rank)
        if self.zero_level == 2:
            self.master.grad = shard
            self.flat.drop_grads()
            return
        if shard is not grad:
            grad[own.as_slice()] = shard
        if self.zero_level == 0:
            self._group.gather_shards(grad, self.layout)
        self.master.grad = grad[self.window.as_slice()]

    def sum_of_squares(self) -> float:
        """Of the gradients this rank answers for: over all ranks each element counts once."""
        if self.master.grad is None or not self.counted.size:
            return 0.0
        part = self.master.grad[self.counted.as_slice()]
        return float(torch.linalg.vector_norm(part).double().square())

    def publish(self) -> None:
        """Collective over the group: bring the stepped masters into every rank's parameters."""
        own = self.flat.data[self.window.as_slice()]
        if own.data_ptr() != self.master.data_ptr():
            own.copy_(self.master.detach())
        if self.zero_level:
            self._group.gather_shards(self.flat.data, self.layout)

    def share_initial(self) -> None:
        """Collective over the group: every rank takes each shard from its owner.

        A master that is a copy and spans the whole vector needs the same.
        """
        self._group.gather_shards(self.flat.data, self.layout)
        if self.zero_level == 0 and self.master.dtype != self.flat.dtype:
            self._group.gather_shards(self.master.data, self.layout)

    def _initial_master(self, originals: Mapping[str, Tensor]) -> Tensor:
        """A view where no conversion is needed, else a copy with all the bits there were."""
        own = self.flat.data[self.window.as_slice()]
        wanted = master_dtype(self.flat.dtype)
        if wanted == self.flat.dtype:
            return own
        master = own.to(wanted)
        for name, window in zip(self.flat.names, self.flat.windows, strict=True):
            common = window.intersect(self.window)
            if name in originals and common.size:
                source = originals[name].reshape(-1)[common.relative_to(window.start).as_slice()]
                master[common.relative_to(self.window.start).as_slice()] = source
        return master


@dataclass(frozen=True, slots=True)
class StepSums:
    """What all ranks agree on before a step, summed over the world."""

    grad_norm: float
    """Norm of all gradients as they are, before any factor; not finite if one of them is not."""
    loss_sum: float
    num_targets: float

    @property
    def is_finite(self) -> bool:
        """No gradient of any rank is infinite or NaN."""
        return math.isfinite(self.grad_norm)


class ShardedOptimizer:
    """One inner optimizer over the master shards of all stages of one rank.

    `stages` maps each own stage to its buckets; `param_groups` are the user's groups without
    their parameters, and `assignment` says which group a parameter name belongs to.
    """

    def __init__(
        self,
        stages: Mapping[int, Sequence[Bucket]],
        ties: Mapping[int, TiedParameters],
        group_options: Sequence[ParamGroup],
        group_of: Callable[[Bucket], int],
        make_optimizer: OptimizerFactory,
        world: ProcessGroup,
    ) -> None:
        self.stages = stages
        self.ties = ties
        self._world = world
        groups = [{**options, "params": []} for options in group_options]
        for bucket in self.buckets:
            groups[group_of(bucket)]["params"].append(bucket.master)
        for group in groups:
            if not group["params"]:
                group["params"] = [Parameter(torch.zeros(0))]
        self.inner = make_optimizer(groups)

    @property
    def buckets(self) -> list[Bucket]:
        """All buckets of this rank, stage by stage."""
        return [bucket for buckets in self.stages.values() for bucket in buckets]

    def open_grads(self) -> None:
        """Zero all gradients at the start of a step."""
        for bucket in self.buckets:
            bucket.master.grad = None
            bucket.flat.open_grads()
        for tie in self.ties.values():
            tie.open_grads()

    def reduce(self, stage: int) -> None:
        """Collective over the stage's group; see `Bucket.reduce`."""
        for bucket in self.stages[stage]:
            bucket.reduce()

    def reduce_tied(self, tie: int) -> None:
        """Collective over the tie's ranks: copies' gradients go to the owning stage.

        A tie whose parameters are frozen is not in `ties`, on any rank.
        """
        if tie in self.ties:
            self.ties[tie].reduce_grads()

    def agree(self, loss_sum: float, num_targets: float, device: torch.device) -> StepSums:
        """Collective over the world, on the rank's device: the sums that decide about the step."""
        squares = sum(bucket.sum_of_squares() for bucket in self.buckets)
        sums = torch.tensor([squares, loss_sum, num_targets], dtype=torch.float64, device=device)
        self._world.all_reduce(sums)
        squares, loss_sum, num_targets = sums.tolist()
        return StepSums(math.sqrt(squares), loss_sum, num_targets)

    def step(self, stage: int, factor: float) -> None:
        """Collective over the stage's group: scale gradients by `factor`, update, gather."""
        hidden = self._hide_other_grads(stage)
        for bucket in self.stages[stage]:
            if factor != 1.0 and bucket.master.grad is not None:
                bucket.master.grad.mul_(factor)
        self.inner.step()
        for bucket in self.stages[stage]:
            bucket.publish()
            bucket.master.grad = None
        for bucket, grad in hidden:
            bucket.master.grad = grad

    def broadcast_tied(self, tie: int) -> None:
        """Collective over the tie's ranks: the owner's new values go to all copies."""
        if tie in self.ties:
            self.ties[tie].broadcast_values()

    def drop_grads(self) -> None:
        """Forget all gradients (a skipped step)."""
        for bucket in self.buckets:
            bucket.master.grad = None

    def _hide_other_grads(self, stage: int) -> list[tuple[Bucket, Tensor | None]]:
        """Optimizers leave alone what has no gradient: so one stage steps at a time."""
        others = [b for at, buckets in self.stages.items() if at != stage for b in buckets]
        hidden = [(bucket, bucket.master.grad) for bucket in others]
        for bucket in others:
            bucket.master.grad = None
        return hidden


def cut_into_buckets(
    parameters: Sequence[NamedParameter], group_of: Callable[[Parameter], int | None]
) -> list[tuple[int, FlatParameters]]:
    """Trainable parameters by (param group, dtype), each lot as one flat vector."""
    lots: dict[tuple[int, torch.dtype], list[NamedParameter]] = {}
    for named in parameters:
        group = group_of(named.parameter)
        assert group is not None, "only parameters of a group are trained"
        lots.setdefault((group, named.parameter.dtype), []).append(named)
    return [(group, FlatParameters(lot)) for (group, _), lot in lots.items()]
