"""Local search with the simulator as the judge."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import chain, islice

from zorse_ds.planner.effort import Progress
from zorse_ds.planner.fit import fitted, with_weights
from zorse_ds.planner.judge import Case, Judge, Judged
from zorse_ds.planner.moves import neighbours, resettled
from zorse_ds.planner.score import score

WORTH = 1.1
"""Neighbours whose cost is this much above the current draft's are not simulated."""
AT_ONCE = 4
"""Neighbours that are simulated before the best of them is taken."""


def climb(start: Judged, judge: Judge, progress: Progress) -> None:
    """Go on to a faster neighbour as long as there is one; the judge remembers what was seen."""
    current = start
    while not judge.is_spent:
        better = _faster(current, judge, progress)
        if better is None:
            return
        current = better


def _faster(current: Judged, judge: Judge, progress: Progress) -> Judged | None:
    waiting = _promising(current, judge)
    while cases := list(islice(waiting, AT_ONCE)):
        progress("local search", min(judge.spent, judge.events), judge.events)
        best = min(judge.judge(cases), key=lambda judged: judged.step_s, default=None)
        if best is not None and best.step_s < current.step_s * (1 - 1e-6):
            return best
        if judge.is_spent:
            return None
    return None


def _promising(current: Judged, judge: Judge) -> Iterator[Case]:
    """Neighbours, the cheapest first; what changes more than settings gets settings that fit."""
    setting, batch = judge.setting, judge.batch
    limit = WORTH * score(current.draft, setting, batch).step_s
    moved = ((other, False) for other in neighbours(current.draft, setting))
    settled = ((other, True) for other in resettled(current.draft, setting, batch))
    costs: list[tuple[float, int, Case]] = []
    for number, (other, keeps_settings) in enumerate(chain(moved, settled)):
        cost = score(other, setting, batch).step_s
        if cost < limit:
            costs.append((cost, number, Case(other, current.origin, keeps_settings)))
    for _, _, case in sorted(costs, key=lambda each: each[:2]):
        if case.keeps_settings:
            fit = with_weights(case.draft, setting, batch)
        else:
            fit = fitted(case.draft, setting, batch)
        fitting = replace(case, draft=fit.draft)
        if not fit.overflow_bytes and not judge.knows(fitting):
            yield fitting
