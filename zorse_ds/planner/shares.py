"""Who runs how many samples, so that the GPUs of a group end together."""

import heapq
from collections.abc import Sequence
from functools import lru_cache


def balanced(total: int, seconds: Sequence[float]) -> tuple[int, ...]:
    """Whole parts of `total` with the least largest `part · seconds`; ties to the lower index.

    `seconds`: what one sample costs each. Starts from the ideal parts rounded down, then gives one
    more to whoever ends first with it.
    """
    speeds = [1 / each for each in seconds]
    whole = sum(speeds)
    parts = [int(total * speed / whole) for speed in speeds]
    ends = [
        ((part + 1) * cost, i) for i, (part, cost) in enumerate(zip(parts, seconds, strict=True))
    ]
    heapq.heapify(ends)
    for _ in range(total - sum(parts)):
        end, i = ends[0]
        parts[i] += 1
        heapq.heapreplace(ends, (end + seconds[i], i))
    return tuple(parts)


@lru_cache(maxsize=65536)
def micro_batches(num_samples: int, size: int) -> tuple[int, ...]:
    """A rank's samples cut into the fewest micro-batches of at most `size`, as even as can be."""
    if not num_samples:
        return ()
    number = -(-num_samples // size)
    small, larger = divmod(num_samples, number)
    return (small + 1,) * larger + (small,) * (number - larger)
