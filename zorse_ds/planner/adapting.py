"""Shares that follow reality: which micro-batches change their rank when speeds are not as planned.

Every rank decides alike from numbers that all have, so nothing here looks at a clock or at chance.
A change moves micro-batches between ranks of one group and nothing else: layers, weights, sizes of
micro-batches and the samples of a step stay.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median

from zorse_ds.core.lots import Lot, lot_between, moved_samples, with_group, with_lot
from zorse_ds.core.plan import GpuGroup, Plan
from zorse_ds.schedule.paced import Outlook, Pace, Paces, outlook_of

ROOM_USED = 0.8
"""Of the memory that is left (0–1), what more activations may take."""
ALIKE = 0.002
"""Step times that differ by less (0–1) are the same: then less moves."""
CLIMBS = 4
"""Single lots tried at last, one after the other."""


@dataclass(frozen=True, slots=True)
class ShareRule:
    """How willing shares are to move."""

    window: int = 5
    """Steps whose median decides, measured anew after each change."""
    least_gain: float = 0.05
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

    def observe(self, facts: Sequence[RankFacts]) -> ShareChange | None:
        """Take note of a step of the whole global batch, by rank; a change is in force at once."""
        self._window = [*self._window, facts][-self.rule.window :]
        if len(self._window) < self.rule.window:
            return None
        change = self._decide(_typical(self._window))
        if change is not None:
            self.current = change.plan
            self._window = []
        return change

    def _decide(self, facts: Sequence[RankFacts]) -> ShareChange | None:
        paces = {
            (rank, stage): pace
            for rank, own in enumerate(facts)
            for stage, pace in own.paces.items()
        }
        step_s = max(own.step_s for own in facts)
        now = outlook_of(self.current, paces)
        if self._promised is None:
            self._promised = outlook_of(self.given, paces).held
        search = _Search(self.current, now, paces, _Room(self._promised, now.held, facts))
        best = search.run(self.rule)
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

    def __init__(self, current: Plan, now: Outlook, paces: Paces, room: _Room) -> None:
        self._current, self._paces, self._room = current, paces, room
        self._seconds: dict[int, float] = {}
        for (rank, _), pace in paces.items():
            self._seconds[rank] = self._seconds.get(rank, 0.0) + pace.both_s
        self._start = _Candidate(current, now, 0)

    def run(self, rule: ShareRule) -> _Candidate:
        """The best plan found; the current one if none is better."""
        lots = {
            group.name: list(self._levelling(group, rule.most_moved))
            for group in self._current.groups
        }
        plans = [self._after(lots, {name: part}) for name in lots for part in (1.0, 0.5)]
        plans += [self._after(lots, dict.fromkeys(lots, part)) for part in (1.0, 0.5)]
        best = self._best(plans, self._start)
        for _ in range(CLIMBS):
            better = self._best(self._neighbours(best.plan, rule.most_moved), best)
            if better is best:
                break
            best = better
        return best

    def _best(self, plans: Sequence[Plan], best: _Candidate) -> _Candidate:
        """The quickest that fits; of those alike, the one that moves least."""
        distinct = {_counts(plan): plan for plan in plans if plan != best.plan}
        for plan in distinct.values():
            outlook = outlook_of(plan, self._paces)
            if not self._room.allows(outlook.held):
                continue
            found = _Candidate(plan, outlook, moved_samples(self._current, plan))
            quicker = outlook.step_s < best.outlook.step_s * (1 - ALIKE)
            alike = outlook.step_s < best.outlook.step_s * (1 + ALIKE)
            if quicker or (alike and found.moved < best.moved):
                best = found
        return best

    def _after(self, lots: Mapping[str, Sequence[Lot]], parts: Mapping[str, float]) -> Plan:
        plan = self._current
        for name, part in parts.items():
            group = plan.group_named(name)
            for lot in lots[name][: round(part * len(lots[name]))]:
                group = with_lot(group, lot)
            plan = with_group(plan, group)
        return plan

    def _levelling(self, group: GpuGroup, most_moved: float) -> Iterator[Lot]:
        """Lots, one after the other, each of which makes the busiest rank less busy."""
        left = most_moved * sum(gpu.num_samples for gpu in group.gpus)
        is_first = True
        while True:
            lots = [lot for lot in self._lots(group) if is_first or lot.num_samples <= left]
            busy_s = self._busy_s(group)
            ends = [(self._end_s(busy_s, lot), lot.num_samples, lot.taker, lot) for lot in lots]
            if not ends or min(ends)[0] >= max(busy_s.values()):
                return
            lot = min(ends)[-1]
            yield lot
            group, left, is_first = with_lot(group, lot), left - lot.num_samples, False

    def _end_s(self, busy_s: Mapping[int, float], lot: Lot) -> float:
        """When the later of the two ends after a lot has moved."""
        giver = busy_s[lot.giver] - lot.num_samples * self._seconds[lot.giver]
        return max(giver, busy_s[lot.taker] + lot.num_samples * self._seconds[lot.taker])

    def _busy_s(self, group: GpuGroup) -> dict[int, float]:
        return {gpu.rank: gpu.num_samples * self._seconds.get(gpu.rank, 0.0) for gpu in group.gpus}

    def _lots(self, group: GpuGroup) -> list[Lot]:
        """From the busiest rank to any other."""
        busy_s = self._busy_s(group)
        giver = max(group.gpus, key=lambda gpu: (busy_s[gpu.rank], -gpu.rank))
        found = (lot_between(giver, gpu) for gpu in group.gpus if gpu.rank != giver.rank)
        return [lot for lot in found if lot is not None]

    def _neighbours(self, plan: Plan, most_moved: float) -> list[Plan]:
        """One lot more from a group's busiest rank, or one lot back to it."""
        found = []
        for group in plan.groups:
            busy_s = self._busy_s(group)
            by_end = sorted(group.gpus, key=lambda gpu: (-busy_s[gpu.rank], gpu.rank))
            first, last = by_end[0], by_end[-1]
            for lot in (lot_between(first, last), lot_between(last, first)):
                if lot is None or first is last:
                    continue
                changed = with_group(plan, with_lot(group, lot))
                moved = moved_samples(self._current, changed)
                if moved <= max(lot.num_samples, most_moved * plan.global_batch_size):
                    found.append(changed)
        return found


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
