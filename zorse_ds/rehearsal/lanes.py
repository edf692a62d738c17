"""The lanes of the network that all virtual GPUs share, and when each of them is free."""

from bisect import bisect, insort
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from zorse_ds.cost.collectives import Collective
from zorse_ds.cost.network import Network


@dataclass(frozen=True, slots=True)
class Passage:
    """When something passed the network, in virtual seconds."""

    ready_s: float
    """When all who have a part in it were ready for it."""
    stop_s: float
    """When it was through."""


class Lanes:
    """Serves requests in the order in which they are made, which must be that of their times.

    What needs several lanes takes them at once (cut-through), each for its bytes over the lane's
    bandwidth, from the first moment at which all are free for so long: what waits for a slow lane
    leaves the others to those who come meanwhile.
    """

    def __init__(self, network: Network) -> None:
        self._network = network
        self._taken: defaultdict[int, list[tuple[float, float]]] = defaultdict(list)

    def clear(self) -> None:
        """All lanes are free."""
        self._taken.clear()

    def message(self, source: int, target: int, num_bytes: float, ready_s: float) -> Passage:
        """A message that may start at `ready_s`."""
        route = self._network.route(source, target)
        busy_s = [num_bytes * s_per_byte for s_per_byte in route.s_per_byte]
        start = self._take(route.lanes, busy_s, ready_s)
        return Passage(ready_s, start + route.transfer_s(num_bytes))

    def collective(self, collective: Collective, ready_s: float, start_s: float) -> Passage:
        """A collective that may start at `start_s`, when its communicator is free."""
        start = self._take(collective.lanes, collective.busy_s, start_s)
        return Passage(ready_s, start + collective.seconds)

    def _take(self, lanes: Sequence[int], busy_s: Sequence[float], ready_s: float) -> float:
        wanted = [(self._taken[lane], own) for lane, own in zip(lanes, busy_s, strict=True) if own]
        start, before = ready_s, -1.0
        while start != before:
            before = start
            for taken, seconds in wanted:
                start = _free_from(taken, start, seconds)
        for taken, seconds in wanted:
            insort(taken, (start, start + seconds))
        return start


def _free_from(taken: Sequence[tuple[float, float]], start: float, seconds: float) -> float:
    """The first moment from `start` on at which a lane is free for so long."""
    at = max(0, bisect(taken, (start, float("inf"))) - 1)
    for begin, end in taken[at:]:
        if begin >= start + seconds:
            break
        start = max(start, end)
    return start
