"""The state of one step on one rank, and what each instruction does to it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from zorse_ds.core.layout import Transfer
from zorse_ds.errors import ModelError
from zorse_ds.ranges import Range
from zorse_ds.runtime.losses import LossSum
from zorse_ds.runtime.transport import is_forward, tag_of
from zorse_ds.runtime.values import Message, converted, extent_of, trim
from zorse_ds.schedule import instructions as kinds
from zorse_ds.schedule.instructions import (
    CollectiveInstruction,
    ComputeInstruction,
    Instruction,
    TransferInstruction,
)
from zorse_ds.schedule.trace import Trace

if TYPE_CHECKING:
    from zorse_ds.runtime.worker import Worker

Handlers = dict[type[Instruction], Callable[[Any], None]]


class Batch(Protocol):
    """One global batch; every rank holds the same one and reads only what it needs."""

    def load(self, samples: Range) -> tuple[Any, Any]:
        """`(inputs, labels)` of the samples, collated, on the rank's device."""


@dataclass(frozen=True, slots=True)
class StepRule:
    """How gradients become an update; the same on every rank."""

    clip_norm: float = 0.0
    """Largest gradient norm; 0 = no clipping."""
    loss_scale: float = 1.0
    """What the loss is multiplied by for backward (fp16), and gradients divided by after."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What all ranks agreed on at the end of a training step."""

    loss: float
    num_targets: float
    grad_norm: float
    """Of the true gradients, before clipping."""
    skipped: str | None
    factor: float
    """What accumulated gradients are multiplied by for the update."""
    not_finite: tuple[int, ...] = ()
    """See `StepReport.not_finite`."""


class ForwardStep:
    """Load, run forward and hand on; at the last stage sum the losses."""

    def __init__(
        self, worker: Worker, trace: Trace, batch: Batch, keeps_outputs: bool = False
    ) -> None:
        self.worker = worker
        self.trace = trace
        self.batch = batch
        self.keeps_outputs = keeps_outputs
        self.last_stage = trace.layout.num_stages - 1
        self.loaded: dict[int, tuple[Any, Any]] = {}
        self.outbox: dict[int, Message] = {}
        self.losses = LossSum()
        self.outputs: dict[int, Any] = {}

    def handlers(self) -> Handlers:
        """Instruction type → what to do."""
        return {
            kinds.LoadMicroBatch: self.load,
            kinds.ForwardPass: self.forward,
            kinds.SendActivation: self.send,
            kinds.RecvActivation: self.receive,
            kinds.PrefetchParams: self.prefetch,
            kinds.UnshardParams: self.unshard,
            kinds.ReshardParams: self.reshard,
        }

    def prefetch(self, at: kinds.PrefetchParams) -> None:
        """Start to bring the own shards of a stage from host memory."""
        if self.worker.optimizer is not None:
            self.worker.optimizer.prefetch(at.stage)

    def unshard(self, at: CollectiveInstruction) -> None:
        """Collective over the stage's group: start to gather its parameters."""
        if self.worker.optimizer is not None:
            self.worker.optimizer.start_gather(at.index)

    def reshard(self, at: kinds.ReshardParams) -> None:
        """Drop a stage's full parameters."""
        if self.worker.optimizer is not None:
            self.worker.optimizer.drop(at.stage)

    def load(self, at: ComputeInstruction) -> None:
        """Read a micro-batch, unless its labels were read to count them."""
        if at.micro_batch not in self.loaded:
            self.loaded[at.micro_batch] = self.batch.load(self.samples(at))

    def forward(self, at: ComputeInstruction) -> None:
        """Join what arrived, run the layers, cut what leaves; at the last stage the loss."""
        if self.worker.optimizer is not None:
            self.worker.optimizer.finish_gather(at.stage)
        runner = self.worker.runners[at.stage]
        value = self._input(at)
        output = runner.forward(at.micro_batch, value)
        if at.stage == self.last_stage:
            self._finish_forward(at, output)
        else:
            start = self.samples(at).start
            for transfer in self._outgoing(at):
                window = transfer.samples.relative_to(start)
                message = runner.outgoing(at.micro_batch, window)
                if at.stage in self.worker.boundary_dtypes:
                    message = converted(message, *self.worker.boundary_dtypes[at.stage])
                self.outbox[tag_of(transfer, forward=True)] = message
        runner.drop_outputs(at.micro_batch)
        self._after_forward(at)

    def send(self, at: TransferInstruction) -> None:
        """Start to send what was cut off right after its computation."""
        transfer, forward = at.transfer, is_forward(at)
        tag = tag_of(transfer, forward)
        peer = transfer.target_rank if forward else transfer.source_rank
        self.worker.transport.send(transfer.boundary, peer, tag, self.outbox.pop(tag))

    def receive(self, at: TransferInstruction) -> None:
        """One more receive may be under way; who needs the message waits for it."""
        self.worker.transport.reached()

    def agreed_loss(self) -> tuple[float, float]:
        """Collective over the world: mean loss (NaN without targets) and number of targets."""
        local = [self.losses.total, float(self.losses.num_targets)]
        sums = torch.tensor(local, dtype=torch.float64, device=self.worker.device)
        self.worker.world.all_reduce(sums)
        loss_sum, count = sums.tolist()
        return (loss_sum / count if count else float("nan")), count

    def samples(self, at: ComputeInstruction) -> Range:
        """The samples of the global batch that an instruction works on."""
        return self.trace.layout.micro_batches[at.stage][at.micro_batch].samples

    def _input(self, at: ComputeInstruction) -> Any:
        runner = self.worker.runners[at.stage]
        samples = self.samples(at)
        if at.stage == 0:
            inputs, _ = self.loaded[at.micro_batch]
            if self.last_stage != 0:
                del self.loaded[at.micro_batch]
            runner.enter_first(at.micro_batch, samples.size, extent_of(inputs))
            return inputs
        arrived = [
            (
                transfer.index,
                transfer.samples.relative_to(samples.start),
                self._take(transfer, True),
            )
            for transfer in self.trace.layout.incoming[at.stage, at.micro_batch]
        ]
        return runner.enter(at.micro_batch, samples.size, arrived, torch.is_grad_enabled())

    def _take(self, transfer: Transfer, forward: bool) -> Message:
        tag = tag_of(transfer, forward)
        if transfer.is_local:
            return self.outbox.pop(tag)
        return self.worker.transport.take(tag)

    def _outgoing(self, at: ComputeInstruction) -> list[Transfer]:
        return self.trace.layout.outgoing.get((at.stage, at.micro_batch), [])

    def _finish_forward(self, at: ComputeInstruction, output: Any) -> None:
        inputs, labels = self.loaded.pop(at.micro_batch)
        held = self.worker.runners[at.stage].held[at.micro_batch]
        output = trim(output, held.extent, extent_of(inputs), labels)
        if self.keeps_outputs:
            self.outputs[at.micro_batch] = output
        loss_sum, count = self.worker.criterion(output, labels, held.size)
        self.losses.add(loss_sum, count)
        self._loss_made(at, loss_sum, count)

    def _loss_made(self, at: ComputeInstruction, loss_sum: Tensor, count: float) -> None:
        """Evaluation needs the sum alone."""

    def _after_forward(self, at: ComputeInstruction) -> None:
        self.worker.runners[at.stage].release(at.micro_batch)


class TrainingStep(ForwardStep):
    """Adds backward, reductions and the update."""

    def __init__(self, worker: Worker, trace: Trace, batch: Batch, rule: StepRule) -> None:
        super().__init__(worker, trace, batch)
        self.rule = rule
        self.divisor = float(trace.plan.global_batch_size)
        """What losses are divided by for backward; the update corrects it if targets differ."""
        self.own_counted: float | None = None
        """Targets of this rank's micro-batches, counted before the first backward."""
        self.counted: float | None = None
        """Targets of the step, on ranks that know them before the first backward."""
        self.roots: dict[int, Tensor | None] = {}
        self.outcome = Outcome(float("nan"), 0, float("nan"), None, 1.0)
        self.is_noticed = False

    def handlers(self) -> Handlers:
        """See `ForwardStep.handlers`."""
        return super().handlers() | {
            kinds.CountTargets: self.count_targets,
            kinds.BackwardPass: self.backward,
            kinds.SendGrad: self.send,
            kinds.RecvGrad: self.receive,
            kinds.ReduceTiedGrads: self.reduce_tied,
            kinds.ReduceGrads: self.reduce,
            kinds.ReduceGradNorm: self.decide,
            kinds.OptimizerStep: self.optimizer_step,
            kinds.BroadcastTiedParams: self.broadcast_tied,
        }

    def count_targets(self, at: CollectiveInstruction) -> None:
        """Collective, if the criterion can tell from labels alone.

        Over the last stage's group; over the world where stages step before the step's end.
        """
        count = self.worker.criterion.count_targets
        if count is None:
            assert not self.trace.interleaved, "interleaved steps need a loss with count_targets"
            return
        own = 0.0
        for micro_batch in self.trace.layout.micro_batches[at.index]:
            if micro_batch.rank == self.worker.rank:
                self.loaded[micro_batch.index] = self.batch.load(micro_batch.samples)
                own += count(self.loaded[micro_batch.index][1])
        self.own_counted = own
        total = torch.tensor([own], dtype=torch.float64, device=self.worker.device)
        interleaved = self.trace.interleaved
        (self.worker.world if interleaved else self.worker.groups[at.index]).all_reduce(total)
        self.counted = float(total)
        self.divisor = self.counted or 1.0

    def backward(self, at: ComputeInstruction) -> None:
        """Join arrived gradients, go back through the layers, cut what leaves."""
        self.worker.trained.finish_gather(at.stage)
        self.worker.open_grads(at.stage)
        runner = self.worker.runners[at.stage]
        if at.stage == self.last_stage:
            runner.backward_from_loss(at.micro_batch, self.roots.pop(at.micro_batch))
        else:
            start = self.samples(at).start
            grads = [
                (transfer.samples.relative_to(start), self._take(transfer, False))
                for transfer in self._outgoing(at)
            ]
            runner.backward(at.micro_batch, grads)
        for transfer in self.trace.layout.incoming.get((at.stage, at.micro_batch), []):
            message = runner.outgoing_grad(at.micro_batch, transfer.index)
            if transfer.boundary in self.worker.boundary_dtypes:
                above, below = self.worker.boundary_dtypes[transfer.boundary]
                message = converted(message, below, above)
            self.outbox[tag_of(transfer, forward=False)] = message
        runner.release(at.micro_batch)

    def reduce_tied(self, at: CollectiveInstruction) -> None:
        """Collective; see `ShardedOptimizer.reduce_tied`."""
        self.worker.trained.reduce_tied(at.index)

    def reduce(self, at: CollectiveInstruction) -> None:
        """Collective; see `ShardedOptimizer.reduce`."""
        self.worker.trained.reduce(at.index, self.trace.layout.num_rounds(at.index))

    def decide(self, at: CollectiveInstruction) -> None:
        """Collective over the world: loss, norm, and whether and by which factor to update."""
        num_stages = self.trace.layout.num_stages
        counted = self.losses.num_targets if self.own_counted is None else self.own_counted
        miscounted = abs(counted - self.losses.num_targets)
        device, is_noticed = self.worker.device, self.worker.is_noticed
        sums = self.worker.trained.agree(self.losses, miscounted, num_stages, device, is_noticed)
        self.is_noticed = sums.is_noticed
        count = sums.num_targets
        if sums.miscounted > 1e-6 * count:
            raise ModelError(
                f"count_targets and the loss function differ by {sums.miscounted:g} targets in one "
                "step; expected the same number from both"
            )
        if not count:
            self.outcome = Outcome(float("nan"), 0, 0.0, "no targets", 0.0)
            return
        unit = self.divisor_of_all(count) / (count * self.rule.loss_scale)
        norm = sums.grad_norm * unit
        clip = self.rule.clip_norm
        factor = unit * min(1.0, clip / (norm + 1e-6)) if clip else unit
        enough = num_stages if self.trace.interleaved else 1
        skipped = "overflow" if len(sums.not_finite) >= enough else None
        loss = sums.loss_sum / count
        self.outcome = Outcome(loss, count, norm, skipped, factor, sums.not_finite)

    def divisor_of_all(self, num_targets: float) -> float:
        """The divisor that the last stage used, as every rank can tell it."""
        counted = self.worker.criterion.count_targets is not None
        return num_targets if counted else self.divisor

    def optimizer_step(self, at: CollectiveInstruction) -> None:
        """Collective; see `ShardedOptimizer.step`. All ranks skip alike."""
        if self.trace.interleaved:
            self._step_at_once(at.index)
        elif self.outcome.skipped is None:
            self.worker.trained.step(at.index, self.outcome.factor)

    def broadcast_tied(self, at: CollectiveInstruction) -> None:
        """Collective; see `ShardedOptimizer.broadcast_tied`."""
        if self.outcome.skipped is None and self.counted != 0:
            self.worker.trained.broadcast_tied(at.index)

    def _step_at_once(self, stage: int) -> None:
        """Collective over the stage's group: update unless its own gradients forbid it."""
        assert self.rule == StepRule(), "clipping and loss scaling need the norm of all stages"
        squares = torch.tensor([self.worker.trained.squares(stage)], dtype=torch.float64)
        squares = squares.to(self.worker.device)
        self.worker.groups[stage].all_reduce(squares)
        if self.counted and bool(torch.isfinite(squares)):
            self.worker.trained.step(stage, 1.0)

    def _loss_made(self, at: ComputeInstruction, loss_sum: Tensor, count: float) -> None:
        if (
            count
            and not loss_sum.requires_grad
            and self.worker.runners[at.stage].has_grad(at.micro_batch)
        ):
            raise ModelError(
                "the loss has no gradient although the outputs have one; expected a loss made of "
                "them by differentiable operations"
            )
        scale = self.rule.loss_scale / self.divisor
        self.roots[at.micro_batch] = loss_sum * scale if count else None

    def _after_forward(self, at: ComputeInstruction) -> None:
        """What backward needs stays."""
