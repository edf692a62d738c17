"""Everything uneven is a cut of a range.

Layers cut into stages, samples of a global batch cut into micro-batches, flat parameters cut into
shards: one type and three functions.
"""

from collections.abc import Iterator, Sequence
from fractions import Fraction
from typing import NamedTuple


class Range(NamedTuple):
    """Half-open interval `[start, stop)` of integers; empty when both are equal."""

    start: int
    stop: int

    @property
    def size(self) -> int:
        """How many integers the range holds."""
        return self.stop - self.start

    def intersect(self, other: "Range") -> "Range":
        """The common part; an empty range at `max(starts)` when there is none."""
        start = max(self.start, other.start)
        return Range(start, max(start, min(self.stop, other.stop)))

    def relative_to(self, origin: int) -> "Range":
        """The same range counted from `origin`."""
        return Range(self.start - origin, self.stop - origin)

    def as_slice(self) -> slice:
        """The range as a slice, for indexing."""
        return slice(self.start, self.stop)

    def __str__(self) -> str:
        return f"[{self.start}, {self.stop})"


def apportion(total: int, weights: Sequence[float | Fraction]) -> tuple[int, ...]:
    """Divide `total` into whole parts in proportion to `weights`.

    Largest remainder, computed in exact fractions; ties go to the lower index, so every rank finds
    the same answer. A weight of 0 gets 0 unless all weights are 0, which is a `ValueError`.
    """
    shares = [Fraction(weight) for weight in weights]
    whole = sum(shares)
    if total < 0 or whole <= 0 or min(shares) < 0:
        raise ValueError(f"cannot apportion {total} by weights {list(weights)}")
    quotas = [total * share / whole for share in shares]
    parts = [int(quota) for quota in quotas]
    by_remainder = sorted(range(len(parts)), key=lambda i: (parts[i] - quotas[i], i))
    for i in by_remainder[: total - sum(parts)]:
        parts[i] += 1
    return tuple(parts)


def consecutive(sizes: Sequence[int], start: int = 0) -> tuple[Range, ...]:
    """Lay ranges of the given sizes one behind the other, from `start`."""
    ranges = []
    for size in sizes:
        ranges.append(Range(start, start + size))
        start += size
    return tuple(ranges)


def overlaps(old: Sequence[Range], new: Sequence[Range]) -> Iterator[tuple[int, int, Range]]:
    """All non-empty intersections `(i, j, old[i] ∩ new[j])` of two ascending cuts, in order.

    Linear in the number of ranges. Routing between stages, uneven gathers and loading a checkpoint
    under another plan are all this question.
    """
    i = j = 0
    while i < len(old) and j < len(new):
        # Spelt out, because routing a large plan spends most of its time here.
        (first, old_stop), (second, new_stop) = old[i], new[j]
        start = first if first > second else second
        stop = old_stop if old_stop < new_stop else new_stop
        if start < stop:
            yield i, j, Range(start, stop)
        if old_stop <= new_stop:
            i += 1
        else:
            j += 1
