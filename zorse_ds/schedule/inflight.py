"""How many micro-batches each rank must be able to hold before their backward.

The textbook `stages - stage` assumes equal widths and sizes; as a hard limit it cannot finish many
asymmetric plans. The routes know better: the backward of a micro-batch needs every micro-batch that
overlaps it downstream, those need every micro-batch that overlaps them upstream, and meanwhile each
stage below works on one round of its own.
"""

from bisect import bisect_left

from zorse_ds.core.layout import Layout, MicroBatch

InFlightLimits = dict[tuple[int, int], int]
"""(rank, stage) → the most micro-batches between their forward and the end of their backward."""


def in_flight_limits(layout: Layout) -> InFlightLimits:
    """Limits that no run can deadlock under, and that keep every stage of a 1F1B pipeline busy.

    For sample position x let `reach_s(x)` be the position up to which stage s must have run
    forward before the backward of everything before x can end. At the last stage that is the end
    of the micro-batch that holds x. Above, x is widened to whole micro-batches on the way down and
    back up, and one round of the stage below (a micro-batch a rank) is added, which that stage
    runs meanwhile. With equal widths and sizes this gives the textbook numbers. Linear.
    """
    limits: InFlightLimits = {}
    reach: list[int] = []
    for stage in reversed(range(layout.num_stages)):
        micro_batches = layout.micro_batches[stage]
        if stage + 1 == layout.num_stages:
            reach = [micro_batch.samples.stop for micro_batch in micro_batches]
        else:
            reach = _reach_above(micro_batches, layout.micro_batches[stage + 1], reach)
        for rank, count in _most_within_reach(micro_batches, reach).items():
            limits[rank, stage] = count
    return limits


def all_in_flight(layout: Layout) -> InFlightLimits:
    """The limits of a schedule that runs every forward before any backward."""
    limits: InFlightLimits = {}
    for stage, micro_batches in enumerate(layout.micro_batches):
        for micro_batch in micro_batches:
            key = (micro_batch.rank, stage)
            limits[key] = limits.get(key, 0) + 1
    return limits


def samples_a_round(micro_batches: tuple[MicroBatch, ...]) -> int:
    """Samples that a group works on at once: the largest micro-batch of each rank."""
    largest: dict[int, int] = {}
    for micro_batch in micro_batches:
        largest[micro_batch.rank] = max(largest.get(micro_batch.rank, 0), micro_batch.samples.size)
    return sum(largest.values())


def _reach_above(
    above: tuple[MicroBatch, ...], below: tuple[MicroBatch, ...], reach_below: list[int]
) -> list[int]:
    ends_above = [micro_batch.samples.stop for micro_batch in above]
    ends_below = [micro_batch.samples.stop for micro_batch in below]
    meanwhile = samples_a_round(below)
    reach = []
    for end in ends_above:
        needed = reach_below[bisect_left(ends_below, end)] + meanwhile
        reach.append(ends_above[min(bisect_left(ends_above, needed), len(above) - 1)])
    return reach


def _most_within_reach(micro_batches: tuple[MicroBatch, ...], reach: list[int]) -> dict[int, int]:
    own: dict[int, list[tuple[int, int]]] = {}
    for micro_batch, limit in zip(micro_batches, reach, strict=True):
        own.setdefault(micro_batch.rank, []).append((micro_batch.samples.stop, limit))
    most = {}
    for rank, pairs in own.items():
        ends = [end for end, _ in pairs]
        counts = (bisect_left(ends, limit + 1) - i for i, (_, limit) in enumerate(pairs))
        most[rank] = max(counts)
    return most
