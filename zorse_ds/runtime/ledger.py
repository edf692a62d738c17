"""What a rank holds in device memory, by purpose: counted from its allocations, not from a formula.

While a ledger is entered it sees every tensor that torch makes in this thread, and when it dies.
Costs some microseconds an operation, so it is used on demand.
"""

import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from zorse_ds.runtime.host_memory import HostMemory, storage_id
from zorse_ds.schedule.instructions import ComputeInstruction, Instruction, describe

Purpose = Literal["parameters", "gradients", "optimizer", "activations", "buffers"]
Known = Callable[[], Iterable[tuple[Purpose, Tensor]]]
"""The tensors whose purpose is known; asked again after every instruction."""


@dataclass(slots=True)
class MemoryReport:
    """Bytes of one step on one rank."""

    peak_bytes: int = 0
    """The most at any instant, temporaries of the layers included."""
    at_peak: dict[Purpose, int] = field(default_factory=dict)
    """What the peak consists of."""
    peak_instruction: str = ""
    """The instruction under way at the peak."""
    allocator_peak_bytes: int | None = None
    """What CUDA's allocator says its peak was; None elsewhere."""
    after: list[tuple[str, int]] = field(default_factory=list)
    """Bytes held after each instruction."""


@dataclass(slots=True)
class _Entry:
    num_bytes: int
    purpose: Purpose


class MemoryLedger(TorchDispatchMode):
    """Counts the storages of one rank but for those in host memory.

    `report` is about the current or last step.
    """

    def __init__(self, known: Known, host: HostMemory | None = None) -> None:
        super().__init__()
        self._known = known
        self._host = host
        self._entries: dict[int, _Entry] = {}
        self._held: Counter[Purpose] = Counter()
        self._now: Purpose = "buffers"
        self._instruction = ""
        self.report = MemoryReport()

    @property
    def held_bytes(self) -> int:
        """What is held now."""
        return sum(self._held.values())

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Count inside: a step, after the last peak is forgotten."""
        self.report = MemoryReport()
        self.refresh()
        with self:
            yield

    def before(self, instruction: Instruction) -> None:
        """What is allocated next is for this instruction."""
        self._instruction = describe(instruction)
        computes = isinstance(instruction, ComputeInstruction)
        self._now = "activations" if computes else "buffers"

    def after(self) -> None:
        """Name the purpose of what is known by now and note what is held."""
        self.refresh()
        self.report.after.append((self._instruction, self.held_bytes))

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Run an operation and look at its results."""
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor) and leaf.device.type != "meta":
                self._see(leaf, self._now)
        return result

    def _see(self, tensor: Tensor, purpose: Purpose) -> None:
        if self._host is not None and self._host.keeps(tensor):
            return
        storage = tensor.untyped_storage()
        key, num_bytes = storage_id(tensor), storage.nbytes()
        entry = self._entries.get(key)
        if entry is None:
            self._entries[key] = _Entry(num_bytes, purpose)
            weakref.finalize(storage, self._forget, key)
            self._add(purpose, num_bytes)
        elif entry.num_bytes != num_bytes:
            self._add(entry.purpose, num_bytes - entry.num_bytes)
            entry.num_bytes = num_bytes

    def refresh(self) -> None:
        """Storages of known tensors may have been resized, and may have got a purpose or a home."""
        if self._host is not None:
            for key in self._entries.keys() & self._host.storages:
                self._forget(key)
        for purpose, tensor in self._known():
            self._see(tensor, purpose)
            entry = self._entries.get(storage_id(tensor))
            if entry is not None and entry.purpose != purpose:
                self._held[entry.purpose] -= entry.num_bytes
                self._held[purpose] += entry.num_bytes
                entry.purpose = purpose

    def _add(self, purpose: Purpose, num_bytes: int) -> None:
        self._held[purpose] += num_bytes
        if self.held_bytes > self.report.peak_bytes:
            self.report.peak_bytes = self.held_bytes
            self.report.at_peak = {k: v for k, v in self._held.items() if v}
            self.report.peak_instruction = self._instruction

    def _forget(self, key: int) -> None:
        entry = self._entries.pop(key, None)
        if entry is not None:
            self._held[entry.purpose] -= entry.num_bytes


def allocator_peak_bytes(device: torch.device) -> int | None:
    """The allocator's own peak since the last call, on CUDA; None elsewhere. Not run yet."""
    if device.type != "cuda":
        return None
    peak = torch.cuda.max_memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    return peak
