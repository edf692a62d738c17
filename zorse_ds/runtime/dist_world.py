"""The process groups and wires of a rank in a `torch.distributed` job."""

from collections.abc import Iterator, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist

from zorse_ds.core.plan import Plan
from zorse_ds.runtime.channels import Channel, GlooChannel, NcclChannel, StagedChannel
from zorse_ds.runtime.dist_transport import DistTransport, all_gloo, edge_channels
from zorse_ds.runtime.failures import wires
from zorse_ds.runtime.process_groups import TorchProcessGroup
from zorse_ds.schedule.trace import Tie


class DistWorld:
    """Everything of `torch.distributed` that a plan needs.

    Collective: every rank of the job constructs it with equal arguments. `staged` sends all
    messages between stages through host memory; a group's own `transport` can ask for it too.
    """

    def __init__(
        self, plan: Plan, ties: Sequence[Tie], device: torch.device, timeout_s: float, staged: bool
    ) -> None:
        self.rank = dist.get_rank()
        self._timeout = timedelta(seconds=timeout_s)
        self._ranks = tuple(range(plan.world_size))
        self._groups: dict[tuple[int, ...], TorchProcessGroup] = {}
        self.control = dist.new_group(self._ranks, backend="gloo", timeout=self._timeout)
        for ranks in _collective_groups(plan, ties):
            if ranks not in self._groups:
                self._groups[ranks] = self._new_process_group(ranks)
        self.transport = self._new_transport(plan, device, timeout_s, staged)

    @property
    def world(self) -> TorchProcessGroup:
        """All ranks."""
        return self._groups[self._ranks]

    @property
    def size(self) -> int:
        """How many ranks there are."""
        return len(self._ranks)

    def process_group(self, ranks: Sequence[int]) -> TorchProcessGroup:
        """The group of these ranks, which the plan or a tie names."""
        return self._groups[tuple(ranks)]

    def handle(self, ranks: Sequence[int]) -> dist.ProcessGroup | None:
        """The `torch.distributed` handle of a group, for DeepSpeed."""
        return self._groups[tuple(ranks)].handle

    def gather_objects(self, value: object) -> list[object]:
        """Collective: every rank's value, by rank."""
        values: list[object] = [None] * len(self._ranks)
        with wires(self.rank, "agree", self._ranks):
            dist.all_gather_object(values, value, group=self.control)
        return values

    def from_first(self, value: object) -> object:
        """Collective: the first rank's value; what the others give is not looked at."""
        held = [value]
        with wires(self.rank, "agree", self._ranks):
            dist.broadcast_object_list(held, src=self._ranks[0], group=self.control)
        return held[0]

    def close(self) -> None:
        """End the transport's threads."""
        self.transport.close()

    def _new_process_group(self, ranks: tuple[int, ...]) -> TorchProcessGroup:
        handle = dist.new_group(ranks, timeout=self._timeout)
        return TorchProcessGroup(self.rank, ranks, handle)

    def _new_transport(
        self, plan: Plan, device: torch.device, timeout_s: float, staged: bool
    ) -> DistTransport:
        host = GlooChannel(self.control, timeout_s)
        if device.type == "cpu":
            return DistTransport(self.rank, host, all_gloo(host), timeout_s)
        via_host = {boundary for boundary in _boundaries(plan) if staged or _asks(plan, boundary)}
        edges: dict[tuple[int, bool], Channel] = {}
        for boundary in _boundaries(plan):
            for forward in (True, False):
                if boundary not in via_host:
                    group = dist.new_group(_edge_ranks(plan, boundary), timeout=self._timeout)
                    edges[boundary, forward] = NcclChannel(group, device)
        channel_of = edge_channels(edges, StagedChannel(host, device), via_host.__contains__)
        return DistTransport(self.rank, host, channel_of, timeout_s)


def _collective_groups(plan: Plan, ties: Sequence[Tie]) -> Iterator[tuple[int, ...]]:
    yield tuple(range(plan.world_size))
    for group in plan.groups:
        yield group.ranks
    for tie in ties:
        yield tie.ranks


def _boundaries(plan: Plan) -> range:
    return range(len(plan.stages) - 1)


def _asks(plan: Plan, boundary: int) -> bool:
    ends = (plan.group_of_stage(boundary), plan.group_of_stage(boundary + 1))
    return any(group.transport == "staged" for group in ends)


def _edge_ranks(plan: Plan, boundary: int) -> list[int]:
    ends = (plan.group_of_stage(boundary), plan.group_of_stage(boundary + 1))
    return sorted({rank for group in ends for rank in group.ranks})
