"""What was measured of a rehearsed step, beside what the simulator said."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from zorse_ds.errors import RehearsalError
from zorse_ds.rehearsal.clock import Work
from zorse_ds.simulator.simulate import Simulation
from zorse_ds.simulator.timeline import Span, Timeline

MOST_BEHIND = 0.05
"""Of a step: by how much real time may lag behind virtual time in the end."""


@dataclass(frozen=True, slots=True)
class StepFigures:
    """What a step was on one rank, in virtual seconds and bytes."""

    rank: int
    wall_s: float
    """By the wall clock, from the origin that all ranks share to the end of the rank's step; the
    same as `virtual_s` where nobody sleeps."""
    virtual_s: float
    """By the rank's virtual clock, which real time follows: the same in every run."""
    behind_s: float
    """The most by which the process was late within the step."""
    peak_bytes: float
    at_peak: dict[str, float]
    timeline: Timeline

    @property
    def busy_s(self) -> float:
        """In forward and backward passes."""
        return self.timeline.busy_s(self.rank)


@dataclass(frozen=True, slots=True)
class Compared:
    """One figure of a rank, or of the whole step."""

    measured: float
    simulated: float

    @property
    def error_share(self) -> float:
        """Measured over simulated, less 1."""
        return self.measured / self.simulated - 1 if self.simulated else self.measured


@dataclass(frozen=True, slots=True)
class RankCompared:
    """Measured and simulated figures of one rank."""

    rank: int
    busy_s: Compared
    waiting_s: Compared
    peak_bytes: Compared


@dataclass(frozen=True, slots=True)
class Comparison:
    """A rehearsed step beside the simulated one."""

    step_s: Compared
    ranks: tuple[RankCompared, ...]

    @property
    def worst_share(self) -> float:
        """The largest error of step time, and of each rank's busy seconds and peak bytes (0–1)."""
        parts = [self.step_s]
        parts += [part for rank in self.ranks for part in (rank.busy_s, rank.peak_bytes)]
        return max(abs(part.error_share) for part in parts)


def compared(figures: Sequence[StepFigures], simulation: Simulation) -> Comparison:
    """Figures by rank beside a simulation of the same plan, all by virtual clocks."""
    step_s = max(own.virtual_s for own in figures)
    ranks = []
    for own, share in zip(figures, simulation.busy_share, strict=True):
        busy_s = share * simulation.step_s
        ranks.append(
            RankCompared(
                own.rank,
                Compared(own.busy_s, busy_s),
                Compared(step_s - own.busy_s, simulation.step_s - busy_s),
                Compared(own.peak_bytes, simulation.memory[own.rank].total_bytes),
            )
        )
    return Comparison(Compared(step_s, simulation.step_s), tuple(ranks))


def quickest(steps: Sequence[Sequence[StepFigures]]) -> Sequence[StepFigures]:
    """Of steps (figures by rank) the one in which processes were least late."""
    return min(steps, key=lambda figures: max(own.wall_s for own in figures))


def check_kept_up(figures: Sequence[StepFigures], scale: float, num_cores: int) -> None:
    """Raises `RehearsalError` if the processes could not keep up with the virtual GPUs."""
    wall_s, virtual_s = (max(each) for each in zip(*map(_seconds, figures), strict=True))
    lag = wall_s / virtual_s
    if lag > 1 + MOST_BEHIND:
        raise RehearsalError(
            f"a step of {virtual_s:.3g} virtual seconds took {wall_s:.3g}, for {num_cores} cores "
            f"are too few at time scale {scale:g}; expected a time scale of at least "
            f"{scale * lag * 1.5:.2g}"
        )


def _seconds(figures: StepFigures) -> tuple[float, float]:
    return figures.wall_s, figures.virtual_s


def timeline_of(rank: int, works: Sequence[Work]) -> Timeline:
    """Spans of a rank: works of one instruction are one, else those of a kind without a gap."""
    numbered: list[tuple[int, Work]] = []
    number = 0
    for i, work in enumerate(works):
        if i and not _continues(works[i - 1], work):
            number += 1
        numbered.append((number, work))
    spans = []
    for _, lot in groupby(numbered, key=lambda each: each[0]):
        own = [work for _, work in lot]
        spans.append(_span(rank, own[0], own[-1].stop_s))
    return Timeline(tuple(spans))


def _continues(before: Work, work: Work) -> bool:
    alike = before.name == work.name and before.cause is work.cause
    return alike and before.stop_s == work.start_s


def _span(rank: int, first: Work, stop_s: float) -> Span:
    cause: Any = first.cause
    stage = getattr(cause, "stage", getattr(cause, "index", None))
    return Span(rank, first.name, first.start_s, stop_s, stage, getattr(cause, "micro_batch", None))
