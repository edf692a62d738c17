"""The judge: the simulator's seconds for drafts, each asked once, within a budget."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from zorse_ds.core.plan import Plan
from zorse_ds.cost.setting import Setting
from zorse_ds.planner.draft import Draft, plan_of
from zorse_ds.planner.fit import exactly_fitted
from zorse_ds.planner.parallel import fork_map
from zorse_ds.planner.score import score
from zorse_ds.planner.units import looks_of, signature_of
from zorse_ds.simulator.quick import quick_step_s

LEAST_SAMPLES = 8
"""Of each rank in a shortened step, so that whole samples can still be balanced."""


@dataclass(frozen=True, slots=True)
class Case:
    """A draft to be judged, and the idea that its grouping comes from."""

    draft: Draft
    origin: str
    keeps_settings: bool = False
    """Its settings for memory are what is to be judged; else the best that fit are taken."""


@dataclass(frozen=True)
class Judged:
    """A draft and the seconds that the simulator gives its step."""

    draft: Draft
    plan: Plan
    origin: str
    """The idea that its grouping comes from."""
    step_s: float
    is_whole: bool
    """The whole step was simulated, and the plan fits by its exact in-flight limits."""


LOOKS: dict[str, Callable[[Judged], object]] = {
    "schedule": lambda each: (each.draft.schedule, each.draft.num_visits),
    "groups": lambda each: len(each.draft.groups),
    "grouping": lambda each: each.origin,
}
"""In which ways a plan can be another idea than the best."""


@dataclass
class Judge:
    """Simulates drafts for one setting and batch.

    A step of many more than `events_at_once` passes and messages is simulated with a part of its
    batch and scaled as its cost scales; `confirm` simulates whole steps.
    """

    setting: Setting
    batch: int
    events: int
    """What may be simulated in all, but for confirming."""
    events_at_once: int
    workers: int = 1
    spent: int = 0
    _seen: dict[object, Judged] = field(default_factory=dict)
    _tried: set[object] = field(default_factory=set)

    @property
    def is_spent(self) -> bool:
        """The budget is used up."""
        return self.spent >= self.events

    def ranked(self) -> list[Judged]:
        """What was judged and fits, the fastest first; ties to what came first."""
        return sorted(self._seen.values(), key=lambda judged: judged.step_s)

    def knows(self, case: Case) -> bool:
        """This case, or one like it with alike nodes exchanged, was judged."""
        return self._key(case) in self._tried

    def judge(self, cases: Sequence[Case]) -> list[Judged]:
        """Seconds for what was not judged before and fits."""
        new = {self._key(case): case for case in cases}
        new = {key: case for key, case in new.items() if key not in self._tried}
        found = fork_map(self._judged, list(new.values()), self.workers)
        for key, (judged, events) in zip(new, found, strict=True):
            self._tried.add(key)
            self.spent += events
            if judged is not None:
                self._seen.setdefault(self._key(Case(judged.draft, judged.origin)), judged)
        return [judged for judged, _ in found if judged is not None]

    def confirmed(self, number: int) -> list[Judged]:
        """What fits by its whole step, the fastest first: at least `number` of the fastest.

        Among them is the fastest that is unlike the best in each of `LOOKS`, if there is one.
        """
        waiting = self.ranked()
        whole: list[Judged] = []
        while waiting and len(whole) < number:
            some = waiting[: number - len(whole)]
            waiting = waiting[len(some) :]
            whole += self._wholes(some)
        if whole:
            best = min(whole, key=lambda judged: judged.step_s)
            firsts = (
                next((each for each in waiting if look(each) != look(best)), None)
                for look in LOOKS.values()
            )
            unlike = list({id(each): each for each in firsts if each is not None}.values())
            free = [each for each in waiting if each.is_whole and each not in unlike]
            whole += [*self._wholes(unlike), *free]
        return sorted(whole, key=lambda judged: judged.step_s)

    def _wholes(self, some: Sequence[Judged]) -> list[Judged]:
        found = fork_map(self._whole, some, self.workers)
        return [judged for judged in found if judged is not None]

    def _whole(self, judged: Judged) -> Judged | None:
        if judged.is_whole:
            return judged
        return self._judged_whole(Case(judged.draft, judged.origin))

    def _judged(self, case: Case) -> tuple[Judged | None, int]:
        plan = plan_of(case.draft, self.setting, self.batch)
        widest = max(len(group.gpus) for group in plan.groups)
        events = num_events(plan)
        part = min(events // self.events_at_once, self.batch // (LEAST_SAMPLES * widest))
        if part <= 1:
            return self._judged_whole(case), events
        short = self.batch // part
        whole_s, short_s = (
            score(case.draft, self.setting, size).step_s for size in (self.batch, short)
        )
        seconds = quick_step_s(plan_of(case.draft, self.setting, short), self.setting)
        judged = Judged(case.draft, plan, case.origin, seconds * whole_s / short_s, False)
        return judged, events // part

    def _judged_whole(self, case: Case) -> Judged | None:
        sure = exactly_fitted(
            case.draft, self.setting, self.batch, keeps_settings=case.keeps_settings
        )
        if sure is None:
            return None
        seconds = quick_step_s(sure.plan, self.setting, prepared=(sure.layout, sure.limits))
        return Judged(sure.draft, sure.plan, case.origin, seconds, True)

    def _key(self, case: Case) -> object:
        draft = case.draft
        looks = looks_of(self.setting.cluster)
        groups = signature_of([group.units for group in draft.groups], looks)
        settings = tuple(
            (g.size, g.dtype, g.zero_level, g.recompute, g.offload, g.shard_weights, g.sums_often)
            for g in draft.groups
        )
        return draft.schedule, draft.ahead, draft.layers, groups, settings, case.keeps_settings


def num_events(plan: Plan) -> int:
    """About how many passes and messages a step has."""
    numbers = {
        group.name: sum(len(gpu.micro_batches) for gpu in group.gpus) for group in plan.groups
    }
    row = [numbers[stage.group] for stage in plan.stages]
    messages = sum(max(a, b) for a, b in pairwise(row))
    return 2 * (sum(row) + messages)
