"""What every plan must equal: plain PyTorch in one process. Imports nothing of the product.

Each sample runs through the whole model alone, unpadded; the losses are summed and divided once.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_

Sample = tuple[Any, Any]
"""`(inputs, labels)` of one sample: tensors, or tuples and dicts of tensors."""
NO_TARGET = -100


def collate(samples: Sequence[Sample]) -> Sample:
    """Stack samples; unequal lengths are padded on the right, labels with `NO_TARGET`."""
    inputs = _stacked([inputs for inputs, _ in samples], 0)
    return inputs, _stacked([labels for _, labels in samples], NO_TARGET)


def _stacked(items: Sequence[Any], padding: int) -> Any:
    first = items[0]
    if isinstance(first, dict):
        return {key: _stacked([item[key] for item in items], padding) for key in first}
    if isinstance(first, tuple):
        return tuple(_stacked(parts, padding) for parts in zip(*items, strict=True))
    if not first.dim():
        return torch.stack(list(items))
    return nn.utils.rnn.pad_sequence(list(items), batch_first=True, padding_value=padding)


@dataclass
class PlainOutcome:
    """One entry a training step."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    values: list[dict[str, Tensor]] = field(default_factory=list)


class PlainModel:
    """The layers one after the other; `calls` says how each is used, None: by calling it."""

    def __init__(
        self, layers: Sequence[Any], calls: Sequence[Callable[..., Any] | None] | None = None
    ) -> None:
        self.layers = copy.deepcopy(list(layers))
        self.calls = list(calls or [None] * len(self.layers))

    def __call__(self, value: Any) -> Any:
        for layer, call in zip(self.layers, self.calls, strict=True):
            value = layer(value) if call is None else call(layer, value)
        return value

    def named_parameters(self) -> dict[str, nn.Parameter]:
        """Each parameter once, `<index of its first layer>.<name there>`."""
        named: dict[str, nn.Parameter] = {}
        for index, layer in enumerate(self.layers):
            if isinstance(layer, nn.Module):
                for name, parameter in layer.named_parameters():
                    if all(parameter is not other for other in named.values()):
                        named[f"{index}.{name}"] = parameter
        return named


def mean_loss(model: PlainModel, loss_fn: Any, samples: Sequence[Sample]) -> tuple[Tensor, int]:
    """The loss over all targets and their number; each sample on its own."""
    total: Any = 0.0
    targets = 0
    for sample in samples:
        inputs, labels = collate([sample])
        output = model(inputs)
        result = output if loss_fn is None else loss_fn(output, labels)
        loss_sum, count = result if isinstance(result, tuple) else (result, 1)
        if count:
            total = total + loss_sum
            targets += int(count)
    return (total / targets if targets else torch.tensor(math.nan)), targets


def train_plainly(
    model: PlainModel,
    loss_fn: Any,
    steps: Sequence[Any],
    make_optimizer: Callable[[list[dict[str, Any]]], torch.optim.Optimizer],
    options: Sequence[dict[str, Any]] = ({},),
    group_of: Callable[[str], int | None] = lambda name: 0,
    make_scheduler: Callable[[torch.optim.Optimizer], Any] | None = None,
) -> PlainOutcome:
    """Run all `steps` (see `local_job.Step`) that train; one without a target changes nothing."""
    trained = _trained(model, len(options), group_of)
    groups = [{**own, "params": params} for own, params in zip(options, trained, strict=True)]
    parameters = [parameter for params in trained for parameter in params]
    optimizer = make_optimizer(groups) if parameters else None
    scheduler = make_scheduler(optimizer) if make_scheduler and optimizer else None
    outcome = PlainOutcome()
    for step in steps:
        if not step.trains:
            continue
        for parameter in parameters:
            parameter.grad = None
        loss, targets = mean_loss(model, loss_fn, step.samples)
        norm = 0.0
        if targets and optimizer is not None:
            loss.backward()
            norm = float(clip_grad_norm_(parameters, step.clip or math.inf))
            optimizer.step()
        if scheduler is not None:
            scheduler.step()
        outcome.losses.append(float(loss.detach()))
        outcome.norms.append(norm)
        values = {name: p.detach().clone() for name, p in model.named_parameters().items()}
        outcome.values.append(values)
    return outcome


def _trained(
    model: PlainModel, num_groups: int, group_of: Callable[[str], int | None]
) -> list[list[nn.Parameter]]:
    groups: list[list[nn.Parameter]] = [[] for _ in range(num_groups)]
    for name, parameter in model.named_parameters().items():
        group = group_of(name)
        if group is not None and parameter.requires_grad:
            groups[group].append(parameter)
        elif group is None:
            parameter.requires_grad_(False)
    return groups
