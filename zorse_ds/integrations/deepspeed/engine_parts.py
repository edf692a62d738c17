"""What an engine is made of besides DeepSpeed, agreed before DeepSpeed's constructor runs."""

import os
import socket
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from deepspeed.utils import log_dist
from torch import Tensor

from zorse_ds.core.handover import PROGRESS_VARIABLE, ProgressNotes
from zorse_ds.core.plan import Plan
from zorse_ds.integrations.deepspeed.adapting import Adapting
from zorse_ds.integrations.deepspeed.agreement import (
    agree_on_config,
    agree_on_data,
    agree_on_trace,
)
from zorse_ds.integrations.deepspeed.config import check_config
from zorse_ds.integrations.deepspeed.failures import Failures
from zorse_ds.integrations.deepspeed.module import ZorsePipelineModule, device_of_rank
from zorse_ds.integrations.deepspeed.monitoring import Monitoring
from zorse_ds.integrations.deepspeed.optimizer import rebound
from zorse_ds.integrations.deepspeed.param_groups import param_groups_of
from zorse_ds.integrations.deepspeed.precision import (
    boundary_dtypes,
    check_devices,
    default_dtype,
    dtype_of_rank,
    gradient_wire,
    has_float16,
)
from zorse_ds.integrations.deepspeed.stepping import stepping_of
from zorse_ds.integrations.deepspeed.traces import Traces
from zorse_ds.runtime.assembly import RankParts, build_optimizer
from zorse_ds.runtime.dist_world import DistWorld
from zorse_ds.runtime.host_memory import HostMemory
from zorse_ds.runtime.ledger import MemoryLedger
from zorse_ds.runtime.losses import Criterion
from zorse_ds.runtime.optimizer import OptimizerFactory, ShardedOptimizer
from zorse_ds.runtime.stage import StageRunner
from zorse_ds.runtime.stopwatch import Stopwatch, TimedRunner, stopwatch_of
from zorse_ds.runtime.worker import Worker


class EngineParts:
    """Settings, traces, wires and memory of one rank, and the workers made of them.

    Raises `ConfigError` or `WorldError` on every rank alike. Collective: every rank constructs it.
    """

    def __init__(
        self, model: ZorsePipelineModule, config: dict[str, Any], training_data: Any
    ) -> None:
        agree_on_config(config)
        agree_on_data(training_data)
        self.model = model
        self.plan: Plan = model.plan
        self.config = config
        self.settings = check_config(config, self.plan)
        stepping = stepping_of(self.settings.optimizer_step, config, self.plan, model.loss_fn)
        self.traces = Traces(self.plan, model.source.tied_layers, stepping.interleaved)
        agree_on_trace(self.traces.training(self.plan.global_batch_size).digest)
        self.device = device_of_rank()
        self.world = DistWorld(
            self.plan,
            model.ties,
            self.device,
            self.settings.timeout_s,
            staged=self.settings.transport == "staged",
        )
        self.failures = Failures(self.world, self.plan, self.device, self.settings.timeout_s)
        self.rank = self.world.rank
        told = os.environ.get(PROGRESS_VARIABLE) if self.rank == 0 else None
        self.progress = ProgressNotes(told)
        self.group = self.plan.group_of_rank(self.rank)
        model.mpu().attach(self.world, self.group.ranks)
        log_dist(f"zorse: {stepping}", ranks=[0])
        self.dtype = dtype_of_rank(self.plan, self.rank, config)
        check_devices(self.world, self.dtype)
        self.host = HostMemory(self.device) if self.group.offload != "none" else None
        adapt = self.settings.adapt_shares
        self.adapting = Adapting(self.world, self.plan, self.traces, adapt)
        self.monitoring = Monitoring(self.world, self.plan, config, self.settings, self.device)
        is_measured = self.adapting.is_on or self.monitoring.is_on
        self.watch = self._stopwatch() if is_measured else None

    def close(self) -> None:
        """End threads, wires and curves."""
        self.failures.close()
        self.monitoring.close()
        self.world.close()

    @property
    def casts_below_config(self) -> bool:
        """DeepSpeed's config leaves parameters in float32, but the group computes in less."""
        return default_dtype(self.config) == "float32" and self.dtype != torch.float32

    @property
    def scales_losses(self) -> bool:
        """Some group computes in float16."""
        return has_float16(self.plan, self.config)

    def sharded_optimizer(
        self,
        client: Any,
        model_parameters: Any,
        from_config: OptimizerFactory,
        originals: Mapping[str, Tensor],
    ) -> ShardedOptimizer:
        """The client's optimizer (or callable), or the config's, on this rank's master shards."""
        parts = RankParts(
            self.rank,
            self.plan,
            self.model.ties,
            self.model.stage_models,
            self.world.process_group,
            self.world.world,
            self.host,
            gradient_wire(self.config, self.dtype),
        )
        if isinstance(client, torch.optim.Optimizer):
            groups = param_groups_of(client.param_groups)
            return build_optimizer(parts, groups, lambda lots: rebound(client, lots), originals)
        groups = param_groups_of(model_parameters)
        return build_optimizer(parts, groups, client or from_config, originals)

    def begin_step(self) -> None:
        """A training step starts."""
        if self.watch is not None:
            self.watch.begin()

    def after_step(self, engine: Any, batch: Any, number: int) -> None:
        """Move shares where that pays; tell the monitors and the restarter of a step."""
        measured = None if self.watch is None else self.watch.read()
        self.adapting.after_step(number, batch.num_samples, measured)
        self.monitoring.after_step(engine, batch, measured)
        self.progress.note(number)

    def worker(self, criterion: Criterion, optimizer: ShardedOptimizer | None) -> Worker:
        """The worker of this rank."""
        models = self.model.stage_models
        groups = {
            stage: self.world.process_group(self.plan.group_of_stage(stage).ranks)
            for stage in models
        }
        worker = Worker(
            self.rank,
            {stage: self._runner(stage, model) for stage, model in models.items()},
            criterion,
            self.world.transport,
            optimizer,
            groups,
            self.world.world,
            self.device,
            boundary_dtypes(self.plan, self.config),
        )
        if self.settings.count_memory and optimizer is not None:
            worker.ledger = MemoryLedger(optimizer.tensors, self.host)
        self.failures.observe(worker)
        return worker

    def _stopwatch(self) -> Stopwatch:
        hosts = self.world.gather_objects(socket.gethostname())
        return stopwatch_of(self.device, hosts.count(socket.gethostname()))

    def measure_by(self, watch: Stopwatch, worker: Worker) -> None:
        """Measure passes by something else, as virtual GPUs do, where they are measured."""
        if self.watch is None:
            return
        self.watch = watch
        for runner in worker.runners.values():
            assert isinstance(runner, TimedRunner), "all runners are of one kind"
            runner.watch = watch

    def _runner(self, stage: int, model: Any) -> StageRunner:
        if self.watch is None:
            return StageRunner(model, self._saving(model))
        return TimedRunner(stage, self.watch, model, self._saving(model))

    def _saving(self, model: Any) -> Callable[[], AbstractContextManager[Any]]:
        """Where what autograd saves goes: to the host if the group's `offload` says so."""
        host = self.host
        if host is None or self.group.offload == "params":
            return nullcontext
        return lambda: host.saving(model.parameters())
