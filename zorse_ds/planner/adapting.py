"""Shares that follow reality: which micro-batches change their rank when speeds are not as planned.

Every rank decides alike from numbers that all have, so nothing here looks at a clock or at chance.
A change moves micro-batches between ranks of one group and nothing else: layers, weights, sizes of
micro-batches and the samples of a step stay.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median

from zorse_ds.core.lots import moved_samples
from zorse_ds.core.plan import GpuGroup, Plan
from zorse_ds.planner.levelling import Levelling
from zorse_ds.schedule.paced import Outlook, Pace, Paces, outlook_of

ROOM_USED = 0.8
"""Of the memory that is left (0–1), what more activations may take."""
ALIKE = 0.002
"""Step times that differ by less (0–1) are the same: then less moves."""
CLIMBS = 4
"""Single lots tried at last, one after the other."""
WORTH_A_LOOK = 0.5
"""Of the least gain: what the busiest rank of some group must save for plans to be compared."""
MOST_PASSES = 200_000
"""Of all plans that one decision looks at: some seconds."""


@dataclass(frozen=True, slots=True)
class ShareRule:
    """How willing shares are to move."""

    window: int = 5
    """Steps whose median decides, measured anew after each change or vain search for one."""
    least_gain: float = 0.03
    """Share of the step (0–1) that a change must be predicted to save."""
    most_moved: float = 0.25
    """Share of a group's samples (0–1) that one change may move; one lot may always."""


@dataclass(frozen=True, slots=True)
class RankFacts:
    """What one rank measured in one step. Seconds of passes are without any waiting."""

    step_s: float
    paces: Mapping[int, Pace]
    """By own stage; empty for a rank without micro-batches."""
    grown_bytes: float = 0.0
    """By how much the peak of memory is above what was held when the step began."""
    room_bytes: float | None = None
    """What was left at that peak; None where nobody knows."""


@dataclass(frozen=True, slots=True)
class ShareChange:
    """A decision: the plan whose micro-batches run from the next step on."""

    plan: Plan
    before: Plan
    paces: Paces
    step_s: float
    """As measured."""
    predicted_s: float
    """As it will be."""

    @property
    def gain_share(self) -> float:
        """Of the step (0–1), predicted to be saved."""
        return 1 - self.predicted_s / self.step_s

    def __str__(self) -> str:
        groups = [
            _told(before, after, self.paces)
            for before, after in zip(self.before.groups, self.plan.groups, strict=True)
            if before != after
        ]
        return (
            f"{'; '.join(groups)}; predicted step {self.step_s:.4g} → {self.predicted_s:.4g} s "
            f"({-100 * self.gain_share:+.1f} %)"
        )


@dataclass
class ShareDecider:
    """Decides for one plan. `current` is what runs now."""

    given: Plan
    rule: ShareRule = field(default_factory=ShareRule)

    def __post_init__(self) -> None:
        self.current = self.given
        self._window: list[Sequence[RankFacts]] = []
        self._promised: Mapping[int, float] | None = None
        self.is_held_back = False
        """The last search found nothing, and plans that need more memory were left out."""

    def observe(self, facts: Sequence[RankFacts]) -> ShareChange | None:
        """Take note of a step of the whole global batch, by rank; a change is in force at once."""
        self._window = [*self._window, facts][-self.rule.window :]
        if len(self._window) < self.rule.window:
            return None
        change = self._decide(_typical(self._window))
        if change is not None:
            self.current = change.plan
        return change

    def _decide(self, facts: Sequence[RankFacts]) -> ShareChange | None:
        paces = {
            (rank, stage): pace
            for rank, own in enumerate(facts)
            for stage, pace in own.paces.items()
        }
        step_s = max(own.step_s for own in facts)
        levelling = Levelling(self.current, paces, self.rule.most_moved)
        if levelling.most_saved_s < WORTH_A_LOOK * self.rule.least_gain * step_s:
            return None
        self._window = []
        now = outlook_of(self.current, paces)
        if self._promised is None:
            self._promised = outlook_of(self.given, paces).held
        search = _Search(levelling, now, _Room(self._promised, now.held, facts))
        best = search.run()
        self.is_held_back = search.left_out > 0 and best.plan is self.current
        predicted_s = step_s - (now.step_s - best.outlook.step_s)
        change = ShareChange(best.plan, self.current, paces, step_s, predicted_s)
        moves = best.plan is not self.current
        return change if moves and change.gain_share >= self.rule.least_gain else None


@dataclass(frozen=True, slots=True)
class _Room:
    """Whether ranks can hold what a plan asks of them."""

    promised: Mapping[int, float]
    """What the given plan holds, which fits."""
    held: Mapping[int, float]
    """What is held now."""
    facts: Sequence[RankFacts]

    def allows(self, wanted: Mapping[int, float]) -> bool:
        """No rank holds more than under the given plan, but where memory was seen to be left.

        All that grew in a step is taken for activations, so that the estimate is too large.
        """
        return all(self._allows(rank, more) for rank, more in wanted.items())

    def _allows(self, rank: int, wanted: float) -> bool:
        if wanted <= self.promised.get(rank, 0.0):
            return True
        own = self.facts[rank]
        if own.room_bytes is None:
            return False
        more_bytes = own.grown_bytes * (wanted / self.held[rank] - 1)
        return more_bytes <= ROOM_USED * own.room_bytes


@dataclass(frozen=True, slots=True)
class _Candidate:
    plan: Plan
    outlook: Outlook
    moved: int


class _Search:
    """Plans that differ by some lots, judged by their compute order at the measured paces."""

    def __init__(self, levelling: Levelling, now: Outlook, room: _Room) -> None:
        self._levelling, self._room = levelling, room
        self._current = levelling.plan
        self._start = _Candidate(self._current, now, 0)
        self._passes_left = MOST_PASSES
        self.left_out = 0
        """Plans for which there may be no memory."""

    def run(self) -> _Candidate:
        """The best plan found; the current one if none is better."""
        names = self._levelling.names
        wholes = [dict.fromkeys(names, part) for part in (1.0, 0.5)]
        singles = [{name: part} for name in names for part in (1.0, 0.5)]
        best = self._best(map(self._levelling.after, wholes + singles), self._start)
        for _ in range(CLIMBS):
            better = self._best(self._levelling.neighbours(best.plan), best)
            if better is best:
                break
            best = better
        return best

    def _best(self, plans: Iterable[Plan], best: _Candidate) -> _Candidate:
        """The quickest that fits; of those alike, the one that moves least."""
        seen = {_counts(best.plan)}
        for plan in plans:
            counts = _counts(plan)
            self._passes_left -= 2 * _num_passes(plan)
            if counts in seen or self._passes_left < 0:
                continue
            seen.add(counts)
            outlook = outlook_of(plan, self._levelling.paces)
            if not self._room.allows(outlook.held):
                self.left_out += 1
                continue
            found = _Candidate(plan, outlook, moved_samples(self._current, plan))
            quicker = outlook.step_s < best.outlook.step_s * (1 - ALIKE)
            alike = outlook.step_s < best.outlook.step_s * (1 + ALIKE)
            if quicker or (alike and found.moved < best.moved):
                best = found
        return best


def _num_passes(plan: Plan) -> int:
    numbers = {
        group.name: sum(len(gpu.micro_batches) for gpu in group.gpus) for group in plan.groups
    }
    return sum(numbers[stage.group] for stage in plan.stages)


def _counts(plan: Plan) -> tuple[tuple[int, ...], ...]:
    return tuple(gpu.micro_batches for group in plan.groups for gpu in group.gpus)


def _typical(window: Sequence[Sequence[RankFacts]]) -> list[RankFacts]:
    """By rank, the median of each figure: one slow step among several says nothing."""
    found = []
    for steps in zip(*window, strict=True):
        rooms = [own.room_bytes for own in steps if own.room_bytes is not None]
        paces = {
            stage: Pace(
                median(own.paces[stage].forward_s for own in steps),
                median(own.paces[stage].backward_s for own in steps),
            )
            for stage in steps[-1].paces
        }
        found.append(
            RankFacts(
                median(own.step_s for own in steps),
                paces,
                max(own.grown_bytes for own in steps),
                min(rooms) if len(rooms) == len(steps) else None,
            )
        )
    return found


def _told(before: GpuGroup, after: GpuGroup, paces: Paces) -> str:
    """`group 'b': rank 1 (0.11 s a sample) 4 → 6 micro-batches, rank 2 (0.21) 4 → 2`."""
    parts = []
    for old, new in zip(before.gpus, after.gpus, strict=True):
        if old == new:
            continue
        seconds = sum(pace.both_s for (rank, _), pace in paces.items() if rank == old.rank)
        counts = f"{len(old.micro_batches)} → {len(new.micro_batches)} micro-batches"
        parts.append(f"rank {old.rank} ({seconds:.3g} s a sample) {counts}")
    return f"group {before.name!r}: {', '.join(parts)}"
