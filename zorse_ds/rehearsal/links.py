"""What collectives of a plain engine take: rings, and a tree for a few numbers."""

from collections.abc import Sequence
from math import ceil, log2

from zorse_ds.cost.collectives import NOTHING, Collective, gather, reduce_scatter
from zorse_ds.cost.network import Network


def agreement(network: Network, ranks: Sequence[int]) -> Collective:
    """A few numbers summed up: latency alone, there and back along a tree."""
    if len(ranks) < 2:
        return NOTHING
    pairs = zip(ranks, (*ranks[1:], ranks[0]), strict=True)
    slowest = max(network.route(a, b).latency_s for a, b in pairs)
    return Collective(2 * ceil(log2(len(ranks))) * slowest, (), ())


def message(network: Network, source: int, target: int, num_bytes: float) -> Collective:
    """A message that holds both ends until it is through."""
    route = network.route(source, target)
    busy_s = tuple(num_bytes * s_per_byte for s_per_byte in route.s_per_byte)
    return Collective(route.latency_s, route.lanes, busy_s)


def broadcast(network: Network, ranks: Sequence[int], num_bytes: float, root: int) -> Collective:
    """From `root` to all, along the ring."""
    return gather(network, ranks, _all_at(ranks, num_bytes, root))


def reduce(network: Network, ranks: Sequence[int], num_bytes: float, root: int) -> Collective:
    """Summed up at `root`, along the ring."""
    return reduce_scatter(network, ranks, _all_at(ranks, num_bytes, root))


def equal_shards(ranks: Sequence[int], num_bytes: float) -> list[float]:
    """A vector cut into as many shards as there are ranks."""
    return [num_bytes / len(ranks)] * len(ranks)


def _all_at(ranks: Sequence[int], num_bytes: float, root: int) -> list[float]:
    return [num_bytes if rank == root else 0.0 for rank in ranks]
