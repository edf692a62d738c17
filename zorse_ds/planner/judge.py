"""The judge: the simulator's seconds for drafts, each asked once, within a budget."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from math import inf

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
    """Its settings for memory are what is to be judged; else the cheapest that fit are taken."""


@dataclass(frozen=True)
class Judged:
    """A plan and the seconds that the simulator gives its step."""

    draft: Draft
    plan: Plan
    origin: str
    """The idea that its grouping comes from."""
    step_s: float


@dataclass
class Judge:
    """Simulates drafts for one setting and batch."""

    setting: Setting
    batch: int
    events: int
    """What may be simulated in all."""
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

    def guess(self, cases: Sequence[Case], events: int) -> list[float]:
        """About the seconds of each draft, from steps of not much more than `events`.

        A longer step is simulated with a part of its batch, and scaled as its cost scales.
        """
        found = fork_map(lambda case: self._guessed(case, events), cases, self.workers)
        self.spent += sum(own for _, own in found)
        return [seconds for seconds, _ in found]

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

    def _guessed(self, case: Case, events: int) -> tuple[float, int]:
        sure = exactly_fitted(
            case.draft, self.setting, self.batch, keeps_settings=case.keeps_settings
        )
        if sure is None:
            return inf, 0
        draft, plan = sure
        widest = max(len(group.gpus) for group in plan.groups)
        part = min(num_events(plan) // events, self.batch // (LEAST_SAMPLES * widest))
        scale = 1.0
        if part > 1:
            short = self.batch // part
            plan = plan_of(draft, self.setting, short)
            whole, less = (score(draft, self.setting, size) for size in (self.batch, short))
            scale = whole.step_s / less.step_s
        return quick_step_s(plan, self.setting) * scale, num_events(plan)

    def _judged(self, case: Case) -> tuple[Judged | None, int]:
        sure = exactly_fitted(
            case.draft, self.setting, self.batch, keeps_settings=case.keeps_settings
        )
        if sure is None:
            return None, 0
        draft, plan = sure
        return Judged(draft, plan, case.origin, quick_step_s(plan, self.setting)), num_events(plan)

    def _key(self, case: Case) -> object:
        draft = case.draft
        looks = looks_of(self.setting.cluster)
        groups = signature_of([group.units for group in draft.groups], looks)
        settings = tuple(
            (g.size, g.dtype, g.zero_level, g.recompute, g.offload, g.shard_weights)
            for g in draft.groups
        )
        return draft.schedule, draft.layers, groups, settings, case.keeps_settings


def num_events(plan: Plan) -> int:
    """About how many passes and messages a step has."""
    numbers = {
        group.name: sum(len(gpu.micro_batches) for gpu in group.gpus) for group in plan.groups
    }
    row = [numbers[stage.group] for stage in plan.stages]
    messages = sum(max(a, b) for a, b in pairwise(row))
    return 2 * (sum(row) + messages)
