"""Optimizer state, gradients and parameters cut into uneven shards inside each group (ZeRO 0–3).

Works around any optimizer that treats elements one by one: it sees flat master shards, never the
model's parameters.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from zorse_ds.errors import ModelError
from zorse_ds.runtime.bucket import Bucket
from zorse_ds.runtime.flat import FlatParameters, NamedParameter
from zorse_ds.runtime.host_memory import HostMemory
from zorse_ds.runtime.ledger import Purpose
from zorse_ds.runtime.losses import LossSum
from zorse_ds.runtime.process_groups import ProcessGroup
from zorse_ds.runtime.rounds import Rounds
from zorse_ds.runtime.sharded import ShardedFlat
from zorse_ds.runtime.ties import TiedParameters

ParamGroup = dict[str, Any]
OptimizerFactory = Callable[[list[ParamGroup]], torch.optim.Optimizer]


@dataclass(frozen=True, slots=True)
class StageParameters:
    """All parameters of one stage on one rank."""

    buckets: tuple[Bucket, ...]
    copies: tuple[FlatParameters, ...]
    """Trainable copies of parameters that another stage owns."""
    sharded: tuple[ShardedFlat, ...]
    """What is whole only while the stage runs: of buckets, copies and frozen parameters."""
    rounds: Rounds | None = None
    """Set where gradients are summed after every micro-batch."""


@dataclass(frozen=True, slots=True)
class StepSums:
    """What all ranks agree on before a step, summed over the world."""

    grad_norm: float
    """Norm of all gradients as they are, before any factor; not finite if one of them is not."""
    loss_sum: float
    num_targets: float
    miscounted: float
    """By how much `count_targets` was wrong, over all ranks."""
    not_finite: tuple[int, ...]
    """Stages with a gradient that is infinite or NaN on some rank."""
    is_noticed: bool
    """Some rank was told to save and end."""


class ShardedOptimizer:
    """One inner optimizer over the master shards of all stages of one rank.

    `stages` maps each own stage to its parameters; `group_options` are the user's param groups
    without their parameters, and `group_of` says which of them a bucket belongs to.
    """

    def __init__(
        self,
        stages: Mapping[int, StageParameters],
        ties: Mapping[int, TiedParameters],
        group_options: Sequence[ParamGroup],
        group_of: Callable[[Bucket], int],
        make_optimizer: OptimizerFactory,
        world: ProcessGroup,
        host: HostMemory | None = None,
    ) -> None:
        self.stages = stages
        self.ties = ties
        self._world = world
        self._host = host
        self._squares: dict[int, float] = {}
        self._open: set[int] = set()
        self._gathering: set[int] = set()
        self._whole: set[int] = set()
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
        return [bucket for own in self.stages.values() for bucket in own.buckets]

    def tensors(self) -> Iterator[tuple[Purpose, Tensor]]:
        """What this rank holds between instructions on its device, by purpose."""
        for own in self.stages.values():
            for sharded in own.sharded:
                yield from (("parameters", sharded.flat.data), ("parameters", sharded.shard))
            for flat in (*(bucket.flat for bucket in own.buckets), *own.copies):
                yield "parameters", flat.data
                if flat.grad is not None:
                    yield "gradients", flat.grad
            for bucket in own.buckets:
                if bucket.master_is_separate:
                    yield "optimizer", bucket.master.data
                if bucket.master.grad is not None:
                    yield "gradients", bucket.master.grad
        for state in self.inner.state.values():
            yield from (("optimizer", each) for each in state.values() if torch.is_tensor(each))

    def begin(self) -> None:
        """Start a step: no stage has gradients yet."""
        self._open.clear()
        self._squares.clear()
        for bucket in self.buckets:
            bucket.master.grad = None
        for own in self.stages.values():
            if own.rounds is not None:
                own.rounds.begin()

    def prefetch(self, stage: int) -> None:
        """Start to bring a stage's own shards from host memory."""
        for sharded in self.stages[stage].sharded:
            sharded.prefetch()

    def start_gather(self, stage: int) -> None:
        """Collective over the stage's group: start to make its parameters whole."""
        for sharded in self.stages[stage].sharded:
            sharded.start_gather()
        self._gathering.add(stage)

    def finish_gather(self, stage: int) -> None:
        """Wait for a gather that was started; at once when there is none."""
        if stage in self._gathering:
            self._gathering.discard(stage)
            for sharded in self.stages[stage].sharded:
                sharded.finish_gather()

    def drop(self, stage: int) -> None:
        """Free a stage's parameters but for the own shards."""
        self._gathering.discard(stage)
        for sharded in self.stages[stage].sharded:
            sharded.drop()

    @contextmanager
    def whole(self, stage: int) -> Iterator[None]:
        """Collective over the stage's group: its parameters are whole inside the `with`.

        May be nested. Raises `ModelError` for a stage that this rank does not host.
        """
        if stage not in self.stages:
            raise ModelError(
                f"stage {stage} is not on this rank, which hosts {sorted(self.stages)}; expected "
                "one of them"
            )
        if stage in self._whole:
            yield
            return
        self._whole.add(stage)
        self.start_gather(stage)
        self.finish_gather(stage)
        try:
            yield
        finally:
            self._whole.discard(stage)
            self.drop(stage)

    def open_grads(self, stage: int) -> None:
        """Before each backward of a stage: zero its gradients, the first time of a step.

        Collective over the group where gradients are summed after every micro-batch.
        """
        rounds = self.stages[stage].rounds
        if rounds is not None:
            rounds.open()
        elif stage not in self._open:
            self._open.add(stage)
            own = self.stages[stage]
            for flat in (*(bucket.flat for bucket in own.buckets), *own.copies):
                flat.open_grads()

    def reduce(self, stage: int, num_rounds: int = 1) -> None:
        """Collective over the stage's group; see `Bucket.reduce`.

        `num_rounds`: micro-batches of the rank that has most, where each is summed by itself.
        """
        rounds = self.stages[stage].rounds
        if rounds is not None:
            rounds.end(num_rounds)
        else:
            self._zero_unless_open(stage)
            for bucket in self.stages[stage].buckets:
                bucket.reduce()
        squares = (bucket.sum_of_squares() for bucket in self.stages[stage].buckets)
        self._squares[stage] = sum(squares)

    def squares(self, stage: int) -> float:
        """This rank's part of the squared gradient norm of a stage that was reduced."""
        return self._squares[stage]

    def reduce_tied(self, tie: int) -> None:
        """Collective over the tie's ranks: copies' gradients go to the owning stage.

        A tie whose parameters are frozen is not in `ties`, on any rank.
        """
        if tie in self.ties:
            if self.ties[tie].owner in self.stages:
                self._zero_unless_open(self.ties[tie].owner)
            self.ties[tie].reduce_grads()

    def agree(
        self,
        losses: LossSum,
        miscounted: float,
        num_stages: int,
        device: torch.device,
        is_noticed: bool = False,
    ) -> StepSums:
        """Collective over the world, on the rank's device: the sums that decide about the step."""
        own = [self._squares.get(stage, 0.0) for stage in range(num_stages)]
        own += [losses.total, losses.num_targets, miscounted, float(is_noticed)]
        sums = torch.tensor(own, dtype=torch.float64, device=device)
        self._world.all_reduce(sums)
        *squares, loss_sum, num_targets, miscounted, notices = sums.tolist()
        not_finite = tuple(at for at, own in enumerate(squares) if not math.isfinite(own))
        norm = math.sqrt(sum(squares))
        return StepSums(norm, loss_sum, num_targets, miscounted, not_finite, notices > 0)

    def step(self, stage: int, factor: float) -> None:
        """Collective over the stage's group: scale gradients by `factor`, update, gather."""
        hidden = self._hide_other_grads(stage)
        for bucket in self.stages[stage].buckets:
            if factor != 1.0 and bucket.master.grad is not None:
                bucket.master.grad.mul_(factor)
        self.inner.step()
        self._count_host_state()
        for bucket in self.stages[stage].buckets:
            bucket.publish()
            bucket.master.grad = None
        for bucket, grad in hidden:
            bucket.master.grad = grad

    def republish(self) -> None:
        """Collective over the world: parameters and tied copies take the masters' values."""
        for bucket in self.buckets:
            bucket.publish()
        for tie in sorted(self.ties):
            self.broadcast_tied(tie)

    def load_inner(self, state: Mapping[Parameter, dict[str, Any]]) -> None:
        """Replace the inner optimizer's state: master → what it keeps for it."""
        packed = self.inner.state_dict()
        numbers = {
            id(parameter): number
            for group, own in zip(self.inner.param_groups, packed["param_groups"], strict=True)
            for parameter, number in zip(group["params"], own["params"], strict=True)
        }
        packed["state"] = {numbers[id(master)]: kept for master, kept in state.items()}
        self.inner.load_state_dict(packed)
        self._count_host_state()

    def broadcast_tied(self, tie: int) -> None:
        """Collective over the tie's ranks: the owner's new values go to all copies."""
        if tie in self.ties:
            self.ties[tie].broadcast_values()

    def _count_host_state(self) -> None:
        """Optimizers make their state themselves, where the masters are."""
        if self._host is not None:
            for state in self.inner.state.values():
                for each in filter(torch.is_tensor, state.values()):
                    self._host.adopt(each)

    def _zero_unless_open(self, stage: int) -> None:
        """A rank without micro-batches has opened no gradients; it adds zeros."""
        if stage not in self._open:
            self._open.add(stage)
            for bucket in self.stages[stage].buckets:
                bucket.flat.zero_grads()

    def _hide_other_grads(self, stage: int) -> list[tuple[Bucket, Tensor | None]]:
        """Optimizers leave alone what has no gradient: so one stage steps at a time."""
        others = [b for at, own in self.stages.items() if at != stage for b in own.buckets]
        hidden = [(bucket, bucket.master.grad) for bucket in others]
        for bucket in others:
            bucket.master.grad = None
        return hidden


def cut_into_buckets(
    parameters: Sequence[NamedParameter],
    group_of: Callable[[Parameter], int | None],
    accumulates: bool = True,
) -> list[tuple[int, FlatParameters]]:
    """Trainable parameters by (param group, dtype), each lot as one flat vector."""
    lots: dict[tuple[int, torch.dtype], list[NamedParameter]] = {}
    for named in parameters:
        group = group_of(named.parameter)
        assert group is not None, "only parameters of a group are trained"
        lots.setdefault((group, named.parameter.dtype), []).append(named)
    return [(group, FlatParameters(lot, accumulates)) for (group, _), lot in lots.items()]
