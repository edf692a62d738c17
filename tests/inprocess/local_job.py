"""A whole training job in one process, for comparison with plain PyTorch (`plain_job`).

Every rank of a plan is a thread of a `LocalWorld`. Whatever a test is about, each step is also
checked for what must always hold: no buffer keeps anything, all ranks report the same, and all
copies of a parameter are equal to the bit.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from tests.inprocess.plain_job import Sample, collate
from zorse_ds.core.plan import Plan
from zorse_ds.integrations.deepspeed.layers import Layer, LayerListStage, LayerListStages
from zorse_ds.ranges import Range
from zorse_ds.runtime.assembly import ParamGroups, RankParts, build_optimizer
from zorse_ds.runtime.local import LocalWorld
from zorse_ds.runtime.losses import Criterion, LossFn
from zorse_ds.runtime.optimizer import OptimizerFactory, ShardedOptimizer
from zorse_ds.runtime.stage import StageRunner
from zorse_ds.runtime.step import ForwardStep, StepRule
from zorse_ds.runtime.worker import StepReport, Worker
from zorse_ds.schedule.checks import check_trace
from zorse_ds.schedule.compile import compile_forward, compile_trace
from zorse_ds.schedule.trace import Tie, Trace, ties_between_stages
from zorse_ds.simulator.timeline import Timeline

Values = dict[str, Tensor]


def adamw(groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    """The optimizer of most tests."""
    return torch.optim.AdamW(groups, lr=0.05, weight_decay=0.1)


@dataclass(frozen=True)
class Job:
    """What is trained and how; the same for every plan and for plain PyTorch."""

    layers: Sequence[Layer]
    loss_fn: LossFn | None
    make_optimizer: OptimizerFactory = adamw
    options: Sequence[dict[str, Any]] = ({},)
    """Options of each param group."""
    group_of: Callable[[str], int | None] = lambda name: 0
    """Parameter name → param group; None: not trained."""
    make_scheduler: Callable[[torch.optim.Optimizer], Any] | None = None
    collate: Callable[[list[Sample]], Sample] = collate
    dtype: torch.dtype | None = None
    """What parameters are cast to; masters keep what they were."""
    base_seed: int = 1234


@dataclass(frozen=True)
class Step:
    """One global batch, and what is done with it."""

    samples: Sequence[Sample]
    clip: float = 0.0
    loss_scale: float = 1.0
    trains: bool = True


@dataclass
class Outcome:
    """What a job left behind: one entry a step."""

    reports: list[StepReport] = field(default_factory=list)
    values: list[Values] = field(default_factory=list)
    masters: list[Values] = field(default_factory=list)
    optimizers: list[ShardedOptimizer] = field(default_factory=list)
    """One a rank, as they are in the end."""
    outputs: list[dict[int, Any]] = field(default_factory=list)
    """Outputs of an evaluation, by micro-batch."""

    @property
    def losses(self) -> list[float]:
        """The loss of each step."""
        return [report.loss for report in self.reports]

    @property
    def norms(self) -> list[float]:
        """The gradient norm of each step."""
        return [report.grad_norm for report in self.reports]


class _Batch:
    """One global batch; remembers nothing, so every read is a fresh one."""

    def __init__(self, job: Job, step: Step) -> None:
        self._job, self._samples = job, list(step.samples)

    def load(self, samples: Range) -> Sample:
        """See `runtime.step.Batch`."""
        assert 0 <= samples.start < samples.stop <= len(self._samples)
        return self._job.collate(self._samples[samples.as_slice()])


class _WatchedWorker(Worker):
    """Checks that a step leaves nothing behind."""

    def _execute(self, trace: Trace, step: ForwardStep) -> Timeline:
        timeline = super()._execute(trace, step)
        assert not step.outbox and not step.loaded
        assert not getattr(step, "roots", {})
        assert not any(runner.held for runner in self.runners.values())
        return timeline


class _Rank:
    """One rank of a job, before the threads start."""

    def __init__(self, rank: int, job: Job, plan: Plan, world: LocalWorld) -> None:
        source = LayerListStages(copy.deepcopy(list(job.layers)), job.base_seed)
        self.rank, self.job, self.plan, self.world = rank, job, plan, world
        self.ties = ties_between_stages(plan, source.tied_layers)
        self.tied_layers = source.tied_layers
        self.models = {
            stage: _stage(source, plan, stage, self.ties) for stage in plan.stages_of_rank(rank)
        }
        self.originals: Values = {}
        if job.dtype is not None:
            self._cast(job.dtype)

    def parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """All parameters of all own stages."""
        for model in self.models.values():
            yield from model.global_parameters()

    def worker(self) -> Worker:
        """Collective over the plan's ranks."""
        process_group = lambda ranks: self.world.process_group(self.rank, ranks)  # noqa: E731
        everybody = process_group(range(self.world.size))
        parts = RankParts(self.rank, self.plan, self.ties, self.models, process_group, everybody)
        group = {id(p): self.job.group_of(name) for name, p in self.parameters()}
        groups = ParamGroups(list(self.job.options), lambda p: group[id(p)])
        optimizer = build_optimizer(parts, groups, self.job.make_optimizer, self.originals)
        return _WatchedWorker(
            self.rank,
            {stage: StageRunner(model) for stage, model in self.models.items()},
            Criterion(self.job.loss_fn),
            self.world.transport(self.rank),
            optimizer,
            {at: process_group(self.plan.group_of_stage(at).ranks) for at in self.models},
            everybody,
            torch.device("cpu"),
        )

    def values(self) -> Values:
        """A copy of all parameters by name."""
        return {name: parameter.detach().clone() for name, parameter in self.parameters()}

    def masters(self, optimizer: ShardedOptimizer) -> Values:
        """The own part of each parameter that the optimizer steps, `name[start:stop]`."""
        parts: Values = {}
        for bucket in optimizer.buckets:
            for name, window in zip(bucket.flat.names, bucket.flat.windows, strict=True):
                own = window.intersect(bucket.window)
                if own.size:
                    start, stop = own.relative_to(window.start)
                    part = bucket.master.detach()[own.relative_to(bucket.window.start).as_slice()]
                    parts[f"{name}[{start}:{stop}]"] = part.clone()
        return parts

    def _cast(self, dtype: torch.dtype) -> None:
        self.originals = self.values()
        for model in self.models.values():
            model.to(dtype)


def _stage(source: LayerListStages, plan: Plan, stage: int, ties: Sequence[Tie]) -> LayerListStage:
    owners = {tie.index: tie.owner for tie in ties}
    return source.build(
        plan.stages[stage].layers,
        recompute=plan.recompute_of(stage) == "full",
        owns=lambda tie: owners.get(tie, stage) == stage,
    )


def run(job: Job, plan: Plan, steps: Sequence[Step]) -> Outcome:
    """Train `job` under `plan`. Raises what the first rank that fails raises."""
    world = LocalWorld(plan.world_size)
    ranks = [_Rank(rank, job, plan, world) for rank in range(plan.world_size)]
    traces = [_trace(plan, ranks[0].tied_layers, step) for step in steps]
    runs = world.run(lambda rank: _run_rank(ranks[rank], traces, steps))
    assert len(world.mailboxes) == 0
    return _joined(runs)


def _trace(plan: Plan, tied_layers: Sequence[Sequence[int]], step: Step) -> Trace:
    resized = plan.resized(len(step.samples))
    trace = compile_trace(resized, tied_layers) if step.trains else compile_forward(resized)
    check_trace(trace)
    return trace


def _run_rank(rank: _Rank, traces: Sequence[Trace], steps: Sequence[Step]) -> Outcome:
    worker = rank.worker()
    optimizer = worker.trained
    schedule = rank.job.make_scheduler
    scheduler = schedule(optimizer.inner) if schedule is not None else None
    outcome = Outcome(optimizers=[optimizer])
    for trace, step in zip(traces, steps, strict=True):
        batch = _Batch(rank.job, step)
        if step.trains:
            report = worker.train(trace, batch, StepRule(step.clip, step.loss_scale))
        else:
            report = worker.evaluate(trace, batch, keep_outputs=True)
        if scheduler is not None and step.trains:
            scheduler.step()
        _check_grads_dropped(rank, optimizer)
        outcome.reports.append(report)
        outcome.outputs.append(report.outputs)
        outcome.values.append(rank.values())
        outcome.masters.append(rank.masters(optimizer))
    return outcome


def _check_grads_dropped(rank: _Rank, optimizer: ShardedOptimizer) -> None:
    """Whole gradients outlive a step only where each rank needs room for them in every step."""
    kept = [bucket for bucket in optimizer.buckets if bucket.zero_level < 2]
    may_keep = {name for bucket in kept for name in bucket.flat.names}
    assert all(p.grad is None or name in may_keep for name, p in rank.parameters())
    assert all(b.flat.grad is None for b in optimizer.buckets if b.zero_level == 2)


def _joined(runs: Sequence[Outcome]) -> Outcome:
    """One outcome for all ranks, after checking that they agree."""
    joined = Outcome(optimizers=[run.optimizers[0] for run in runs])
    for at, report in enumerate(runs[0].reports):
        for run in runs:
            assert _said(run.reports[at]) == _said(report)
        joined.reports.append(replace(report, outputs={}))
        joined.values.append(_merged([run.values[at] for run in runs]))
        joined.masters.append(_merged([run.masters[at] for run in runs]))
        joined.outputs.append({k: v for run in runs for k, v in run.outputs[at].items()})
    return joined


def _said(report: StepReport) -> str:
    """What every rank must report alike; as text, for NaN is not equal to itself."""
    return repr((report.loss, report.num_targets, report.grad_norm, report.skipped))


def _merged(parts: Sequence[Values]) -> Values:
    merged: Values = {}
    for part in parts:
        for name, tensor in part.items():
            assert torch.equal(merged.setdefault(name, tensor), tensor), f"copies of {name} differ"
    return merged
