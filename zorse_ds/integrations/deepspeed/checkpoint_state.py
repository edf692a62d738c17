"""What an engine's checkpoint holds beside tensors: counters, schedules, data position, RNG."""

import json
import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from zorse_ds.core.checkpoint.plain import Scalar, TensorRef, decode, encode
from zorse_ds.core.order import DataPosition
from zorse_ds.errors import CheckpointError
from zorse_ds.integrations.deepspeed.agreement import facts_of_data
from zorse_ds.integrations.deepspeed.data import ZorseLoader
from zorse_ds.runtime.checkpoint.capture import scalar_of, tensor_of

COUNTERS = ("global_steps", "global_samples", "micro_steps", "skipped_steps")
_OF_THE_SCALER = ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis")
_ADAMS = ("Adam", "AdamW", "FusedAdam", "DeepSpeedCPUAdam")
_OF_THE_DEVICE = ("params", "foreach", "fused", "capturable", "differentiable")
"""Options of a param group that say how a device computes, not what."""


def engine_state(engine: Any) -> dict[str, Any]:
    """All of an engine that is alike on every rank, as plain data."""
    scheduler = engine.lr_scheduler
    return {
        "counters": {name: getattr(engine, name) for name in COUNTERS},
        "loss_scaler": _scaler_state(engine),
        "lr_scheduler": scheduler.state_dict() if hasattr(scheduler, "state_dict") else None,
        "optimizer": _optimizer_name(engine),
        "param_groups": _group_options(engine),
        "data": _data_state(engine),
    }


class ClientTensors:
    """Keeps the tensors of a client's state to be written as tensors; see `plain.encode`."""

    def __init__(self) -> None:
        self.by_name: dict[str, Tensor] = {}

    def keep(self, value: Any) -> Scalar | TensorRef | None:
        """What stands for a tensor; None for what is none."""
        if not torch.is_tensor(value):
            return None
        scalar = scalar_of(value)
        if scalar is not None:
            return scalar
        name = f"client/{len(self.by_name)}"
        self.by_name[name] = value
        return TensorRef(name)


def restore_counters(engine: Any, state: Mapping[str, Any]) -> None:
    """Counters and loss scale go on from where they were."""
    for name, value in state["counters"].items():
        setattr(engine, name, value)
    scaler = getattr(engine.optimizer, "loss_scaler", None)
    if scaler is not None and state["loss_scaler"] is not None:
        for name, value in state["loss_scaler"].items():
            setattr(scaler, name, value)


def check_optimizer(engine: Any, state: Mapping[str, Any]) -> None:
    """Raise `CheckpointError` when the optimizer or its number of param groups is another."""
    if engine.optimizer is None or state["optimizer"] is None:
        return
    if state["optimizer"] != _optimizer_name(engine):
        raise CheckpointError(
            f"the checkpoint was saved with the optimizer {state['optimizer']}, but this run has "
            f"{_optimizer_name(engine)}; expected the same, or load_optimizer_states=False"
        )
    found, own = len(state["param_groups"]), len(engine.optimizer.param_groups)
    if found != own:
        raise CheckpointError(
            f"the checkpoint has {found} param groups, but the optimizer {own}; expected the same, "
            "or load_optimizer_states=False"
        )


def restore_param_groups(engine: Any, state: Mapping[str, Any], *, rates_only: bool) -> None:
    """Options of the param groups, or (for a schedule to go on from) their rates alone."""
    if engine.optimizer is None:
        return
    groups = zip(engine.optimizer.param_groups, state["param_groups"], strict=False)
    for group, saved in groups:
        group.update(
            {k: v for k, v in saved.items() if not rates_only or k in ("lr", "initial_lr")}
        )


def restore_scheduler(engine: Any, state: Mapping[str, Any]) -> None:
    """The learning-rate schedule goes on, where both runs have one."""
    if state["lr_scheduler"] is not None and hasattr(engine.lr_scheduler, "load_state_dict"):
        engine.lr_scheduler.load_state_dict(state["lr_scheduler"])


def check_data(engine: Any, state: Mapping[str, Any]) -> None:
    """Raise `CheckpointError` when the order of samples could not go on as it was."""
    loader, saved = engine.training_dataloader, state["data"]
    if not isinstance(loader, ZorseLoader) or saved is None:
        return
    own = _order_facts(loader)
    for key, value in saved["order"].items():
        if own[key] != value:
            raise CheckpointError(
                f"the {key} is {own[key]}, but {value} in the checkpoint; expected the same, for "
                "the order of samples to go on, or load_module_only=True to begin anew"
            )


def restore_data(engine: Any, state: Mapping[str, Any]) -> None:
    """The global order of samples goes on behind the last batch; after `check_data`."""
    loader, saved = engine.training_dataloader, state["data"]
    if isinstance(loader, ZorseLoader) and saved is not None:
        loader.position = DataPosition(saved["epoch"], saved["num_consumed"])


def _data_state(engine: Any) -> dict[str, Any] | None:
    """Where the one global order of samples has got to; None where a user brings batches."""
    loader = engine.training_dataloader
    if not isinstance(loader, ZorseLoader):
        return None
    position = loader.position
    return {
        "epoch": position.epoch,
        "num_consumed": position.num_consumed,
        "order": _order_facts(loader),
    }


def _order_facts(loader: ZorseLoader) -> dict[str, Any]:
    order = loader.order
    if loader.fingerprint is None:
        loader.fingerprint = facts_of_data(loader.dataset)
    return {
        "training data": loader.fingerprint,
        "number of samples": order.num_samples,
        "data.shuffle": order.shuffle,
        "data.seed": order.seed,
        "dataloader_drop_last": order.drop_last,
    }


def _scaler_state(engine: Any) -> dict[str, Any] | None:
    scaler = getattr(engine.optimizer, "loss_scaler", None)
    if scaler is None:
        return None
    return {name: getattr(scaler, name) for name in _OF_THE_SCALER if hasattr(scaler, name)}


def _optimizer_name(engine: Any) -> str | None:
    """Implementations of Adam keep the same state, whatever device they are for."""
    if engine.optimizer is None:
        return None
    name = type(engine.optimizer.optimizer).__name__
    return "Adam" if name in _ADAMS else name


def _group_options(engine: Any) -> list[dict[str, Any]]:
    groups = [] if engine.optimizer is None else engine.optimizer.param_groups
    return [
        {key: value for key, value in group.items() if key not in _OF_THE_DEVICE}
        for group in groups
    ]


def revived(data: Any, tensors: Mapping[str, Tensor]) -> Any:
    """The inverse of `plain.encode` with `ClientTensors`."""
    return decode(
        data, lambda kept: tensors[kept.name] if isinstance(kept, TensorRef) else tensor_of(kept)
    )


def rng_tensor() -> Tensor:
    """This process's random number generators (Python, numpy, torch, its device), as bytes."""
    kind, keys, *rest = np.random.get_state(legacy=True)
    state = {
        "python": random.getstate(),
        "numpy": (kind, [int(key) for key in keys], *rest),
        "torch": _hex(torch.get_rng_state()),
        "cuda": _hex(torch.cuda.get_rng_state()) if torch.cuda.is_available() else None,
    }
    text = json.dumps(encode(state, "the state of the random number generators"))
    return torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)


def restore_rng(saved: Tensor) -> None:
    """The inverse of `rng_tensor`."""
    state = decode(json.loads(saved.numpy().tobytes()))
    random.setstate(state["python"])
    kind, keys, *rest = state["numpy"]
    np.random.set_state((kind, np.array(keys, dtype=np.uint32), *rest))
    torch.set_rng_state(_unhex(state["torch"]))
    if state["cuda"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(_unhex(state["cuda"]))


def _hex(tensor: Tensor) -> str:
    return tensor.numpy().tobytes().hex()


def _unhex(text: str) -> Tensor:
    return torch.frombuffer(bytearray.fromhex(text), dtype=torch.uint8)
