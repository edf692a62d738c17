"""Flat parameters that live as shards and are whole only while a stage runs (ZeRO level 3)."""

from zorse_ds.core.shards import ShardLayout
from zorse_ds.runtime.flat import FlatParameters
from zorse_ds.runtime.process_groups import Gathering, ProcessGroup


class ShardedFlat:
    """A flat vector of which each rank of a group keeps its shard alone.

    `shard` is the truth; the flat vector is a copy of all shards from `start_gather` to `drop`.
    """

    def __init__(
        self, flat: FlatParameters, layout: ShardLayout, process_group: ProcessGroup
    ) -> None:
        self.flat = flat
        self.layout = layout
        self._group = process_group
        self.window = layout.of(process_group.rank)
        self.shard = flat.data[self.window.as_slice()].clone()
        self._gathering: Gathering | None = None
        flat.release()

    def start_gather(self) -> None:
        """Collective over the group: make room and start to fill it."""
        self.flat.restore()
        self.flat.data[self.window.as_slice()] = self.shard
        self._gathering = self._group.start_gather(self.flat.data, self.layout)

    def finish_gather(self) -> None:
        """Wait until the vector is whole; at once when it is already."""
        if self._gathering is not None:
            self._gathering.wait()
            self._gathering = None

    def drop(self) -> None:
        """Free the vector but for the shard."""
        self.finish_gather()
        self.flat.release()
