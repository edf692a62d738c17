"""Latency and bandwidth between two ranks: messages to and fro, of several sizes, and a fit."""

import time
from collections.abc import Sequence
from itertools import combinations
from statistics import median

import numpy as np
import torch
import torch.distributed as dist

from zorse_ds.profiler import probe_cuda
from zorse_ds.profiler.probe_facts import PairFigures, Pairing

SIZES = (1 << 12, 1 << 16, 1 << 20, 1 << 23)
"""Bytes of a message."""
BUDGET_S = 0.15
"""About how long the messages of one size may take."""
_MIN_TRIPS, _MAX_TRIPS = 3, 50
_STREAM = 8
"""Messages of the largest size that each pair sends when all pairs send at once."""


def pairings(hosts: Sequence[str]) -> tuple[Pairing, ...]:
    """What is to be measured, one after the other, given the host of each rank.

    Inside a host its first rank with each other one; between two hosts their first ranks, and then
    as many pairs at once as the smaller has ranks.
    """
    ranks: dict[str, list[int]] = {}
    for rank, host in enumerate(hosts):
        ranks.setdefault(host, []).append(rank)
    inside = [Pairing(((own[0], other),)) for own in ranks.values() for other in own[1:]]
    between = [Pairing(tuple(zip(a, b, strict=False))) for a, b in combinations(ranks.values(), 2)]
    return (*inside, *between)


class Messenger:
    """Sends and receives on this rank's device, through host memory where it must."""

    def __init__(self, rank: int, device: torch.device, control: dist.ProcessGroup) -> None:
        self.rank = rank
        self.device = device
        self.control = control
        """A gloo group that spans all ranks."""

    def measure(self, pairing: Pairing) -> PairFigures | None:
        """The figures of a pairing, on the rank that leads it; None elsewhere. Collective."""
        figures = None
        if self.rank in pairing.pairs[0]:
            figures = self._alone(pairing)
        total = self._together(pairing, figures)
        if figures is None or self.rank != pairing.pairs[0][0]:
            return None
        latency_s, bytes_per_s, is_direct = figures
        return PairFigures(pairing, latency_s, bytes_per_s, max(bytes_per_s, total), is_direct)

    def _alone(self, pairing: Pairing) -> tuple[float, float, bool]:
        """Latency, bytes a second and directness of the first pair, which nothing disturbs."""
        peer, leads = self._place(pairing.pairs[0])
        is_direct = self._is_direct(peer, leads)
        times = [self._one_way_s(size, peer, leads, is_direct) for size in SIZES]
        return (*latency_and_rate(SIZES, times), is_direct)

    def _together(self, pairing: Pairing, figures: tuple[float, float, bool] | None) -> float:
        """Bytes a second of all pairs at once; 0 on ranks of none. Collective."""
        told: list[bool | None] = [None] * dist.get_world_size(self.control)
        dist.all_gather_object(told, figures and figures[2], group=self.control)
        is_direct = told[pairing.pairs[0][0]] is True
        elapsed_s = 0.0
        for pair in pairing.pairs if len(pairing.pairs) > 1 else ():
            if self.rank in pair:
                elapsed_s = self._stream_s(pair, is_direct)
        slowest = torch.tensor(elapsed_s, dtype=torch.float64)
        dist.all_reduce(slowest, dist.ReduceOp.MAX, group=self.control)
        num_bytes = len(pairing.pairs) * _STREAM * SIZES[-1]
        return num_bytes / slowest.item() if slowest.item() else 0.0

    def _stream_s(self, pair: tuple[int, int], is_direct: bool) -> float:
        """Seconds from the first of many messages to the answer to the last."""
        peer, leads = self._place(pair)
        block, answer = self._block(SIZES[-1]), self._block(1)
        start = time.perf_counter()
        for _ in range(_STREAM):
            self._pass(block, peer, leads, is_direct)
        self._pass(answer, peer, not leads, is_direct)
        return time.perf_counter() - start

    def _place(self, pair: tuple[int, int]) -> tuple[int, bool]:
        """The other rank, and whether this one sends first."""
        leads = self.rank == pair[0]
        return pair[1 if leads else 0], leads

    def _is_direct(self, peer: int, leads: bool) -> bool:
        if self.device.type == "cpu":
            return True
        ours = torch.tensor(int(probe_cuda.can_send(self.device, peer, leads)))
        theirs = torch.empty_like(ours)
        self._exchange(ours, theirs, peer, leads)
        return bool(ours and theirs)

    def _exchange(self, ours: torch.Tensor, theirs: torch.Tensor, peer: int, leads: bool) -> None:
        for sends in (leads, not leads):
            if sends:
                dist.send(ours, peer, group=self.control)
            else:
                dist.recv(theirs, peer, group=self.control)

    def _one_way_s(self, size: int, peer: int, leads: bool, is_direct: bool) -> float:
        """Seconds of a message of `size` bytes: half the median of several round trips."""
        block = self._block(size)
        self._round_trip_s(block, peer, leads, is_direct)
        first_s = self._round_trip_s(block, peer, leads, is_direct)
        trips = torch.tensor(min(_MAX_TRIPS, max(_MIN_TRIPS, int(BUDGET_S / first_s))))
        if leads:
            dist.send(trips, peer, group=self.control)
        else:
            dist.recv(trips, peer, group=self.control)
        times = [self._round_trip_s(block, peer, leads, is_direct) for _ in range(int(trips))]
        return median(times) / 2

    def _round_trip_s(self, block: torch.Tensor, peer: int, leads: bool, is_direct: bool) -> float:
        start = time.perf_counter()
        self._pass(block, peer, leads, is_direct)
        self._pass(block, peer, not leads, is_direct)
        return time.perf_counter() - start

    def _pass(self, block: torch.Tensor, peer: int, sends: bool, is_direct: bool) -> None:
        """One message, complete when this returns: sent by one rank, received by the other."""
        on_host = self.device.type == "cpu" or not is_direct
        if not on_host:
            (dist.send if sends else dist.recv)(block, peer)
            torch.cuda.synchronize(self.device)
        elif sends:
            dist.send(block.cpu(), peer, group=self.control)
        else:
            arrived = block if self.device.type == "cpu" else torch.empty_like(block, device="cpu")
            dist.recv(arrived, peer, group=self.control)
            block.copy_(arrived)

    def _block(self, size: int) -> torch.Tensor:
        return torch.zeros(size, dtype=torch.uint8, device=self.device)


def latency_and_rate(sizes: Sequence[int], times_s: Sequence[float]) -> tuple[float, float]:
    """The latency and the bytes a second that fit best, in relative terms, to `times_s`."""
    times = np.asarray(times_s)
    rows = np.stack([np.ones(len(sizes)), np.asarray(sizes, dtype=float)], axis=1)
    latency_s, s_per_byte = np.linalg.lstsq(rows / times[:, None], np.ones(len(sizes)), rcond=None)[
        0
    ]
    if s_per_byte <= 0:
        return float(min(times)), float(sizes[-1] / times[-1])
    return float(np.clip(latency_s, 0, min(times))), float(1 / s_per_byte)
