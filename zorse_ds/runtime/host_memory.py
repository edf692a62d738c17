"""Host memory for what a device has no room for: masters, optimizer state, shards, activations.

On a GPU it is pinned and copies run on a stream of their own. On the CPU, where device and host are
one, the same calls copy within it, so that order and peak can be tested; what is held is counted
either way. The CUDA branch has not been run yet: no GPU was at hand.
"""

import weakref
from collections.abc import Iterable
from collections.abc import Set as AbstractSet
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks


class Loading:
    """A copy to the device under way."""

    def __init__(self, event: Any = None) -> None:
        self._event = event

    def wait(self) -> None:
        """Make what runs next on the device wait for the copy; the host goes on."""
        if self._event is not None:
            torch.cuda.current_stream().wait_event(self._event)


class HostMemory:
    """Tensors of one rank in host memory, counted.

    `held_bytes` is what is held now, `peak_bytes` the most there was at once.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.held_bytes = 0
        self.peak_bytes = 0
        self._storages: set[int] = set()
        self._allocating = False
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def store(self, tensor: Tensor) -> Tensor:
        """A copy of a tensor in host memory; it is counted as long as it lives."""
        self._allocating = True
        host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=self._stream is not None)
        self._count(host)
        self._allocating = False
        return host.copy_(tensor.detach())

    def adopt(self, tensor: Tensor) -> None:
        """Count a tensor that was made in host memory by others (optimizer state)."""
        if storage_id(tensor) not in self._storages:
            self._count(tensor)

    @property
    def storages(self) -> AbstractSet[int]:
        """The storages (`storage_id`) that are held."""
        return self._storages

    def keeps(self, tensor: Tensor) -> bool:
        """The tensor is in this memory (or just being put there)."""
        return self._allocating or storage_id(tensor) in self._storages

    def start_load(self, host: Tensor, target: Tensor) -> Loading:
        """Start to copy into a tensor on the device, which nothing else may use until then."""
        if self._stream is None:
            target.copy_(host)
            return Loading()
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            target.copy_(host, non_blocking=True)
            event = torch.cuda.Event()
            event.record(self._stream)
        return Loading(event)

    def saving(self, parameters: Iterable[Tensor]) -> saved_tensors_hooks:
        """Inside, what autograd saves goes to host memory and comes back for backward.

        Parameters stay where they are: they are no activations.
        """
        resident = {storage_id(parameter) for parameter in parameters}

        def pack(tensor: Tensor) -> Tensor | tuple[Tensor, torch.device]:
            if storage_id(tensor) in resident or not tensor.numel():
                return tensor
            return self.store(tensor), tensor.device

        def unpack(packed: Tensor | tuple[Tensor, torch.device]) -> Tensor:
            return packed if isinstance(packed, Tensor) else packed[0].to(packed[1])

        return saved_tensors_hooks(pack, unpack)

    def _count(self, host: Tensor) -> None:
        self.held_bytes += host.nbytes
        self.peak_bytes = max(self.peak_bytes, self.held_bytes)
        key = storage_id(host)
        self._storages.add(key)
        weakref.finalize(host.untyped_storage(), self._uncount, key, host.nbytes)

    def _uncount(self, key: int, num_bytes: int) -> None:
        self._storages.discard(key)
        self.held_bytes -= num_bytes


def storage_id(tensor: Tensor) -> int:
    """What tells the memory of a tensor from any other that is alive."""
    return tensor.untyped_storage()._cdata
