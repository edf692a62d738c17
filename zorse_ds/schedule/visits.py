"""Which stages a group works on in turn: the coarse order that a schedule's name stands for.

Within a visit a rank runs all its micro-batches of one stage, one way or both, before it goes on.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from zorse_ds.core.plan import Plan

Schedule = Literal["1f1b", "gpipe", "ministage", "forward"]
"""How a step runs: a plan's schedule, or forward passes alone."""


@dataclass(frozen=True, slots=True)
class Visit:
    """One stay of a group at one of its stages."""

    stage: int
    forward: bool
    backward: bool


def visits_of(plan: Plan, group: str, schedule: Schedule) -> tuple[Visit, ...]:
    """The visits of a group in a step.

    `"forward"` goes through its stages once. `"1f1b"` stays at its one stage. `"gpipe"` runs every
    forward, then every backward. `"ministage"` (Zorse §3) goes through the stages forward and
    comes back in reverse; at the last one it turns around: backward passes run as soon as their
    gradients arrive, while forwards are left (unless the plan switches `turnaround` off).
    """
    stages = [i for i, stage in enumerate(plan.stages) if stage.group == group]
    if schedule == "forward":
        return tuple(Visit(stage, True, False) for stage in stages)
    turns = schedule == "1f1b" or (schedule == "ministage" and plan.turnaround)
    last = stages[-1]
    turn = (
        [Visit(last, True, True)] if turns else [Visit(last, True, False), Visit(last, False, True)]
    )
    there = [Visit(stage, True, False) for stage in stages[:-1]]
    back = [Visit(stage, False, True) for stage in reversed(stages[:-1])]
    return (*there, *turn, *back)


def turning_tail(plan: Plan, schedule: Schedule) -> range:
    """The stages at the end of the pipeline that all turn around: they run as one 1F1B pipeline.

    Further up, a stage's gradients come only after a group below has finished whole visits, so its
    limit is all its micro-batches.
    """
    if schedule == "gpipe" or (schedule == "ministage" and not plan.turnaround):
        return range(len(plan.stages), len(plan.stages))
    start = len(plan.stages)
    seen: set[str] = set()
    while start > 0 and plan.stages[start - 1].group not in seen:
        start -= 1
        seen.add(plan.stages[start].group)
    return range(start, len(plan.stages))


def same_stage_follows(visits: Sequence[Visit], index: int) -> bool:
    """The next visit is at the same stage, so what is resident can stay."""
    return index + 1 < len(visits) and visits[index + 1].stage == visits[index].stage
