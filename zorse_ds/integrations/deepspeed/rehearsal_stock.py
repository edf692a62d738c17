"""Virtual GPUs under stock DeepSpeed: the backend of `deepspeed.comm` takes virtual time.

A send holds its stage until the receiver has taken it, as NCCL's does for what is larger than its
buffers: `PipelineModule` sends in its compute stream (`Sends`). Where it is open what a GPU would
do, stock gets the better of it: sums of gradients, once all ranks have come to them, run beside the
backward pass until something waits for their results.
"""

from collections.abc import Callable, Iterable
from typing import Any, Literal

import deepspeed.comm.comm as deepspeed_comm
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes

from zorse_ds.cost.collectives import Collective, all_reduce, gather, reduce_scatter
from zorse_ds.rehearsal.gpu import Key, VirtualGpu
from zorse_ds.rehearsal.links import agreement, broadcast, equal_shards, message, reduce
from zorse_ds.runtime.ledger import Purpose

FEW = 64
"""Elements up to which a tensor is control data, which the miniature does not shrink."""


Sends = Literal["held", "free"]
"""`free`: a send returns at once, as if buffers were without end; better than stock is."""


def attach_stock(engine: Any, gpu: VirtualGpu, sends: Sends = "held") -> None:
    """Let a rank of a stock engine be a virtual GPU.

    `engine`: what `deepspeed.initialize` returned. Once a process, after it.
    """
    gpu.watch(engine.module)
    gpu.watch_optimizer(engine.basic_optimizer)
    gpu.pool.know(lambda: _known(engine))
    StockLinks(deepspeed_comm.cdb, gpu, sends).impose(engine.basic_optimizer)


class StockLinks:
    """Wraps the methods of DeepSpeed's communication backend of one rank."""

    def __init__(self, backend: Any, gpu: VirtualGpu, sends: Sends = "held") -> None:
        self._backend, self._gpu, self._sends = backend, gpu, sends
        self._beside_s = 0.0
        """When the last sum of gradients ends that nobody has waited for."""
        self._sent: list[Any] = []
        """Messages of this step on their real way."""

    def impose(self, optimizer: torch.optim.Optimizer | None = None) -> None:
        """Replace the methods; an optimizer's step waits for all sums."""
        for name, price in self._prices().items():
            setattr(self._backend, name, self._timed(name, price))
        self._backend.send = self._send
        receive = self._backend.recv
        self._backend.recv = lambda tensor, src=None, **rest: self._receive(
            receive, tensor, src, rest
        )
        self._gpu.after_step = self._end_step
        if optimizer is not None:
            optimizer.register_step_pre_hook(lambda *_: self._settle())

    def _prices(self) -> dict[str, Callable[..., Collective]]:
        network, size = self._gpu.network, self._gpu.virtual_bytes

        def gathered(ranks: Any, tensors: Iterable[Tensor]) -> Collective:
            whole = len(ranks) * sum(map(size, tensors))
            return gather(network, ranks, equal_shards(ranks, whole))

        def scattered(ranks: Any, tensors: Iterable[Tensor]) -> Collective:
            return reduce_scatter(network, ranks, equal_shards(ranks, sum(map(size, tensors))))

        return {
            "all_reduce": lambda ranks, tensor, **_: all_reduce(network, ranks, size(tensor)),
            "all_reduce_coalesced": lambda ranks, tensors, **_: all_reduce(
                network, ranks, sum(map(size, tensors))
            ),
            "reduce": lambda ranks, tensor, dst, **_: reduce(network, ranks, size(tensor), dst),
            "broadcast": lambda ranks, tensor, src, **_: broadcast(
                network, ranks, size(tensor), src
            ),
            "all_gather": lambda ranks, tensor, **_: gathered(ranks, [tensor]),
            "all_gather_into_tensor": lambda ranks, input_tensor, **_: gathered(
                ranks, [input_tensor]
            ),
            "all_gather_coalesced": lambda ranks, input_tensors, **_: gathered(
                ranks, input_tensors
            ),
            "reduce_scatter": lambda ranks, input_list, **_: scattered(ranks, input_list),
            "reduce_scatter_tensor": lambda ranks, input_tensor, **_: scattered(
                ranks, [input_tensor]
            ),
            "barrier": lambda ranks, **_: agreement(network, ranks),
        }

    def _timed(self, name: str, price_of: Callable[..., Collective]) -> Callable[..., Any]:
        real = getattr(self._backend, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            named = dict(zip(_NAMES[name], args, strict=False)) | kwargs
            ranks = tuple(dist.get_process_group_ranks(named.get("group") or dist.group.WORLD))
            if len(ranks) == 1:
                return real(**named)
            few = _is_few(named)
            price = agreement(self._gpu.network, ranks) if few else price_of(ranks, **named)
            key = self._gpu.arrive(ranks, price)
            if named.get("async_op"):
                return VirtualHandle(real(**named), self._gpu, key)
            if "reduce" in name and not few:
                return self._run_beside(key, lambda: real(**named))
            passage = self._gpu.passage(key)
            result = real(**named)
            self._settle()
            self._gpu.clock.wait_until(passage.stop_s)
            return result

        return call

    def _run_beside(self, key: Key, run: Callable[[], Any]) -> Any:
        passage = self._gpu.passage(key, "ready")
        result = run()
        self._gpu.clock.wait_until(passage.ready_s)
        self._beside_s = max(self._beside_s, passage.stop_s)
        return result

    def _settle(self) -> None:
        self._gpu.clock.wait_until(self._beside_s)

    def _end_step(self) -> None:
        sent, self._sent = self._sent, []
        for work, _ in sent:
            work.wait()
        self._beside_s = 0.0

    def _send(self, tensor: Tensor, dst: int, group: Any = None, tag: int = 0) -> None:
        own = self._gpu.rank
        if self._sends == "held":
            passage = self._gpu.passage(self._gpu.arrive((own, dst), self._price(tensor, own, dst)))
        # Really it must not block, for its receiver may wait for this rank's clock.
        with _disable_current_modes():
            copy = tensor.detach().clone()
        self._sent.append((dist.isend(copy, dst, group=group, tag=tag), copy))
        if self._sends == "held":
            self._gpu.clock.wait_until(passage.stop_s)
        else:
            key = self._message_key(own, dst)
            num_bytes = self._bytes_of(tensor)
            self._gpu.wires.send(self._gpu.clock.now_s, dst, key, num_bytes, ordered=False)

    def _receive(self, real: Any, tensor: Tensor, src: int, rest: dict[str, Any]) -> Any:
        own = self._gpu.rank
        if self._sends == "held":
            key = self._gpu.arrive((src, own), self._price(tensor, src, own))
        else:
            key = self._message_key(src, own)
        passage = self._gpu.passage(key)
        result = real(tensor, src, **rest)
        self._gpu.clock.wait_until(passage.stop_s)
        return result

    def _price(self, tensor: Tensor, source: int, target: int) -> Collective:
        return message(self._gpu.network, source, target, self._bytes_of(tensor))

    def _bytes_of(self, tensor: Tensor) -> float:
        return float(tensor.nbytes) if _small(tensor) else self._gpu.virtual_bytes(tensor)

    def _message_key(self, source: int, target: int) -> Key:
        return (source, target, self._gpu.wires.number_of(("message", source, target)))


class VirtualHandle:
    """An asynchronous collective that is done when its virtual time is over."""

    def __init__(self, real: Any, gpu: VirtualGpu, key: Key) -> None:
        self._real, self._gpu = real, gpu
        self._key: Key | None = key

    def wait(self, *args: Any, **kwargs: Any) -> Any:
        """Wait for both; a second call returns at once."""
        key, self._key = self._key, None
        passage = None if key is None else self._gpu.passage(key)
        result = self._real.wait(*args, **kwargs) if self._real is not None else None
        if passage is not None:
            self._gpu.clock.wait_until(passage.stop_s)
        return result

    def is_completed(self) -> bool:
        """Nothing looks but to wait."""
        return self._key is None


_GROUPED = ("group", "async_op")
_NAMES: dict[str, tuple[str, ...]] = {
    "barrier": _GROUPED,
    "all_reduce": ("tensor", "op", *_GROUPED),
    "all_reduce_coalesced": ("tensors", "op", *_GROUPED),
    "reduce": ("tensor", "dst", "op", *_GROUPED),
    "broadcast": ("tensor", "src", *_GROUPED),
    "all_gather": ("tensor_list", "tensor", *_GROUPED),
    "all_gather_into_tensor": ("output_tensor", "input_tensor", *_GROUPED),
    "all_gather_coalesced": ("output_tensors", "input_tensors", *_GROUPED),
    "reduce_scatter": ("output", "input_list", "op", *_GROUPED),
    "reduce_scatter_tensor": ("output_tensor", "input_tensor", "op", *_GROUPED),
}
"""Parameters of the backend's methods, in order."""


def _is_few(named: dict[str, Any]) -> bool:
    values = [value for value in named.values() if isinstance(value, Tensor | list)]
    tensors = [each for value in values for each in (value if isinstance(value, list) else [value])]
    return all(_small(each) for each in tensors if isinstance(each, Tensor))


def _small(tensor: Tensor) -> bool:
    return tensor.numel() <= FEW or not tensor.is_floating_point()


def _known(engine: Any) -> Iterable[tuple[Purpose, Tensor]]:
    """What a stock engine holds, as far as it is told apart."""
    module: nn.Module = engine.module
    for parameter in module.parameters():
        yield "parameters", parameter.data
        if parameter.grad is not None:
            yield "gradients", parameter.grad
    for group in engine.basic_optimizer.param_groups:
        for master in group["params"]:
            if master.grad is not None:
                yield "gradients", master.grad
    for state in engine.basic_optimizer.state.values():
        yield from (("optimizer", each) for each in state.values() if torch.is_tensor(each))
