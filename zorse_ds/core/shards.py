"""Which rank of a group owns which slice of the flat parameters."""

from collections.abc import Sequence
from dataclasses import dataclass

from zorse_ds.core.plan import GpuGroup
from zorse_ds.ranges import Range, apportion, consecutive

LEAST_LOT = 1 << 24
"""Elements from which on gradients travel together where each micro-batch's are summed: whole
layers, as many as it takes."""


@dataclass(frozen=True, slots=True)
class ShardLayout:
    """A cut of `[0, numel)` into one slice a rank, in rank order; slices may be empty."""

    ranks: tuple[int, ...]
    shards: tuple[Range, ...]

    @property
    def numel(self) -> int:
        """Elements of the whole flat vector."""
        return self.shards[-1].stop

    @property
    def sizes(self) -> tuple[int, ...]:
        """Elements of each slice."""
        return tuple(shard.size for shard in self.shards)

    def of(self, rank: int) -> Range:
        """The slice that `rank` owns."""
        return self.shards[self.ranks.index(rank)]

    def part(self, window: Range) -> "ShardLayout":
        """The cut of `window` alone, counted from its start: who owns which part of it."""
        clipped = consecutive([shard.intersect(window).size for shard in self.shards])
        return ShardLayout(self.ranks, clipped)


def cut_into_shards(numel: int, group: GpuGroup) -> ShardLayout:
    """Cut `numel` elements by the group's shard weights (largest remainder)."""
    weights = [gpu.shard_weight for gpu in group.gpus]
    return shard_layout(numel, group.ranks, weights)


def shard_layout(numel: int, ranks: Sequence[int], weights: Sequence[float]) -> ShardLayout:
    """Cut `numel` elements over `ranks` in proportion to `weights`; 0 gives an empty slice."""
    return ShardLayout(tuple(ranks), consecutive(apportion(numel, weights)))
