"""A plan's step at measured paces: when its compute order ends, and what ranks hold meanwhile."""

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

from zorse_ds.core.layout import lay_out
from zorse_ds.core.plan import Plan
from zorse_ds.schedule.compile import limits_of
from zorse_ds.schedule.garbage import collector_paused
from zorse_ds.schedule.orders import compute_order


@dataclass(frozen=True, slots=True)
class Pace:
    """Seconds of a sample through one stage on one rank."""

    forward_s: float
    backward_s: float

    @property
    def both_s(self) -> float:
        """There and back."""
        return self.forward_s + self.backward_s


Paces = Mapping[tuple[int, int], Pace]
"""(rank, stage) → its pace."""


@dataclass(frozen=True, slots=True)
class Outlook:
    """What a step would be."""

    step_s: float
    """Until the last pass ends, with messages and collectives at no cost."""
    held: dict[int, float]
    """By rank, the most samples times kept activations between forward and backward at once."""


def outlook_of(plan: Plan, paces: Paces) -> Outlook:
    """Run the compute order of a plan at these paces. O(n log n) in passes and transfers."""
    with collector_paused():
        return _run(plan, paces)


def _run(plan: Plan, paces: Paces) -> Outlook:
    layout = lay_out(plan)
    order = compute_order(plan, layout, limits_of(plan, layout), plan.schedule)
    kept = [_kept_layers(plan, stage) for stage in range(layout.num_stages)]
    free_s: defaultdict[int, float] = defaultdict(float)
    ended_s: dict[tuple[str, int, int], float] = {}
    held: defaultdict[int, float] = defaultdict(float)
    most: dict[int, float] = {}
    for at in order:
        rank, stage = at.rank, at.stage
        here = (stage, at.micro_batch)
        size = layout.micro_batches[stage][at.micro_batch].samples.size
        pace = paces[rank, stage]
        if at.phase == "forward":
            before = [("forward", stage - 1, t.source) for t in layout.incoming.get(here, ())]
            seconds = pace.forward_s * size
            held[rank] += size * kept[stage]
            most[rank] = max(most.get(rank, 0.0), held[rank])
        else:
            before = [("backward", stage + 1, t.target) for t in layout.outgoing.get(here, ())]
            seconds = pace.backward_s * size
            held[rank] -= size * kept[stage]
        start = max((free_s[rank], *(ended_s[key] for key in before)))
        free_s[rank] = ended_s[at.phase, stage, at.micro_batch] = start + seconds
    return Outlook(max(free_s.values()), most)


def _kept_layers(plan: Plan, stage: int) -> int:
    """Activations of a sample that wait for the backward of a stage."""
    return len(plan.recomputed(stage).runs(plan.stages[stage].layers))
