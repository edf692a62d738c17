"""How long a rank computes in a step, stage by stage, without the time in which it waits."""

import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from zorse_ds.ranges import Range
from zorse_ds.runtime.host_room import free_bytes, peak_resident_bytes, resident_bytes
from zorse_ds.runtime.stage import StageRunner
from zorse_ds.runtime.values import Message

Pass = tuple[int, Literal["forward", "backward"]]
"""Stage and way."""


@dataclass(frozen=True, slots=True)
class Measured:
    """What a rank measured of one step."""

    step_s: float
    passes_s: dict[Pass, float] = field(default_factory=dict)
    """All its micro-batches together; waiting for messages and parameters is not in it."""
    grown_bytes: float = 0.0
    """By how much the peak of device memory is above what was held when the step began."""
    room_bytes: float | None = None
    """What was left at that peak; None where nobody knows."""

    @property
    def busy_s(self) -> float:
        """In passes of all stages."""
        return sum(self.passes_s.values())


class Stopwatch(Protocol):
    """Measures the passes of one rank."""

    def begin(self) -> None:
        """A step starts; what was measured before is forgotten."""

    def passing(self, at: Pass) -> AbstractContextManager[None]:
        """Inside, a pass is computed and nobody is waited for."""

    def read(self) -> Measured:
        """The step so far."""


class HostStopwatch:
    """By the host's clock, for devices that compute while they are told to.

    Memory is that of the host, which `num_local` processes share. What a process grew by is taken
    from the most that it ever held, so it is too large rather than too small.
    """

    def __init__(self, num_local: int = 1) -> None:
        self._num_local = num_local
        self._origin, self._held = 0.0, 0
        self._passes_s: defaultdict[Pass, float] = defaultdict(float)

    def begin(self) -> None:
        """See `Stopwatch.begin`."""
        self._passes_s.clear()
        self._held = resident_bytes()
        self._origin = time.perf_counter()

    @contextmanager
    def passing(self, at: Pass) -> Iterator[None]:
        """See `Stopwatch.passing`."""
        start = time.perf_counter()
        yield
        self._passes_s[at] += time.perf_counter() - start

    def read(self) -> Measured:
        """See `Stopwatch.read`."""
        step_s = time.perf_counter() - self._origin
        free = free_bytes()
        room = None if free is None else free / self._num_local
        grown = max(0, peak_resident_bytes() - self._held)
        return Measured(step_s, dict(self._passes_s), grown, room)


class CudaStopwatch:
    """By events on the device's current stream, and by the allocator's peak. Not run yet."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._origin, self._held = 0.0, 0
        self._events: list[tuple[Pass, torch.cuda.Event, torch.cuda.Event]] = []

    def begin(self) -> None:
        """See `Stopwatch.begin`."""
        self._events.clear()
        self._held = torch.cuda.memory_allocated(self._device)
        self._origin = time.perf_counter()

    @contextmanager
    def passing(self, at: Pass) -> Iterator[None]:
        """See `Stopwatch.passing`."""
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        yield
        stop.record()
        self._events.append((at, start, stop))

    def read(self) -> Measured:
        """See `Stopwatch.read`. The allocator's peak may be that of an earlier step, never less."""
        torch.cuda.synchronize(self._device)
        step_s = time.perf_counter() - self._origin
        passes_s: defaultdict[Pass, float] = defaultdict(float)
        for at, start, stop in self._events:
            passes_s[at] += start.elapsed_time(stop) / 1000
        peak = torch.cuda.max_memory_allocated(self._device)
        unused = torch.cuda.mem_get_info(self._device)[0]
        room = unused + torch.cuda.memory_reserved(self._device) - peak
        return Measured(step_s, dict(passes_s), max(0, peak - self._held), max(0, room))


def stopwatch_of(device: torch.device, num_local: int) -> Stopwatch:
    """The one that is true for a device of a host with so many ranks."""
    return CudaStopwatch(device) if device.type == "cuda" else HostStopwatch(num_local)


class TimedRunner(StageRunner):
    """A `StageRunner` whose passes are measured."""

    def __init__(
        self,
        stage: int,
        watch: Stopwatch,
        forward_fn: Callable[[Any], Any],
        saving: Callable[[], AbstractContextManager[Any]],
    ) -> None:
        super().__init__(forward_fn, saving)
        self.stage, self.watch = stage, watch

    def forward(self, micro_batch: int, value: Any) -> Any:
        """See `StageRunner.forward`."""
        with self.watch.passing((self.stage, "forward")):
            return super().forward(micro_batch, value)

    def backward(self, micro_batch: int, grads: Sequence[tuple[Range, Message]]) -> None:
        """See `StageRunner.backward`."""
        with self.watch.passing((self.stage, "backward")):
            super().backward(micro_batch, grads)

    def backward_from_loss(self, micro_batch: int, loss: Tensor | None) -> None:
        """See `StageRunner.backward_from_loss`."""
        with self.watch.passing((self.stage, "backward")):
            super().backward_from_loss(micro_batch, loss)
