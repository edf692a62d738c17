"""One virtual GPU: the speed, memory and links of a rank, attached to layers and optimizers."""

import time
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from zorse_ds.core.plan import Dtype
from zorse_ds.cost.collectives import Collective
from zorse_ds.cost.network import Network, network_of
from zorse_ds.cost.optimizer import step_s
from zorse_ds.cost.setting import Setting
from zorse_ds.rehearsal.clock import Pace, VirtualClock
from zorse_ds.rehearsal.exchange import Moment
from zorse_ds.rehearsal.figures import StepFigures, timeline_of
from zorse_ds.rehearsal.lanes import Passage
from zorse_ds.rehearsal.layers import MiniLayer
from zorse_ds.rehearsal.miniature import Miniature
from zorse_ds.rehearsal.pool import VirtualPool
from zorse_ds.rehearsal.wires import WireClient, WireServer

Key = Hashable
"""Of a message or a collective."""
START_S = 0.02
"""Real seconds from the moment all ranks are ready to the origin of a step."""


class VirtualGpu:
    """Rank `rank` of a setting's cluster, that computes in `dtype`.

    Collective over the world, which must be initialised: every rank constructs it.
    """

    def __init__(self, setting: Setting, rank: int, dtype: Dtype, pace: Pace) -> None:
        self.setting, self.rank, self.dtype = setting, rank, dtype
        self.gpu = setting.cluster.gpus[rank]
        self.miniature = Miniature(setting)
        self.network: Network = network_of(setting)
        title = f"rank {rank} ({self.gpu.type.name})"
        self.pool = VirtualPool(
            title, self.miniature.ratio, self.gpu.usable_bytes, setting.reserve_bytes
        )
        self.slowness = 1.0
        """Seconds of a pass over those that the setting says."""
        self.counting: Callable[[], AbstractContextManager[Any]] = self.pool.counting
        """Entered for a step; an engine that has a ledger of its own enters it itself."""
        self.after_step: Callable[[], None] = lambda: None
        self._control = dist.new_group(backend="gloo")
        self.wires = self._connected()
        self.clock = VirtualClock(pace, self.wires.advance)

    def _connected(self) -> WireClient:
        addresses: list[Any] = [None]
        if self.rank == 0:
            server = WireServer(Network(self.setting.cluster), dist.get_world_size())
            addresses = [server.address]
        dist.broadcast_object_list(addresses, src=0, group=self._control)
        return WireClient(addresses[0], self.rank)

    # ---- what the device computes

    def watch(self, module: nn.Module) -> None:
        """Give every layer in small inside `module` the duration of the real one."""
        for layer in module.modules():
            if isinstance(layer, MiniLayer):
                self._watch(layer, layer.kind)

    def _watch(self, layer: nn.Module, kind: str) -> None:
        shape = self.setting.model.kinds[kind]

        def seconds(size: int) -> Any:
            return self.setting.timer(
                self.gpu.type.name, kind, shape, self.dtype, self.setting.seq_len, size
            )

        def forward(module: nn.Module, inputs: Any, output: Tensor) -> None:
            self._pass("ForwardPass", seconds(len(output)).forward_s)

        def backward(module: nn.Module, grads: Sequence[Tensor]) -> None:
            self._pass("BackwardPass", seconds(len(grads[0])).backward_s)

        layer.register_forward_hook(forward)
        # Before it, so that gradients come when the layer's time is over and not at its start.
        layer.register_full_backward_pre_hook(backward)

    def _pass(self, name: str, seconds: float) -> None:
        """A layer's part of a pass; forward again for recompute is part of the backward pass."""
        cause = self.pool.instruction
        self.work(name if cause is None else type(cause).__name__, seconds * self.slowness)

    def work(self, name: str, seconds: float) -> None:
        """Be at work, for the instruction under way."""
        self.clock.work(name, seconds, self.pool.instruction)

    def watch_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Give the optimizer's step the duration of stepping as many real parameters."""

        def stepped(inner: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
            numel = sum(
                parameter.numel()
                for group in inner.param_groups
                for parameter in group["params"]
                if parameter.grad is not None
            )
            count = numel * self.miniature.ratio
            self.work("OptimizerStep", step_s(self.setting, self.gpu.type, self.dtype, count))

        optimizer.register_step_post_hook(stepped)

    # ---- links

    def arrive(self, ranks: tuple[int, ...], price: Collective) -> Key:
        """Come to a collective, without waiting for it."""
        return self.wires.arrive(self.clock.now_s, ranks, price)

    def passage(self, key: Key, until: Moment = "stop") -> Passage:
        """Wait for a message or a collective; the clock is for the caller to move on.

        A process asks before it does the real thing: if it hung there, its clock would stand
        still, and others could wait for that.
        """
        return self.wires.wait(self.clock.now_s, key, until)

    def join(self, ranks: tuple[int, ...], price: Collective, run: Callable[[], Any]) -> Any:
        """Do a collective, really by `run`: everybody goes on when it ends. Returns its result."""
        passage = self.passage(self.arrive(ranks, price))
        result = run()
        self.clock.wait_until(passage.stop_s)
        return result

    def virtual_bytes(self, tensor: Tensor) -> float:
        """What a tensor of the miniature stands for."""
        return tensor.numel() * tensor.element_size() * self.miniature.ratio

    # ---- steps

    @contextmanager
    def building(self) -> Iterator[None]:
        """Everything allocated inside is on the device."""
        with self.pool:
            yield

    def step(self, run: Callable[[], Any]) -> StepFigures:
        """Run a training step from an origin that all ranks share. Collective over the world."""
        self._begin()
        with self.counting():
            run()
        scale = self.clock.pace.scale
        wall_s = (time.monotonic() - self.clock.origin) / scale if scale else self.clock.now_s
        self.wires.finish(self.clock.now_s)
        self.after_step()
        return StepFigures(
            rank=self.rank,
            wall_s=wall_s,
            virtual_s=self.clock.now_s,
            behind_s=self.clock.behind_s,
            peak_bytes=self.pool.peak_bytes,
            at_peak=self.pool.at_peak(),
            timeline=timeline_of(self.rank, self.clock.works),
        )

    def _begin(self) -> None:
        dist.barrier(self._control)
        if self.rank == 0:
            self.wires.clear()
        origin: list[Any] = [time.monotonic() + START_S]
        dist.broadcast_object_list(origin, src=0, group=self._control)
        self.clock.begin(origin[0])
