"""The sharded optimizer in the clothes that DeepSpeed's engine expects."""

from typing import Any

import torch
from deepspeed.runtime.base_optimizer import DeepSpeedOptimizer

from zorse_ds.errors import ConfigError
from zorse_ds.integrations.deepspeed.config_checks import optimizer_problem
from zorse_ds.runtime.optimizer import ShardedOptimizer
from zorse_ds.runtime.worker import StepReport


class ZorseOptimizer(DeepSpeedOptimizer):
    """What the engine, schedulers and monitors see.

    The worker has stepped by the time DeepSpeed calls `step`; here a step only passes on what
    happened: the gradient norm, whether it was skipped, and the loss scale that follows.
    """

    def __init__(self, sharded: ShardedOptimizer, loss_scaler: Any | None) -> None:
        self.sharded = sharded
        self.optimizer = sharded.inner
        self.loss_scaler = loss_scaler
        self.overflow = False
        self._global_grad_norm = 0.0

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The inner optimizer's groups, over master shards."""
        return self.optimizer.param_groups

    @param_groups.setter
    def param_groups(self, value: list[dict[str, Any]]) -> None:
        self.optimizer.param_groups = value

    @property
    def state(self) -> Any:
        """The inner optimizer's state."""
        return self.optimizer.state

    @property
    def cur_scale(self) -> float:
        """The loss scale of the next step."""
        return float(self.loss_scaler.loss_scale) if self.loss_scaler is not None else 1.0

    def record(self, report: StepReport) -> None:
        """Take over what a step did; equal on all ranks, so scales stay equal too."""
        self.overflow = report.skipped is not None
        self._global_grad_norm = report.grad_norm
        if self.loss_scaler is not None and report.skipped != "no targets":
            self.loss_scaler.update_scale(self.overflow)

    def step(self, closure: Any = None) -> None:
        """Nothing: the worker has stepped, see `record`."""

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Nothing: gradients are opened by each step."""

    def state_dict(self) -> dict[str, Any]:
        """This rank's shard of the state."""
        return {"optimizer": self.optimizer.state_dict(), "cur_scale": self.cur_scale}

    def load_state_dict(self, state_dict: dict[str, Any], **_: Any) -> None:
        """Restore the state of the same shard."""
        self.optimizer.load_state_dict(state_dict["optimizer"])


def rebound(
    optimizer: torch.optim.Optimizer, groups: list[dict[str, Any]]
) -> torch.optim.Optimizer:
    """Set a client's optimizer on master shards, its own groups kept (its schedulers see them).

    Raises `ConfigError` for one that has stepped before or that cannot work on shards.
    """
    problem = optimizer_problem(type(optimizer).__name__)
    if problem is not None:
        raise ConfigError(f"the optimizer {problem}")
    if optimizer.state:
        raise ConfigError(
            "the optimizer has state of parameters that the plan cuts anew; expected a fresh one"
        )
    for own, group in zip(optimizer.param_groups, groups, strict=True):
        own["params"] = group["params"]
    return optimizer
