"""Seconds of messages over a cluster's lanes.

The model is cut-through: a message holds all lanes of its path from its start, each for its bytes
over the lane's bandwidth, and has arrived `latency + bytes / slowest bandwidth` after its start.
Whoever wants a lane waits until it is free, in the order in which messages are ready.
"""

from collections.abc import Hashable
from dataclasses import dataclass
from functools import lru_cache

from zorse_ds.core.cluster import Cluster, Lane
from zorse_ds.cost.setting import Setting


@dataclass(frozen=True, slots=True)
class Route:
    """A path with its lanes as numbers; `lanes` and `s_per_byte` go together."""

    latency_s: float
    lanes: tuple[int, ...]
    s_per_byte: tuple[float, ...]
    slowest_s_per_byte: float

    def transfer_s(self, num_bytes: float) -> float:
        """Of a message that is alone."""
        return self.latency_s + num_bytes * self.slowest_s_per_byte


class Network:
    """The lanes of a cluster, numbered as they are first used, and the routes over them."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.lanes: list[Lane] = []
        self._numbers: dict[Hashable, int] = {}
        self._routes: dict[tuple[int, int], Route] = {}

    def route(self, source: int, target: int) -> Route:
        """From one rank to another one."""
        found = self._routes.get((source, target))
        if found is None:
            found = self._routes[source, target] = self._new_route(source, target)
        return found

    def transfer_s(self, source: int, target: int, num_bytes: float) -> float:
        """Seconds of a message that has its lanes for itself."""
        return self.route(source, target).transfer_s(num_bytes)

    def _new_route(self, source: int, target: int) -> Route:
        path = self.cluster.path(source, target)
        lanes = tuple(self._number(lane) for lane in path.lanes)
        per_byte = tuple(1.0 / lane.bytes_per_s for lane in path.lanes)
        return Route(path.latency_s, lanes, per_byte, max(per_byte))

    def _number(self, lane: Lane) -> int:
        number = self._numbers.setdefault(lane.key, len(self.lanes))
        if number == len(self.lanes):
            self.lanes.append(lane)
        return number


@lru_cache(maxsize=8)
def network_of(setting: Setting) -> Network:
    """The one `Network` of a setting's cluster."""
    return Network(setting.cluster)


def lane_name(key: Hashable) -> str:
    """A lane's key for people: `nic out 3`."""
    return " ".join(map(str, key)) if isinstance(key, tuple) else str(key)
