"""One rank at work: it reads its program and does what it says."""

import time
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch

from zorse_ds.runtime.ledger import MemoryLedger, MemoryReport, allocator_peak_bytes
from zorse_ds.runtime.losses import Criterion
from zorse_ds.runtime.optimizer import ShardedOptimizer
from zorse_ds.runtime.process_groups import ProcessGroup
from zorse_ds.runtime.stage import StageRunner
from zorse_ds.runtime.step import Batch, ForwardStep, Handlers, StepRule, TrainingStep
from zorse_ds.runtime.transport import Transport, receives_of
from zorse_ds.schedule.instructions import Instruction, describe
from zorse_ds.schedule.trace import Trace
from zorse_ds.simulator.timeline import Span, Timeline


@dataclass(frozen=True, slots=True)
class StepReport:
    """What a step did, the same on every rank but for the timeline."""

    loss: float
    """Mean over the targets of the whole global batch; NaN when it has none."""
    num_targets: float
    """Unmasked targets, or the sum of their weights."""
    grad_norm: float
    """Before clipping; NaN in evaluation."""
    skipped: str | None
    """Why no update was made, or None."""
    timeline: Timeline
    memory: MemoryReport | None = None
    """Where the worker keeps a ledger."""
    not_finite: tuple[int, ...] = ()
    """Stages with an infinite or NaN gradient. They alone made no update where stages step as soon
    as their backward ends; else nobody did, and `skipped` is "overflow"."""
    noticed: bool = False
    """Some rank was told to save and end; see `Worker.is_noticed`."""
    outputs: dict[int, Any] = field(default_factory=dict)
    """Last stage's outputs by micro-batch, where they were asked for."""


class Worker:
    """Executes programs for one rank. Knows plan, layers and wires, nothing of DeepSpeed.

    `runners` maps each own stage to its `StageRunner`, `groups` to its process group.
    """

    def __init__(
        self,
        rank: int,
        runners: Mapping[int, StageRunner],
        criterion: Criterion,
        transport: Transport,
        optimizer: ShardedOptimizer | None,
        groups: Mapping[int, ProcessGroup],
        world: ProcessGroup,
        device: torch.device,
        boundary_dtypes: Mapping[int, tuple[torch.dtype, torch.dtype]] | None = None,
    ) -> None:
        self.rank = rank
        self.runners = runners
        self.criterion = criterion
        self.transport = transport
        self.optimizer = optimizer
        self.groups = groups
        self.world = world
        self.device = device
        self.boundary_dtypes = boundary_dtypes or {}
        """Boundaries at which the dtype changes → (above, below)."""
        self.ledger: MemoryLedger | None = None
        """Set to count memory; costs time."""
        self.is_noticed = False
        """Set, by a signal's handler too, to tell all ranks with the step's sums."""
        self.now: tuple[Instruction, float] | None = None
        """The running instruction and its start by `time.perf_counter`; another thread may read."""

    @property
    def trained(self) -> ShardedOptimizer:
        """The optimizer of a worker that trains."""
        assert self.optimizer is not None, "this worker only evaluates"
        return self.optimizer

    def open_grads(self, stage: int) -> None:
        """Before a stage's first backward; a ledger is told, for the peak may come within it."""
        self.trained.open_grads(stage)
        if self.ledger is not None:
            self.ledger.refresh()

    def train(self, trace: Trace, batch: Batch, rule: StepRule) -> StepReport:
        """Run one training step. Collective: every rank of the plan."""
        self.trained.begin()
        step = TrainingStep(self, trace, batch, rule)
        timeline = self._execute(trace, step)
        outcome = step.outcome
        return StepReport(
            outcome.loss,
            outcome.num_targets,
            outcome.grad_norm,
            outcome.skipped,
            timeline,
            self._memory_report(),
            outcome.not_finite,
            step.is_noticed,
        )

    def evaluate(self, trace: Trace, batch: Batch, keep_outputs: bool = False) -> StepReport:
        """Run one forward-only batch. Collective: every rank of the plan."""
        step = ForwardStep(self, trace, batch, keep_outputs)
        with torch.no_grad():
            timeline = self._execute(trace, step)
        loss, count = step.agreed_loss()
        memory = self._memory_report()
        return StepReport(loss, count, float("nan"), None, timeline, memory, outputs=step.outputs)

    def _memory_report(self) -> MemoryReport | None:
        if self.ledger is None:
            return None
        self.ledger.report.allocator_peak_bytes = allocator_peak_bytes(self.device)
        return self.ledger.report

    def _execute(self, trace: Trace, step: ForwardStep) -> Timeline:
        program = trace.project(self.rank)
        handlers = step.handlers()
        self.transport.begin(receives_of(program))
        marks: list[tuple[Instruction, float, float]] = []
        clock = time.perf_counter
        run = self._run_counted if self.ledger is not None else self._run
        with nullcontext() if self.ledger is None else self.ledger.counting():
            origin = start = clock()
            for instruction in program:
                self.now = (instruction, start)
                run(handlers, instruction)
                stop = clock()
                marks.append((instruction, start - origin, stop - origin))
                start = stop
        self.transport.end()
        self.now = None
        return Timeline(tuple(_span(*mark) for mark in marks))

    def _run(self, handlers: Handlers, instruction: Instruction) -> None:
        try:
            handlers[type(instruction)](instruction)
        except Exception as error:
            error.add_note(f"on rank {self.rank} at {describe(instruction)}")
            raise

    def _run_counted(self, handlers: Handlers, instruction: Instruction) -> None:
        assert self.ledger is not None, "memory is counted only with a ledger"
        self.ledger.before(instruction)
        self._run(handlers, instruction)
        self.ledger.after()


def _span(instruction: Instruction, start_s: float, stop_s: float) -> Span:
    stage = getattr(instruction, "stage", None)
    micro_batch = getattr(instruction, "micro_batch", None)
    return Span(instruction.rank, type(instruction).__name__, start_s, stop_s, stage, micro_batch)
