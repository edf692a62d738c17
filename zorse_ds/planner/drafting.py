"""Phase 2: layers and settings at once, for groups in an order and a number of visits.

What n layers would cost a group depends on the settings with which they fit its memory, so the
dynamic programme over layers is given the cost of the best settings for every n.
"""

from collections.abc import Sequence
from dataclasses import replace
from math import ceil

from zorse_ds.cost.setting import Setting
from zorse_ds.planner.draft import Draft
from zorse_ds.planner.fit import Fit, with_weights
from zorse_ds.planner.groupings import Groups
from zorse_ds.planner.layers import Layers, by_count, cut_layers, cut_visits, spread
from zorse_ds.planner.offers import Offers, offers_of
from zorse_ds.planner.seats import Seat, held_samples, seats_of

ROUNDS = 4
"""How often a draft is made anew with what the memory model says of the one before."""
TIGHTER = 1.01
"""More than the memory model asks for, so that a round is not in vain."""


def draft_of(
    ordered: Groups,
    setting: Setting,
    batch: int,
    visits: int,
    ahead: int,
    tightness: Sequence[float] = (),
) -> Draft | None:
    """The draft of least cost that the closed form of memory lets fit; None if there is none.

    `tightness`: for each group, how much more memory it needs than the closed form says.
    """
    seats = seats_of(ordered, setting, batch, visits)
    if tightness:
        seats = [seat.tighter(own) for seat, own in zip(seats, tightness, strict=True)]
    likely = [seat.weight * setting.model.num_layers for seat in seats]
    offers = [offers_of(seat, setting, own) for seat, own in zip(seats, likely, strict=True)]
    for _ in range(2):
        spans = [_span(*each) for each in zip(seats, offers, likely, strict=True)]
        held = held_samples(spans, batch, ahead)
        seats = [seat.holding(samples) for seat, samples in zip(seats, held, strict=True)]
        offers = [offers_of(seat, setting, own) for seat, own in zip(seats, likely, strict=True)]
    counts = cut_layers([by_count(own.costs, setting.model.num_layers) for own in offers])
    if counts is None:
        return None
    layers = _over_visits(offers, counts, visits)
    chosen = [
        own.best(sum(row)) for own, row in zip(offers, zip(*layers, strict=True), strict=True)
    ]
    groups = tuple(
        option.group(units, seat)
        for option, units, seat in zip(chosen, ordered, seats, strict=True)
        if option is not None
    )
    if len(groups) < len(ordered):
        return None
    return Draft("1f1b" if visits == 1 else "ministage", groups, layers, ahead)


def _over_visits(offers: Sequence[Offers], counts: Sequence[int], visits: int) -> Layers:
    """Layers of every stage, for groups that would have `counts` of them."""
    if visits == 1:
        return spread(counts, visits)
    paces = [own.pace(number) for own, number in zip(offers, counts, strict=True)]
    paces[:-1] = [replace(pace, extra_s=0.0) for pace in paces[:-1]]
    # The embedding takes the first group's room, and hardly any time.
    paces[0] = replace(paces[0], most=paces[0].most - 1)
    layers = cut_visits(paces, sum(counts) - 1, visits)
    if layers is None:
        return spread(counts, visits)
    first, *others = layers
    return ((first[0] + 1, *first[1:]), *others)


def fitting(draft: Draft, setting: Setting, batch: int) -> Fit:
    """The draft with shards that fit or, where they do not, one made with tighter memory."""
    ordered = tuple(group.units for group in draft.groups)
    tightness = [1.0] * len(ordered)
    fit = with_weights(draft, setting, batch)
    for _ in range(ROUNDS):
        if not fit.overflow_bytes:
            break
        for index, group in enumerate(fit.draft.groups):
            over = max(fit.memory[rank].overflow_share for rank in group.ranks)
            tightness[index] *= TIGHTER * (1 + over) if over else 1.0
        other = draft_of(ordered, setting, batch, draft.num_visits, draft.ahead, tightness)
        if other is None:
            break
        fit = with_weights(other, setting, batch)
    return fit


def _span(seat: Seat, offers: Offers, likely: float) -> int:
    """Samples that a group runs at once with about its likely number of layers."""
    wanted = min(max(seat.visits, ceil(likely)), offers.merit.shape[1] - 1)
    option = next((o for n in range(wanted, 0, -1) if (o := offers.best(n))), offers.options[0])
    return option.size * seat.width
