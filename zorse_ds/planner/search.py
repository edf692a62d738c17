"""The planner: many drafts by cost, the best of each kind by the simulator, then local search.

A cost misranks close drafts by some per cent, so the simulator judges, with a quota for each
grouping so that different ideas get their turn (Zorse §4; H2's two stages of search).
"""

from dataclasses import dataclass

from zorse_ds.cost.setting import Setting
from zorse_ds.errors import PlannerError
from zorse_ds.planner.climb import climb
from zorse_ds.planner.effort import USUAL, Effort, Progress, silent
from zorse_ds.planner.judge import Case, Judge, Judged
from zorse_ds.planner.lone import ORIGIN, lone_drafts
from zorse_ds.planner.missing import what_is_missing
from zorse_ds.planner.screen import screened


@dataclass(frozen=True)
class Found:
    """What a search came to."""

    ranked: list[Judged]
    """Plans that fit, by their whole steps, the fastest first; never empty."""
    num_costed: int
    num_simulated: int
    num_events: int
    """Passes and messages that were simulated."""

    @property
    def best(self) -> Judged:
        """The fastest."""
        return self.ranked[0]


def search(
    setting: Setting, batch: int, effort: Effort = USUAL, progress: Progress = silent
) -> Found:
    """Plans for a step of `batch` samples. Deterministic.

    Raises `PlannerError` when no plan fits, with what is missing.
    """
    screen = screened(setting, batch, effort, progress)
    lone = lone_drafts(setting, batch)
    if not screen.ready and not lone:
        raise PlannerError(what_is_missing(screen.nearest, setting, batch))
    judge = Judge(setting, batch, effort.events, effort.events_at_once, effort.workers)
    cases = [Case(each.draft, each.origin) for each in screen.ready]
    step = 2 * effort.workers
    for start in range(0, len(cases), step):
        progress("simulating", start, len(cases))
        judge.judge(cases[start : start + step])
    for start_from in judge.ranked()[: effort.improved]:
        climb(start_from, judge, progress)
    judge.judge([Case(draft, ORIGIN, keeps_settings=True) for draft in lone])
    progress("simulating whole steps", 0, effort.confirmed)
    ranked = judge.confirmed(effort.confirmed)
    if not ranked:
        raise PlannerError(what_is_missing(screen.nearest, setting, batch))
    num_costed = screen.num_costed + len(lone)
    return Found(ranked, num_costed, len(judge.ranked()), judge.spent)
