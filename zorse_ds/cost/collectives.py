"""Seconds of collectives over uneven shards: rings that go through a group node by node.

In a ring every member hands on what it got from its neighbour before, so a node's NIC carries
everything once in and once out, however many members the node has. Latency counts once a hop.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from zorse_ds.cost.network import Network


@dataclass(frozen=True, slots=True)
class Collective:
    """What a collective takes: latency, and bytes over lanes as the seconds it holds them."""

    latency_s: float
    lanes: tuple[int, ...]
    busy_s: tuple[float, ...]
    """How long it holds each of `lanes`."""

    @property
    def seconds(self) -> float:
        """Of a collective that is alone."""
        return self.latency_s + max(self.busy_s, default=0.0)

    def followed_by(self, other: "Collective") -> "Collective":
        """Both, one after the other."""
        busy = dict(zip(self.lanes, self.busy_s, strict=True))
        for lane, seconds in zip(other.lanes, other.busy_s, strict=True):
            busy[lane] = busy.get(lane, 0.0) + seconds
        latency_s = self.latency_s + other.latency_s
        return Collective(latency_s, tuple(busy), tuple(busy.values()))


NOTHING = Collective(0.0, (), ())


def gather(network: Network, ranks: Sequence[int], shard_bytes: Sequence[float]) -> Collective:
    """Everybody gets all shards: to a member goes all but what it has."""
    whole = sum(shard_bytes)
    count = len(ranks)
    loads = [whole - shard_bytes[(i + 1) % count] for i in range(count)]
    return _ring(network, ranks, loads, count - 1)


def reduce_scatter(
    network: Network, ranks: Sequence[int], shard_bytes: Sequence[float]
) -> Collective:
    """Everybody gets the sum of its own shard: from a member goes all but what it keeps."""
    whole = sum(shard_bytes)
    loads = [whole - own for own in shard_bytes]
    return _ring(network, ranks, loads, len(ranks) - 1)


def all_reduce(network: Network, ranks: Sequence[int], num_bytes: float) -> Collective:
    """The sum of a whole vector for everybody: scattered, then gathered."""
    count = len(ranks)
    loads = [2 * num_bytes * (count - 1) / count] * count
    return _ring(network, ranks, loads, 2 * (count - 1))


def _ring(network: Network, ranks: Sequence[int], loads: Sequence[float], hops: int) -> Collective:
    """`loads[i]`: bytes that go from member i to the next one."""
    if len(ranks) == 1 or not any(loads):
        return NOTHING
    busy: dict[int, float] = {}
    latency_s = 0.0
    for i, load in enumerate(loads):
        route = network.route(ranks[i], ranks[(i + 1) % len(ranks)])
        latency_s = max(latency_s, route.latency_s)
        for lane, s_per_byte in zip(route.lanes, route.s_per_byte, strict=True):
            busy[lane] = busy.get(lane, 0.0) + load * s_per_byte
    return Collective(hops * latency_s, tuple(busy), tuple(busy.values()))
