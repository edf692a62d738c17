"""Flat parameters that live as shards and are whole only while a stage runs (ZeRO level 3)."""

from zorse_ds.core.shards import ShardLayout
from zorse_ds.runtime.flat import FlatParameters
from zorse_ds.runtime.host_memory import HostMemory, Loading
from zorse_ds.runtime.process_groups import Gathering, ProcessGroup


class ShardedFlat:
    """A flat vector of which each rank of a group keeps its shard alone.

    `shard` is the truth, in host memory where `host` is given; the flat vector is a copy of all
    shards from `start_gather` (or an earlier `prefetch`) to `drop`.
    """

    def __init__(
        self,
        flat: FlatParameters,
        layout: ShardLayout,
        process_group: ProcessGroup,
        host: HostMemory | None = None,
    ) -> None:
        self.flat = flat
        self.layout = layout
        self._group = process_group
        self._host = host
        self.window = layout.of(process_group.rank)
        own = flat.data[self.window.as_slice()]
        self.shard = own.clone() if host is None else host.store(own)
        self._loading: Loading | None = None
        self._gathering: Gathering | None = None
        flat.release()

    def prefetch(self) -> None:
        """Make room and start to copy the own shard into its place."""
        self.flat.restore()
        own = self.flat.data[self.window.as_slice()]
        if self._host is None:
            own.copy_(self.shard)
            self._loading = Loading()
        else:
            self._loading = self._host.start_load(self.shard, own)

    def start_gather(self) -> None:
        """Collective over the group: start to fill the vector with everybody's shards."""
        if self._loading is None:
            self.prefetch()
        assert self._loading is not None, "the own shard is on its way"
        self._loading.wait()
        self._loading = None
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
