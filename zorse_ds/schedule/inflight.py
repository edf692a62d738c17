"""How many micro-batches each rank must be able to hold before their backward.

The textbook `stages - stage` assumes equal widths and sizes; as a hard limit it cannot finish many
asymmetric plans. The routes know better: the backward of a micro-batch needs every micro-batch that
overlaps it downstream, and those need every micro-batch that overlaps them upstream.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from fractions import Fraction
from itertools import accumulate
from math import ceil

from zorse_ds.core.layout import Layout, MicroBatch
from zorse_ds.schedule.ticks import forward_ends, forward_ticks

InFlightLimits = dict[tuple[int, int], int]
"""(rank, stage) → the most micro-batches between their forward and the end of their backward."""


def in_flight_limits(layout: Layout) -> InFlightLimits:
    """Limits for 1F1B: the textbook numbers when widths and sizes are equal.

    The larger of what the routes demand, which is proved to end, and what the clock needs, which is
    rarely less. Linear but for one sort a stage.
    """
    enough, busy = limits_to_finish(layout), limits_to_stay_busy(layout)
    return {key: max(enough[key], busy[key]) for key in enough}


def limits_to_finish(layout: Layout) -> InFlightLimits:
    """Limits that no run can deadlock under: the closure of the routes, along the sample axis.

    For each micro-batch, the sample up to which its stage must have run forward before the backward
    of everything up to the micro-batch can end: at the last stage the micro-batch's own end; above,
    its end widened to whole micro-batches all the way down and back up. The oldest sample whose
    backward has not ended can then always get there, so something can always run.
    """
    ends = [[each.samples.stop for each in own] for own in layout.micro_batches]
    reach = ends[-1]
    limits = _most_within_reach(layout, layout.num_stages - 1, ends[-1], reach)
    for stage in reversed(range(layout.num_stages - 1)):
        above, below = ends[stage], ends[stage + 1]
        needed = (reach[bisect_left(below, end)] for end in above)
        reach = [above[bisect_left(above, sample)] for sample in needed]
        limits |= _most_within_reach(layout, stage, above, reach)
    return limits


def limits_to_stay_busy(layout: Layout) -> InFlightLimits:
    """Limits that keep the stages of a 1F1B pipeline busy, by the integer clock.

    The same closure in time: for each micro-batch, how far (in forward ticks of its stage) its
    stage will have run forward when its backward ends. Ends of forwards take the place of sample
    numbers, for a long micro-batch ends later than the short ones beside it; and with each stage
    goes the longest micro-batch of the stage below, which runs meanwhile.
    """
    ends = [forward_ends(own) for own in layout.micro_batches]
    reach = ends[-1]
    limits = _most_within_reach(layout, layout.num_stages - 1, ends[-1], reach)
    for stage in reversed(range(layout.num_stages - 1)):
        meanwhile = max(forward_ticks(layout.micro_batches[stage + 1]))
        needed = [
            max(reach[transfer.target] for transfer in layout.outgoing[stage, each.index])
            for each in layout.micro_batches[stage]
        ]
        fed = _Feed(layout, stage, ends)
        reach = [max(tick, fed.by(tick)) + meanwhile for tick in needed]
        limits |= _most_within_reach(layout, stage, ends[stage], reach)
    return limits


class _Feed:
    """When a stage has fed all that ends at the stage below by some tick."""

    def __init__(self, layout: Layout, stage: int, ends: Sequence[Sequence[int]]) -> None:
        above, below = ends[stage], ends[stage + 1]
        by_end = sorted(range(len(below)), key=below.__getitem__)
        self.ticks = [below[target] for target in by_end]
        last_source = (
            max(above[transfer.source] for transfer in layout.incoming[stage + 1, target])
            for target in by_end
        )
        self.fed = list(accumulate(last_source, max))

    def by(self, tick: int) -> int:
        """The latest end of a forward of the stage that is needed by `tick`."""
        return self.fed[bisect_right(self.ticks, tick) - 1]


def all_in_flight(layout: Layout) -> InFlightLimits:
    """The limits of a schedule that runs every forward before any backward."""
    limits: InFlightLimits = {}
    for stage, micro_batches in enumerate(layout.micro_batches):
        for micro_batch in micro_batches:
            key = (micro_batch.rank, stage)
            limits[key] = limits.get(key, 0) + 1
    return limits


def further_ahead(layout: Layout, ahead: int) -> InFlightLimits:
    """What is added to the limits for every stage to be further ahead of the one below.

    At each boundary by `ahead` times the samples that the wider of its two stages runs at once; a
    rank has its share of them, in its own micro-batches. With the least limits a stage that is late
    once, for a message or because its neighbour cuts its time otherwise, holds all others up.
    """
    counts = [_numbers(own) for own in layout.micro_batches]
    more: InFlightLimits = {}
    # Samples are counted as parts of the batch: a stage runs the part 1/n of it at once.
    part = Fraction(0)
    for stage in reversed(range(layout.num_stages)):
        if stage + 1 < layout.num_stages:
            fewest = min(max(counts[stage].values()), max(counts[stage + 1].values()))
            part += Fraction(ahead, fewest)
        for rank, number in counts[stage].items():
            more[rank, stage] = ceil(part * number)
    return more


def _numbers(micro_batches: Sequence[MicroBatch]) -> dict[int, int]:
    """How many micro-batches each rank has."""
    numbers: dict[int, int] = {}
    for each in micro_batches:
        numbers[each.rank] = numbers.get(each.rank, 0) + 1
    return numbers


def _most_within_reach(
    layout: Layout, stage: int, ends: Sequence[int], reach: Sequence[int]
) -> InFlightLimits:
    """Per rank, the most of its micro-batches from one to the first that ends at its reach."""
    own: dict[int, list[MicroBatch]] = {}
    for micro_batch in layout.micro_batches[stage]:
        own.setdefault(micro_batch.rank, []).append(micro_batch)
    limits: InFlightLimits = {}
    for rank, micro_batches in own.items():
        own_ends = [ends[each.index] for each in micro_batches]
        last = len(own_ends) - 1
        limits[rank, stage] = max(
            min(bisect_left(own_ends, reach[each.index]), last) - i + 1
            for i, each in enumerate(micro_batches)
        )
    return limits
