"""The lanes of the network during a simulated step, and what passes over them."""

from dataclasses import dataclass

from zorse_ds.core.layout import Transfer
from zorse_ds.cost.collectives import Collective
from zorse_ds.simulator.durations import Durations


@dataclass(frozen=True, slots=True)
class LaneUse:
    """Something passed over a lane (its number in the network) for a while."""

    lane: int
    start_s: float
    stop_s: float


class Wires:
    """When each lane is free again; what needs several takes them all at once (cut-through)."""

    def __init__(self, durations: Durations, record: bool) -> None:
        self._network = durations.network
        self._bytes = durations.bytes_per_sample
        self._staged_s_per_byte = durations.staged_s_per_byte
        self._staged = durations.staged_boundaries
        self._free: list[float] = []
        self._record = record
        self.busy_s: list[float] = []
        """Of each lane."""
        self.uses: list[LaneUse] = []

    def send(self, transfer: Transfer, forward: bool, now: float) -> tuple[float, float]:
        """Start a message once its lanes are free; returns its start and its arrival."""
        source, target = transfer.source_rank, transfer.target_rank
        if not forward:
            source, target = target, source
        first, behind = transfer.samples
        boundary = transfer.boundary
        num_bytes = (behind - first) * self._bytes[boundary][not forward]
        route = self._network.route(source, target)
        if len(self._free) < len(self._network.lanes):
            self._grow()
        free, busy = self._free, self.busy_s
        start = now
        for lane in route.lanes:
            if free[lane] > start:
                start = free[lane]
        for lane, s_per_byte in zip(route.lanes, route.s_per_byte, strict=True):
            taken = num_bytes * s_per_byte
            free[lane] = start + taken
            busy[lane] += taken
            if self._record:
                self.uses.append(LaneUse(lane, start, start + taken))
        stop = start + route.latency_s + num_bytes * route.slowest_s_per_byte
        if boundary in self._staged:
            stop += num_bytes * self._staged_s_per_byte(source, target)
        return start, stop

    def collect(self, collective: Collective, now: float) -> tuple[float, float]:
        """Run a collective once its lanes are free; returns its start and its end."""
        self._grow()
        start = max([now, *(self._free[lane] for lane in collective.lanes)])
        for lane, taken in zip(collective.lanes, collective.busy_s, strict=True):
            self._free[lane] = start + taken
            self.busy_s[lane] += taken
            if self._record:
                self.uses.append(LaneUse(lane, start, start + taken))
        return start, start + collective.seconds

    def _grow(self) -> None:
        """The network numbers lanes as they are first used."""
        missing = len(self._network.lanes) - len(self._free)
        self._free += [0.0] * missing
        self.busy_s += [0.0] * missing
