"""Layers of a Hugging Face model as the engine runs them, one kind at a time, to be measured."""

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from zorse_ds.core.plan import Dtype
from zorse_ds.errors import ModelError
from zorse_ds.integrations.huggingface.loss import CausalLMLoss
from zorse_ds.integrations.huggingface.shape import describe_model
from zorse_ds.integrations.huggingface.stage import CausalLMStage
from zorse_ds.integrations.huggingface.stages import CausalLMStages
from zorse_ds.ranges import Range
from zorse_ds.runtime.flat import FlatParameters, NamedParameter
from zorse_ds.runtime.host_memory import storage_id
from zorse_ds.runtime.ledger import MemoryLedger, Purpose
from zorse_ds.runtime.stage import StageRunner
from zorse_ds.runtime.values import Leaf, Message, cut, flatten

_MOST_BLOCKS = 4
"""Blocks run together: what a stage does once, such as making masks, is shared among them."""
_DTYPES: dict[Dtype, torch.dtype] = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}


class TimedModel:
    """The layers of the model in `folder`, with random weights, on one device.

    Its configuration is enough. Raises `ModelError` when it is not understood.
    """

    def __init__(self, folder: str | Path, device: torch.device) -> None:
        described = describe_model(folder)
        self.shape = described.shape
        self._config = described.config
        self._device = device
        self._stages: dict[Dtype, CausalLMStages] = {}
        self._last: tuple[str, Dtype, _Layers] | None = None

    def run(self, kind: str, dtype: Dtype, seq_len: int, size: int) -> "TimedRun":
        """See `LayerSource.run`. Raises `ModelError` for a length beyond the model's positions."""
        most = getattr(self._config, "max_position_embeddings", None)
        if most is not None and seq_len > most:
            raise ModelError(f"the length is {seq_len}; expected at most {most}, the model's")
        return TimedRun(self._layers(kind, dtype), self.shape.shapes[0].vocab, seq_len, size)

    def _layers(self, kind: str, dtype: Dtype) -> "_Layers":
        """Kept until another kind is asked for."""
        if self._last is None or self._last[:2] != (kind, dtype):
            self._last = None
            layers = _run_of(self.shape.layers, kind, _MOST_BLOCKS)
            if dtype not in self._stages:
                self._stages[dtype] = CausalLMStages.from_config(self._config, dtype=_DTYPES[dtype])
            stage = self._stages[dtype].build(layers.start, layers.stop, device=self._device)
            self._last = kind, dtype, _Layers(stage, layers, self._device)
        return self._last[2]


class _Layers:
    """A stage of layers of one kind and its gradients, laid out as in training."""

    def __init__(self, stage: CausalLMStage, layers: Range, device: torch.device) -> None:
        self.stage = stage
        self.device = device
        self.num_layers = layers.size
        named = [NamedParameter(name, each) for name, each in stage.global_parameters()]
        dtypes = dict.fromkeys(each.parameter.dtype for each in named)
        self.flats = [
            FlatParameters([each for each in named if each.parameter.dtype == dtype])
            for dtype in dtypes
        ]
        for flat in self.flats:
            flat.open_grads()

    def known(self) -> Iterable[tuple[Purpose, Tensor]]:
        """What is no activation."""
        for flat in self.flats:
            yield "parameters", flat.data
            if flat.grad is not None:
                yield "gradients", flat.grad


class TimedRun:
    """See `LayerRun`: one micro-batch that goes through the layers again and again."""

    def __init__(self, layers: _Layers, vocab: int, seq_len: int, size: int) -> None:
        self._layers = layers
        self._size = size
        self._seq_len = seq_len
        self._window = Range(0, size)
        device, stage = layers.device, layers.stage
        self._ids = torch.randint(vocab, (size, seq_len), device=device)
        self._arrived: Message | None = None
        if not stage.is_first:
            parameter = next(iter(stage.parameters()))
            hidden = _hidden(stage, parameter.dtype, (size, seq_len), device)
            structure, leaves = flatten((hidden.requires_grad_(), None, None))
            self._arrived = cut(structure, leaves, size, self._window, seq_len)
        self._runner = StageRunner(stage, self._saving)
        self._saved: dict[int, int] | None = None
        self._criterion = CausalLMLoss(stage.structure.router_loss)
        self._loss: Tensor | None = None
        self._gradient: Message | None = None
        self._boundary_bytes = 0

    @property
    def num_layers(self) -> int:
        """See `LayerRun.num_layers`."""
        return self._layers.num_layers

    def forward(self) -> None:
        """As a step does it: enter, run, and cut what leaves or make the loss."""
        output = self._runner.forward(0, self._enter())
        if self._layers.stage.is_last:
            with self._saving():
                self._loss = self._criterion(output, self._ids)[0]
        else:
            message = self._runner.outgoing(0, self._window)
            if self._gradient is None:
                self._gradient = _like(message)
                self._boundary_bytes = sum(each.nbytes for each in _tensors(message))
        del output
        self._runner.drop_outputs(0)

    def backward(self) -> None:
        """As a step does it: from the loss, or from the gradient of what left."""
        if self._layers.stage.is_last:
            loss, self._loss = self._loss, None
            self._runner.backward_from_loss(0, loss)
        else:
            assert self._gradient is not None, "forward runs first"
            self._runner.backward(0, [(self._window, self._gradient)])
        if self._arrived is not None:
            self._runner.outgoing_grad(0, 0)
        self._runner.release(0)

    def measured_bytes(self) -> tuple[int, int, int]:
        """See `LayerRun.measured_bytes`; counts storages, so it holds on any device."""
        ledger = MemoryLedger(self._known)
        self._saved = {}
        with ledger.counting():
            self.forward()
            held, forward_peak = ledger.held_bytes, ledger.report.peak_bytes
            ledger.report.peak_bytes = held
            self.backward()
        saved, self._saved = sum(self._saved.values()), None
        peak = max(forward_peak, ledger.report.peak_bytes)
        return saved, self._boundary_bytes, peak - held

    def _known(self) -> Iterable[tuple[Purpose, Tensor]]:
        """What was there before, input and gradient too."""
        yield from self._layers.known()
        for message in (self._arrived, self._gradient):
            for each in () if message is None else _tensors(message):
                yield "buffers", each

    def _enter(self) -> Any:
        if self._arrived is None:
            self._runner.enter_first(0, self._size, self._seq_len)
            return {"input_ids": self._ids}
        return self._runner.enter(0, self._size, [(0, self._window, self._arrived)], train=True)

    def _saving(self) -> AbstractContextManager[Any]:
        """Inside, storages that autograd keeps are noted, parameters aside; if they are wanted."""
        found = self._saved
        if found is None:
            return nullcontext()
        resident = {storage_id(flat.data) for flat in self._layers.flats}

        def pack(tensor: Tensor) -> Tensor:
            key = storage_id(tensor)
            if key not in resident:
                found[key] = tensor.untyped_storage().nbytes()
            return tensor

        return saved_tensors_hooks(pack, lambda tensor: tensor)


def _run_of(layers: tuple[str, ...], kind: str, most: int) -> Range:
    """The longest run of a kind, up to `most` layers; the first of equals."""
    best = Range(0, 0)
    for start in range(len(layers)):
        stop = start
        while stop < min(len(layers), start + most) and layers[stop] == kind:
            stop += 1
        if stop - start > best.size:
            best = Range(start, stop)
    return best


def _hidden(
    stage: CausalLMStage, dtype: torch.dtype, shape: tuple[int, int], device: torch.device
) -> Tensor:
    width = stage.model.config.get_text_config(decoder=True).hidden_size
    return torch.randn(*shape, width, dtype=dtype, device=device)


def _tensors(message: Message) -> list[Tensor]:
    return [leaf for leaf in message.leaves if isinstance(leaf, Tensor)]


def _like(message: Message) -> Message:
    """A gradient for what left."""
    leaves: list[Leaf] = [
        torch.randn_like(e) if isinstance(e, Tensor) else None for e in message.leaves
    ]
    blank = [False] * len(leaves)
    return Message(message.structure, leaves, message.per_sample, blank)
