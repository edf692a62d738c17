"""From groupings to drafts that fit memory, by cost: what is worth a simulation."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain, islice, product

from zorse_ds.cost.compute import best_samples_per_s
from zorse_ds.cost.setting import Setting
from zorse_ds.planner.draft import Draft
from zorse_ds.planner.drafting import draft_of, fitting
from zorse_ds.planner.effort import Effort, Progress
from zorse_ds.planner.fit import with_weights
from zorse_ds.planner.groupings import Grouping, groupings
from zorse_ds.planner.options import VISITS, group_dtype, orders
from zorse_ds.planner.parallel import fork_map
from zorse_ds.planner.score import Score, score
from zorse_ds.planner.settings import AHEADS
from zorse_ds.planner.units import units_of

WISHED = (0.5, 0.2, 0.05, 0.01, 0.001)
"""Shares of the memory needed that something may fit with, to say what is missing."""


@dataclass(frozen=True, slots=True)
class Costed:
    """A draft, its cost and where it comes from."""

    draft: Draft
    score: Score
    origin: str
    """The idea behind its grouping."""
    missing_bytes: int = 0
    """The most that a rank lacks; 0 when the draft fits."""


@dataclass(frozen=True, slots=True)
class Screened:
    """What a screening came to."""

    ready: list[Costed]
    """Drafts to simulate, the cheapest first."""
    nearest: list[Costed]
    """Those that do not fit, the one that lacks least first."""
    num_costed: int


def screened(setting: Setting, batch: int, effort: Effort, progress: Progress) -> Screened:
    """Many drafts by cost; the best of each grouping, and over all groupings, are made to fit."""
    units = units_of(setting.cluster)
    types = {unit.gpu_type: unit for unit in units}

    def rate(gpu_type: str) -> float:
        dtype = group_dtype((types[gpu_type],), setting)
        return best_samples_per_s(setting, gpu_type, dtype)

    found = groupings(setting.cluster, units, rate, effort.most_groups)

    def cheapest(grouping: Grouping) -> list[Costed]:
        return _cheapest(grouping, setting, batch)[: effort.judged_per_grouping]

    def tell(done: int) -> None:
        progress("costing groupings", done, len(found))

    drafts = list(chain.from_iterable(fork_map(cheapest, found, effort.workers, tell)))
    if not drafts:
        nearest = [near for own in found for near in _nearly(own, setting, batch)]
        return Screened([], sorted(nearest, key=_by_cost), len(nearest))
    return _fitted(sorted(drafts, key=_by_cost), setting, batch, effort)


def _by_cost(each: Costed) -> tuple[int, float]:
    return each.missing_bytes, each.score.step_s


def _cheapest(grouping: Grouping, setting: Setting, batch: int) -> list[Costed]:
    """The best order for each number of visits, the cheapest first."""
    best: dict[int, Costed] = {}
    most = max(1, setting.model.num_layers // len(grouping.groups))
    numbers = [visits for visits in VISITS if visits <= most]
    for ordered, visits in product(orders(grouping.groups, setting), numbers):
        drafts = (draft_of(ordered, setting, batch, visits, ahead) for ahead in AHEADS)
        draft = next((draft for draft in drafts if draft is not None), None)
        if draft is None:
            continue
        found = score(draft, setting, batch)
        if visits not in best or found.step_s < best[visits].score.step_s:
            best[visits] = Costed(draft, found, grouping.origin)
    return sorted(best.values(), key=lambda costed: costed.score.step_s)


def _nearly(grouping: Grouping, setting: Setting, batch: int) -> Iterator[Costed]:
    """What comes nearest in a grouping of which nothing fits by far."""
    ordered = orders(grouping.groups, setting)[0]
    for tightness in WISHED:
        for visits in VISITS:
            draft = draft_of(ordered, setting, batch, visits, 0, [tightness] * len(ordered))
            if draft is not None:
                fit = with_weights(draft, setting, batch)
                cost = score(fit.draft, setting, batch)
                yield Costed(fit.draft, cost, grouping.origin, fit.overflow_bytes)
                return


def _fitted(drafts: list[Costed], setting: Setting, batch: int, effort: Effort) -> Screened:
    """The cheapest with settings that fit by the memory model, as many as will be simulated."""

    def fit(each: Costed) -> Costed:
        found = fitting(each.draft, setting, batch)
        cost = score(found.draft, setting, batch)
        return Costed(found.draft, cost, each.origin, found.overflow_bytes)

    ready: list[Costed] = []
    nearest: list[Costed] = []
    waiting = iter(drafts)
    while some := list(islice(waiting, effort.judged - len(ready))):
        for each in fork_map(fit, some, effort.workers):
            (nearest if each.missing_bytes else ready).append(each)
    return Screened(sorted(ready, key=_by_cost), sorted(nearest, key=_by_cost), len(drafts))
