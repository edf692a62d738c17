"""Where each sample of a global batch is at each stage, and what travels between stages."""

from collections import Counter
from dataclasses import dataclass
from functools import cached_property
from math import lcm

from zorse_ds.core.plan import GpuGroup, Plan
from zorse_ds.ranges import Range, consecutive, overlaps


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Samples that one rank runs through a stage at once."""

    index: int
    """Position along the sample axis, counted over the whole group."""
    rank: int
    samples: Range


@dataclass(frozen=True, slots=True)
class Transfer:
    """Samples that one micro-batch hands to a micro-batch of the next stage."""

    index: int
    """Number of the transfer within the plan, over all boundaries: the message tag."""
    boundary: int
    """The transfer leads from stage `boundary` to stage `boundary + 1`."""
    source: int
    target: int
    """Indices of the micro-batches, each within its own stage's group."""
    source_rank: int
    target_rank: int
    samples: Range

    @property
    def is_local(self) -> bool:
        """Both ends are one rank, so nothing is sent."""
        return self.source_rank == self.target_rank


TransfersByEnd = dict[tuple[int, int], list[Transfer]]
"""(stage, micro-batch) → the transfers that end there, along the sample axis."""


@dataclass(frozen=True)
class Layout:
    """Micro-batches per stage and transfers per boundary of one plan."""

    micro_batches: tuple[tuple[MicroBatch, ...], ...]
    """One tuple a stage, along the sample axis; stages of one group share it."""
    transfers: tuple[tuple[Transfer, ...], ...]
    """One tuple a boundary, along the sample axis."""

    @property
    def num_stages(self) -> int:
        """How many stages there are."""
        return len(self.micro_batches)

    def num_rounds(self, stage: int) -> int:
        """Micro-batches of the rank of a stage that has most."""
        return max(Counter(own.rank for own in self.micro_batches[stage]).values())

    @cached_property
    def outgoing(self) -> TransfersByEnd:
        """What each micro-batch hands to the next stage."""
        outgoing: TransfersByEnd = {}
        for boundary, transfers in enumerate(self.transfers):
            for transfer in transfers:
                outgoing.setdefault((boundary, transfer.source), []).append(transfer)
        return outgoing

    @cached_property
    def incoming(self) -> TransfersByEnd:
        """What each micro-batch gets from the previous stage."""
        incoming: TransfersByEnd = {}
        for boundary, transfers in enumerate(self.transfers):
            for transfer in transfers:
                incoming.setdefault((boundary + 1, transfer.target), []).append(transfer)
        return incoming


def cut_into_micro_batches(group: GpuGroup) -> tuple[MicroBatch, ...]:
    """Lay a group's micro-batches along the sample axis by progress, `(2i+1)/(2n)`.

    The i-th of a rank's n micro-batches stands where the rank will be when it runs it, so every
    consumer downstream gets its first samples early. Ties go to the lower rank.
    """
    # In parts of one common denominator: whole numbers compare quickly and exactly.
    whole = lcm(*(2 * len(gpu.micro_batches) for gpu in group.gpus if gpu.micro_batches))
    progress = sorted(
        ((2 * i + 1) * (whole // (2 * len(gpu.micro_batches))), gpu.rank, size)
        for gpu in group.gpus
        for i, size in enumerate(gpu.micro_batches)
    )
    spans = consecutive([size for _, _, size in progress])
    return tuple(
        MicroBatch(index, rank, samples)
        for index, ((_, rank, _), samples) in enumerate(zip(progress, spans, strict=True))
    )


def lay_out(plan: Plan) -> Layout:
    """Cut the batch for every stage and route every boundary; linear in what it returns."""
    by_group = {group.name: cut_into_micro_batches(group) for group in plan.groups}
    micro_batches = tuple(by_group[stage.group] for stage in plan.stages)
    transfers: list[tuple[Transfer, ...]] = []
    first = 0
    for boundary in range(len(plan.stages) - 1):
        sources, targets = micro_batches[boundary], micro_batches[boundary + 1]
        transfers.append(_route(boundary, sources, targets, first))
        first += len(transfers[-1])
    return Layout(micro_batches, tuple(transfers))


def _route(
    boundary: int, sources: tuple[MicroBatch, ...], targets: tuple[MicroBatch, ...], first: int
) -> tuple[Transfer, ...]:
    cuts = ([source.samples for source in sources], [target.samples for target in targets])
    return tuple(
        Transfer(first + n, boundary, i, j, sources[i].rank, targets[j].rank, samples)
        for n, (i, j, samples) in enumerate(overlaps(*cuts))
    )
