"""The memory of a virtual GPU: real tensors counted, times the miniature's ratio."""

import torch

from zorse_ds.core.gpus import GIB
from zorse_ds.errors import ZorseError
from zorse_ds.runtime.host_memory import HostMemory
from zorse_ds.runtime.ledger import Known, MemoryLedger, Purpose
from zorse_ds.schedule.instructions import Instruction


class VirtualMemoryError(torch.OutOfMemoryError, ZorseError):
    """A virtual GPU has no memory left; what CUDA's allocator would raise there."""


class VirtualPool(MemoryLedger):
    """A ledger with a limit. `ratio`: virtual bytes of a real one.

    Raises `VirtualMemoryError` at the allocation that does not fit.
    """

    def __init__(
        self,
        title: str,
        ratio: float,
        usable_bytes: int,
        reserve_bytes: int,
        known: Known = lambda: (),
        host: HostMemory | None = None,
    ) -> None:
        super().__init__(known, host)
        self._title = title
        self._ratio = ratio
        self._usable_bytes, self._reserve_bytes = usable_bytes, reserve_bytes
        self.instruction: Instruction | None = None
        """Under way, where the engine tells it."""

    def before(self, instruction: Instruction) -> None:
        """See `MemoryLedger.before`; also what the device is at work on."""
        super().before(instruction)
        self.instruction = instruction

    def know(self, known: Known) -> None:
        """Tensors whose purpose is known, once an engine has made them."""
        self._known = known

    @property
    def peak_bytes(self) -> float:
        """Virtual bytes at the peak, with what is reserved for the context."""
        return self.report.peak_bytes * self._ratio + self._reserve_bytes

    @property
    def room_bytes(self) -> float:
        """Virtual bytes that were left at the peak."""
        return self._usable_bytes - self.peak_bytes

    def at_peak(self) -> dict[str, float]:
        """What the peak consists of, in virtual bytes."""
        held = {str(k): v * self._ratio for k, v in self.report.at_peak.items()}
        return held | {"reserve": float(self._reserve_bytes)}

    def _add(self, purpose: Purpose, num_bytes: int) -> None:
        super()._add(purpose, num_bytes)
        held = self.held_bytes * self._ratio + self._reserve_bytes
        if num_bytes > 0 and held > self._usable_bytes:
            raise VirtualMemoryError(self._message(num_bytes * self._ratio, held))

    def _message(self, wanted: float, held: float) -> str:
        parts = {str(k): v * self._ratio for k, v in self._held.items() if v}
        parts["reserve"] = float(self._reserve_bytes)
        when = f" at {self._instruction}" if self._instruction else ""
        limit = _gib(self._usable_bytes)
        holds = ", ".join(f"{name} {_gib(value)}" for name, value in parts.items())
        return (
            f"CUDA out of memory (virtual): {self._title} tried to allocate {_gib(wanted)}{when}, "
            f"to hold {_gib(held)} of {limit}: {holds}; expected a plan that fits"
        )


def _gib(num_bytes: float) -> str:
    return f"{num_bytes / GIB:.2f} GiB"
