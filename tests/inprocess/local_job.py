"""A whole training job in one process, for comparison with plain PyTorch (`plain_job`).

Every rank of a plan is a thread of a `LocalWorld`. Whatever a test is about, each step is also
checked for what must always hold: no buffer keeps anything, all ranks report the same, all copies
of a parameter are equal to the bit, and sharded parameters are whole only when the trace says so.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from tests.inprocess.plain_job import Sample, collate
from tests.inprocess.watched_worker import Sight, WatchedWorker
from zorse_ds.core.plan import Plan
from zorse_ds.integrations.deepspeed.layers import Layer, LayerListStage, LayerListStages
from zorse_ds.ranges import Range
from zorse_ds.runtime.assembly import ParamGroups, RankParts, build_optimizer
from zorse_ds.runtime.host_memory import HostMemory
from zorse_ds.runtime.local import LocalWorld
from zorse_ds.runtime.losses import Criterion, LossFn
from zorse_ds.runtime.optimizer import OptimizerFactory, ShardedOptimizer
from zorse_ds.runtime.stage import StageRunner
from zorse_ds.runtime.step import StepRule
from zorse_ds.runtime.worker import StepReport
from zorse_ds.schedule.checks import check_trace
from zorse_ds.schedule.compile import compile_forward, compile_trace
from zorse_ds.schedule.trace import Tie, Trace, ties_between_stages

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
    interleaved: bool = False
    """Each stage steps as soon as its backward ends."""


@dataclass(frozen=True)
class Step:
    """One global batch, and what is done with it."""

    samples: Sequence[Sample]
    clip: float = 0.0
    loss_scale: float = 1.0
    trains: bool = True
    shares: Plan | None = None
    """What runs it instead of the job's plan, from which it differs in micro-batches alone."""


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
    sights: list[list[Sight]] = field(default_factory=list)
    """One list a rank: what it held after each instruction of all steps."""

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


class Rank:
    """One rank of a job, before the threads start."""

    def __init__(self, rank: int, job: Job, plan: Plan, world: LocalWorld) -> None:
        source = LayerListStages(copy.deepcopy(list(job.layers)), job.base_seed)
        self.rank, self.job, self.plan, self.world = rank, job, plan, world
        self.ties = ties_between_stages(plan, source.tied_layers)
        self.tied_layers = source.tied_layers
        self.models = {
            stage: _stage(source, plan, stage, self.ties) for stage in plan.stages_of_rank(rank)
        }
        offloads = plan.group_of_rank(rank).offload != "none"
        self.host = HostMemory(torch.device("cpu")) if offloads else None
        self.originals: Values = {}
        own_dtype = plan.group_of_rank(rank).dtype
        dtype = job.dtype if own_dtype is None else getattr(torch, own_dtype)
        if dtype is not None:
            self._cast(dtype)

    def parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """All parameters of all own stages."""
        for model in self.models.values():
            yield from model.global_parameters()

    def worker(self) -> WatchedWorker:
        """Collective over the plan's ranks."""
        process_group = lambda ranks: self.world.process_group(self.rank, ranks)  # noqa: E731
        everybody = process_group(range(self.world.size))
        parts = RankParts(
            self.rank, self.plan, self.ties, self.models, process_group, everybody, self.host
        )
        group = {id(p): self.job.group_of(name) for name, p in self.parameters()}
        groups = ParamGroups(list(self.job.options), lambda p: group[id(p)])
        optimizer = build_optimizer(parts, groups, self.job.make_optimizer, self.originals)
        worker = WatchedWorker(
            self.rank,
            {stage: self._runner(model) for stage, model in self.models.items()},
            Criterion(self.job.loss_fn),
            self.world.transport(self.rank),
            optimizer,
            {at: process_group(self.plan.group_of_stage(at).ranks) for at in self.models},
            everybody,
            torch.device("cpu"),
            self._boundary_dtypes(),
        )
        worker.sights = []
        return worker

    def _runner(self, model: LayerListStage) -> StageRunner:
        host = self.host
        if host is None or self.plan.group_of_rank(self.rank).offload == "params":
            return StageRunner(model)
        return StageRunner(model, lambda: host.saving(model.parameters()))

    def values(self, optimizer: ShardedOptimizer | None = None) -> Values:
        """A copy of all parameters by name. Collective with an optimizer, which makes them whole.

        A parameter of two own stages is there twice: the copies must be the same bits.
        """
        values: Values = {}
        for stage, model in self.models.items():
            with nullcontext() if optimizer is None else optimizer.whole(stage):
                for name, parameter in model.global_parameters():
                    value = parameter.detach().clone()
                    assert torch.equal(values.setdefault(name, value), value), name
        return values

    def _boundary_dtypes(self) -> dict[int, tuple[torch.dtype, torch.dtype]]:
        default = "float32" if self.job.dtype is None else str(self.job.dtype)[len("torch.") :]
        pairs = self.plan.boundary_dtypes(default)  # type: ignore[arg-type]
        return {at: (getattr(torch, a), getattr(torch, b)) for at, (a, b) in pairs.items()}

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
        recomputed=plan.recomputed(stage),
        owns=lambda tie: owners.get(tie, stage) == stage,
    )


Hook = Callable[["Rank", ShardedOptimizer], None]
"""Called on every rank at once."""


def run(
    job: Job,
    plan: Plan,
    steps: Sequence[Step],
    *,
    before: Hook | None = None,
    after: Hook | None = None,
) -> Outcome:
    """Train `job` under `plan`. Raises what the first rank that fails raises."""
    world = LocalWorld(plan.world_size)
    ranks = [Rank(rank, job, plan, world) for rank in range(plan.world_size)]
    traces = [_trace(job, plan, ranks[0].tied_layers, step) for step in steps]
    runs = world.run(lambda rank: _run_rank(ranks[rank], traces, steps, before, after))
    assert len(world.mailboxes) == 0
    return _joined(runs)


def _trace(job: Job, plan: Plan, tied_layers: Sequence[Sequence[int]], step: Step) -> Trace:
    resized = (step.shares or plan).resized(len(step.samples))
    trace = (
        compile_trace(resized, tied_layers, interleaved=job.interleaved)
        if step.trains
        else compile_forward(resized)
    )
    check_trace(trace)
    return trace


def _run_rank(
    rank: Rank,
    traces: Sequence[Trace],
    steps: Sequence[Step],
    before: Hook | None,
    after: Hook | None,
) -> Outcome:
    worker = rank.worker()
    optimizer = worker.trained
    if before is not None:
        before(rank, optimizer)
    schedule = rank.job.make_scheduler
    scheduler = schedule(optimizer.inner) if schedule is not None else None
    outcome = Outcome(optimizers=[optimizer], sights=[worker.sights])
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
        outcome.values.append(rank.values(optimizer))
        outcome.masters.append(rank.masters(optimizer))
    if after is not None:
        after(rank, optimizer)
    return outcome


def _check_grads_dropped(rank: Rank, optimizer: ShardedOptimizer) -> None:
    """Whole gradients outlive a step only where each rank needs room for them in every step."""
    kept = [bucket for bucket in optimizer.buckets if bucket.zero_level < 2]
    may_keep = {name for bucket in kept for name in bucket.flat.names}
    assert all(p.grad is None or name in may_keep for name, p in rank.parameters())
    assert all(b.flat.grad is None for b in optimizer.buckets if b.zero_level >= 2)


def _joined(runs: Sequence[Outcome]) -> Outcome:
    """One outcome for all ranks, after checking that they agree."""
    joined = Outcome(
        optimizers=[run.optimizers[0] for run in runs], sights=[run.sights[0] for run in runs]
    )
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
    return repr(
        (report.loss, report.num_targets, report.grad_norm, report.skipped, report.not_finite)
    )


def _merged(parts: Sequence[Values]) -> Values:
    """All values by name, `name as dtype` where another rank has the same in another dtype."""
    merged: Values = {}
    for part in parts:
        for name, tensor in part.items():
            alike = merged.setdefault(name, tensor).dtype == tensor.dtype
            key = name if alike else f"{name} as {tensor.dtype}"
            assert torch.equal(merged.setdefault(key, tensor), tensor), f"copies of {key} differ"
    return merged
