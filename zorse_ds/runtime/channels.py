"""How the payload of a message gets from one rank to another."""

from datetime import timedelta
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor


class Sending(Protocol):
    """A payload on its way out."""

    def wait(self) -> None:
        """Block until the payload has left and its memory may be reused."""


class Arriving(Protocol):
    """A payload on its way in."""

    def wait(self) -> Tensor:
        """Block until the payload is here: uint8, on the rank's device."""


class Channel(Protocol):
    """Moves contiguous uint8 tensors between the own rank and a peer."""

    def isend(self, payload: Tensor, peer: int, tag: int) -> Sending:
        """Start to send; nothing blocks."""

    def irecv(self, num_bytes: int, peer: int, tag: int) -> Arriving:
        """Start to receive; nothing blocks."""


class _Sending:
    """Keeps payload and work together: gloo cancels a send whose handle is dropped."""

    def __init__(self, payload: Tensor, work: dist.Work) -> None:
        self._payload, self._work = payload, work

    def wait(self) -> None:
        """See `Sending.wait`."""
        self._work.wait()


class _Arriving:
    def __init__(self, payload: Tensor, work: dist.Work, timeout_s: float) -> None:
        self._payload, self._work, self._timeout_s = payload, work, timeout_s

    def wait(self) -> Tensor:
        """See `Arriving.wait`."""
        self._work.wait(timedelta(seconds=self._timeout_s))
        return self._payload


class GlooChannel:
    """Host memory over gloo. `group` must span the world, so peers are world ranks."""

    def __init__(self, group: dist.ProcessGroup | None, timeout_s: float) -> None:
        self._group, self._timeout_s = group, timeout_s

    def isend(self, payload: Tensor, peer: int, tag: int) -> Sending:
        """See `Channel.isend`."""
        return _Sending(payload, _work(dist.isend(payload, peer, group=self._group, tag=tag)))

    def irecv(self, num_bytes: int, peer: int, tag: int) -> Arriving:
        """See `Channel.irecv`."""
        payload = torch.empty(num_bytes, dtype=torch.uint8)
        work = _work(dist.irecv(payload, peer, group=self._group, tag=tag))
        return _Arriving(payload, work, self._timeout_s)


class NcclChannel:
    """Device memory over one NCCL communicator, which serves one directed stage edge.

    NCCL ignores tags and runs a communicator's operations in issue order, so forward and backward
    traffic between the same ranks must not share one. Not run yet: no GPU was at hand.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self._group, self._device = group, device

    def isend(self, payload: Tensor, peer: int, tag: int) -> Sending:
        """See `Channel.isend`; the payload was written on the current stream."""
        return _Sending(payload, _work(dist.isend(payload, peer, group=self._group)))

    def irecv(self, num_bytes: int, peer: int, tag: int) -> Arriving:
        """See `Channel.irecv`; `wait` makes the current stream wait, not the host."""
        payload = torch.empty(num_bytes, dtype=torch.uint8, device=self._device)
        return _DeviceArriving(payload, _work(dist.irecv(payload, peer, group=self._group)))


class _DeviceArriving:
    def __init__(self, payload: Tensor, work: dist.Work) -> None:
        self._payload, self._work = payload, work

    def wait(self) -> Tensor:
        """See `Arriving.wait`."""
        self._work.wait()
        self._payload.record_stream(torch.cuda.current_stream(self._payload.device))
        return self._payload


class StagedChannel:
    """Device memory by way of host memory, for ranks that cannot talk directly.

    The host part is a gloo group that spans the world: with NCCL as default backend, a gloo group
    that leaves ranks out would hang them.
    """

    def __init__(self, host: GlooChannel, device: torch.device) -> None:
        self._host, self._device = host, device

    def isend(self, payload: Tensor, peer: int, tag: int) -> Sending:
        """See `Channel.isend`; copies to pinned host memory first (waits for the copy)."""
        return self._host.isend(self._to_host(payload), peer, tag)

    def irecv(self, num_bytes: int, peer: int, tag: int) -> Arriving:
        """See `Channel.irecv`; the copy to the device starts in `wait`."""
        return _StagedArriving(self._host.irecv(num_bytes, peer, tag), self._device)

    def _to_host(self, payload: Tensor) -> Tensor:
        pinned = torch.empty(payload.shape, dtype=torch.uint8, pin_memory=payload.is_cuda)
        return pinned.copy_(payload)


class _StagedArriving:
    def __init__(self, host: Arriving, device: torch.device) -> None:
        self._host, self._device = host, device

    def wait(self) -> Tensor:
        """See `Arriving.wait`."""
        return self._host.wait().to(self._device)


def _work(work: dist.Work | None) -> dist.Work:
    assert work is not None, "only members of a process group send and receive over it"
    return work
