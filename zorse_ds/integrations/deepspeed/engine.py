"""`ZorseEngine`: DeepSpeed's `PipelineEngine` that runs a ragged plan.

DeepSpeed keeps what it is good at (configuration, optimizers, schedulers, monitor, counters); the
steps themselves are programs run by `runtime.Worker`.
"""

from collections.abc import Callable
from typing import Any

import torch
from deepspeed.runtime.fp16.loss_scaler import CreateLossScaler
from deepspeed.runtime.pipe.engine import PipelineEngine
from deepspeed.utils import RepeatingLoader
from torch import Tensor

from zorse_ds.core.order import SampleOrder
from zorse_ds.errors import ConfigError, DataError, ModelError
from zorse_ds.integrations.deepspeed.agreement import next_batch
from zorse_ds.integrations.deepspeed.checkpoint import Checkpoints
from zorse_ds.integrations.deepspeed.config import load_config
from zorse_ds.integrations.deepspeed.data import (
    PlacedBatch,
    ZorseLoader,
    default_collate_fn,
    lengths_of,
    num_samples_of,
)
from zorse_ds.integrations.deepspeed.engine_parts import EngineParts
from zorse_ds.integrations.deepspeed.engine_saving import SavingEngine
from zorse_ds.integrations.deepspeed.module import ZorsePipelineModule
from zorse_ds.integrations.deepspeed.optimizer import ZorseOptimizer
from zorse_ds.integrations.deepspeed.outcome import look_at
from zorse_ds.integrations.deepspeed.signals import Notice
from zorse_ds.runtime.losses import Criterion
from zorse_ds.runtime.step import StepRule
from zorse_ds.runtime.worker import StepReport
from zorse_ds.schedule.trace import Trace


class ZorseEngine(SavingEngine, PipelineEngine):
    """A `PipelineEngine` whose step equals that of a single process, for any plan.

    Made by `zorse_ds.initialize`. `report` holds what the last step did.
    """

    _booting = True
    """The base class's constructor wants to greet one neighbour a stage: nobody is there."""

    report: StepReport | None = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        model, config = kwargs["model"], load_config(kwargs["config"])
        if not isinstance(model, ZorsePipelineModule):
            raise ModelError(
                f"ZorseEngine was given a {type(model).__name__}; expected a ZorsePipelineModule"
            )
        parts = EngineParts(model, config, kwargs.get("training_data"))
        self.__dict__.update(parts=parts, plan=parts.plan, _originals={})
        super().__init__(*args, **kwargs)
        self._originals.clear()
        self._booting = False
        sharded = None if self.optimizer is None else self.optimizer.sharded
        self._worker = parts.worker(Criterion(model.loss_fn), sharded)
        self._checkpoints = Checkpoints(self)
        self._notice = Notice(self._worker, self._checkpoints)

    # ---- how DeepSpeed sets itself up

    def is_first_stage(self) -> bool:
        """This rank hosts the first stage."""
        return self._booting or 0 in self.plan.stages_of_rank(self.global_rank)

    def is_last_stage(self) -> bool:
        """This rank hosts the last stage."""
        last = len(self.plan.stages) - 1
        return self._booting or last in self.plan.stages_of_rank(self.global_rank)

    def _broadcast_model(self) -> None:
        """Weights are made equal when the optimizer is built, shard by shard."""

    def _mixed_precision_dtypes(self) -> tuple[torch.dtype, Any]:
        """The dtype of this rank's group, which may differ from the config's."""
        return self.parts.dtype, super()._mixed_precision_dtypes()[1]

    def _configure_distributed_model(self, model: Any) -> None:
        """A config in float32 casts nothing, but a group may still want to compute in less."""
        if self.parts.casts_below_config:
            self._set_client_model(model)
            self._cast_module_mixed_precision(self.parts.dtype, None, False)
        super()._configure_distributed_model(model)

    def _cast_module_mixed_precision(self, *args: Any, **kwargs: Any) -> None:
        """Keep full-precision values for the masters before parameters are cast."""
        for model in self.module.stage_models.values():
            for name, parameter in model.global_parameters():
                if parameter.requires_grad:
                    self._originals[name] = parameter.detach().clone()
        super()._cast_module_mixed_precision(*args, **kwargs)

    def _configure_optimizer(self, client_optimizer: Any, model_parameters: Any) -> None:
        """Shard the parameters and set the configured or given optimizer on the shards."""
        sharded = self.parts.sharded_optimizer(
            client_optimizer, model_parameters, self._configure_basic_optimizer, self._originals
        )
        self.basic_optimizer = sharded.inner
        self.optimizer = ZorseOptimizer(sharded, self._loss_scaler())

    def _configure_bf16_optimizer(self, optimizer: Any) -> None:
        """None: DeepSpeed asks for one when there is nothing to train."""

    def _loss_scaler(self) -> Any:
        if not self.parts.scales_losses:
            return None
        return CreateLossScaler(
            dtype=torch.half,
            static_loss_scale=self.loss_scale(),
            dynamic_scaling=self.dynamic_loss_scale(),
            dynamic_loss_args=self.dynamic_loss_scale_args(),
        )

    def _scheduler_from_config(self, optimizer: Any) -> Any:
        """Schedulers of torch accept a torch optimizer only."""
        return super()._scheduler_from_config(self.basic_optimizer)

    def clip_fp32_gradients(self) -> None:
        """Clipping is part of the step, by the norm over all ranks."""

    # ---- data

    @property
    def _collate(self) -> Callable[[list[Any]], Any]:
        return self.collate_fn or self.module.collate_fn or default_collate_fn

    def deepspeed_io(
        self, dataset: Any, batch_size: int | None = None, route: str = "train", **kwargs: Any
    ) -> ZorseLoader:
        """A loader of global batches of `batch_size` (default: the plan's).

        Training batches follow the one global order; other routes keep the data set's.
        """
        if kwargs.get("data_sampler") is not None:
            raise DataError("data_sampler was given; expected none, for the plan cuts the batches")
        trains = route == "train"
        data = self.parts.settings.data
        order = SampleOrder(
            num_samples_of(dataset),
            batch_size or self.plan.global_batch_size,
            shuffle=data.shuffle and trains,
            seed=data.seed,
            drop_last=bool(self._config.dataloader_drop_last) and trains,
        )
        lengths = lengths_of(dataset) if data.group_by_length and trains else None
        return ZorseLoader(dataset, order, kwargs.get("collate_fn") or self._collate, lengths)

    def _build_data_iter(self, dataset: Any) -> None:
        self.set_dataloader(self.training_dataloader)

    def set_dataloader(self, loader: Any) -> None:
        """Train on the items of `loader`, over and over; each is one global batch."""
        self.training_dataloader = loader
        self.data_iterator = iter(RepeatingLoader(loader))

    def set_dataiterator(self, iterator: Any) -> None:
        """Take the next batches from `iterator`; each item is one global batch."""
        self.data_iterator = iterator

    def _next_global_batch(
        self, data_iter: Any, purpose: str, most: int | None = None
    ) -> PlacedBatch:
        batch = next_batch(self.parts.world, data_iter, self._collate, purpose, most)
        return PlacedBatch(batch, self.device, self.parts.dtype, self.batch_fn)

    # ---- steps

    def train_batch(self, data_iter: Any = None) -> Tensor:
        """Make one update; returns the mean loss over the targets of its global batch.

        `data_iter` stays for the next steps. Raises `DataError` on every rank when it has ended,
        before anything has started, so training can go on. Collective: every rank.
        """
        if self.optimizer is None:
            raise ConfigError(
                "train_batch was called without an optimizer; expected 'optimizer' in the config "
                "or in initialize"
            )
        self._checkpoints.poll()
        if data_iter is not None:
            self.set_dataiterator(data_iter)
        number = self.global_steps + 1
        self._notice.listen(self.parts.progress)
        with self.parts.failures.step(number):
            most = self.plan.global_batch_size
            self._batch = self._next_global_batch(self.data_iterator, f"step {number}", most)
            loss = super().train_batch()
            self.parts.after_step(self, self._batch, number)
        self._notice.obey(self, self.report)
        return loss

    def eval_batch(self, data_iter: Any, *args: Any, **kwargs: Any) -> Any:
        """Run one global batch of any size forward; see `PipelineEngine.eval_batch`.

        Raises `DataError` on every rank when `data_iter` has ended. Collective: every rank.
        """
        if kwargs.get("num_micro_batches") is not None:
            raise ConfigError(
                "num_micro_batches was given to eval_batch; expected none, for each item of "
                "data_iter is a global batch, which the plan cuts"
            )
        with self.parts.failures.step(self.global_steps):
            self._batch = self._next_global_batch(data_iter, "eval_batch")
            return super().eval_batch(data_iter, *args, **kwargs)

    def _train_schedule(self) -> str:
        return "train"

    def _inference_schedule(self, micro_batches: int) -> str:
        return "evaluate"

    def _exec_schedule(self, schedule: str) -> None:
        batch = self._batch
        if schedule == "evaluate":
            trace = self.parts.traces.evaluation(batch.num_samples)
            self.report = self._worker.evaluate(trace, batch, self.eval_return_logits)
            self.outputs = self._joined_outputs(trace, self.report)
            self.fwd_outputs = [self._loss_tensor()]
            return
        self.parts.begin_step()
        self.report = self._worker.train(
            self.parts.traces.training(batch.num_samples),
            batch,
            StepRule(float(self.gradient_clipping()), self.optimizer.cur_scale),
        )
        self.optimizer.record(self.report)
        # DeepSpeed counts full batches. Corrected first: monitors want samples that never decrease.
        self.global_samples += batch.num_samples - self.train_batch_size()
        self._exec_optimizer_step()
        look_at(self.report, self.global_steps, self.global_rank)

    def _aggregate_total_loss(self) -> Tensor:
        return self._loss_tensor()

    def _reduce_outputs(self, outputs: Any, *args: Any, **kwargs: Any) -> Tensor:
        return self._loss_tensor()

    def _bcast_pipe_scalar(self, data: Any, *args: Any, **kwargs: Any) -> Tensor:
        return self._loss_tensor()

    def _loss_tensor(self) -> Tensor:
        assert self.report is not None, "there is a loss after a step"
        return torch.tensor(self.report.loss, device=self.device)

    def _joined_outputs(self, trace: Trace, report: StepReport) -> Any:
        """This rank's outputs of the last stage, micro-batch by micro-batch, or None."""
        return [report.outputs[i] for i in sorted(report.outputs)] or None

    # ---- what a plan makes meaningless

    def set_train_batch_size(self, train_batch_size: int) -> None:
        """Refused: the plan says how a batch is cut."""
        raise ConfigError(
            f"train_batch_size cannot become {train_batch_size} while training; expected a plan "
            "for that batch"
        )

    def destroy(self) -> None:
        """Wait for a save in the background; end threads and DeepSpeed's own resources."""
        try:
            self._checkpoints.wait()
        finally:
            self._notice.close()
            self.parts.close()
            super().destroy()


ZorsePipelineModule.engine_class = ZorseEngine
