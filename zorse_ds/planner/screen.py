"""From groupings to drafts that fit memory, by cost: what is worth a simulation."""

from collections import Counter
from dataclasses import dataclass
from math import ceil

from zorse_ds.cost.compute import best_samples_per_s
from zorse_ds.cost.memory import RankMemory
from zorse_ds.cost.setting import Setting
from zorse_ds.planner.draft import Draft
from zorse_ds.planner.effort import Effort, Progress
from zorse_ds.planner.fit import Fit, fitted
from zorse_ds.planner.groupings import Grouping, groupings
from zorse_ds.planner.moves import recut
from zorse_ds.planner.options import drafts_of, group_dtype, orders
from zorse_ds.planner.parallel import fork_map
from zorse_ds.planner.score import Score, score
from zorse_ds.planner.units import units_of
from zorse_ds.simulator.simulate import ceiling_samples_per_s

CAPPED_TIMES = 3
"""How often layers are taken from groups that overflow."""
HOPELESS = 4.0
"""Drafts whose slowest group needs this many times the step that all GPUs could reach."""


@dataclass(frozen=True, slots=True)
class Costed:
    """A draft, its cost and where it comes from."""

    draft: Draft
    score: Score
    origin: str
    """The idea behind its grouping."""
    missing_bytes: int = 0
    """The most that a rank lacks; 0 when the draft fits."""


def screened(
    setting: Setting, batch: int, effort: Effort, progress: Progress
) -> tuple[list[Costed], list[Costed]]:
    """The drafts to simulate, the cheapest first, and those that come nearest without fitting."""
    units = units_of(setting.cluster)
    types = {unit.gpu_type: unit for unit in units}

    def rate(gpu_type: str) -> float:
        dtype = group_dtype((types[gpu_type],), setting)
        return best_samples_per_s(setting, gpu_type, dtype)

    found = groupings(setting.cluster, units, rate, effort.most_groups)
    fitting: list[Costed] = []
    missing: list[Costed] = []
    step = 4 * effort.workers
    for start in range(0, len(found), step):
        progress("costing groupings", start, len(found))

        def drafts(grouping: Grouping) -> list[Costed]:
            return _fitted(_cheapest(grouping, setting, batch), setting, batch, effort)

        for own in fork_map(drafts, found[start : start + step], effort.workers):
            ready = sorted((c for c in own if not c.missing_bytes), key=lambda c: c.score.step_s)
            fitting += ready[: effort.judged_per_grouping]
            missing += [c for c in own if c.missing_bytes]
    fitting.sort(key=lambda costed: costed.score.step_s)
    missing.sort(key=lambda costed: costed.missing_bytes)
    return fitting[: effort.judged], missing


def _cheapest(grouping: Grouping, setting: Setting, batch: int) -> list[Costed]:
    """The best order for each number of visits, micro-batch size and recompute."""
    best: dict[tuple[int, int, bool], Costed] = {}
    within_s = HOPELESS * batch / ceiling_samples_per_s(setting)
    for ordered in orders(grouping.groups, setting):
        for draft in drafts_of(ordered, setting, batch, within_s):
            group = draft.groups[0]
            key = (draft.num_visits, group.size, group.recompute[0])
            found = score(draft, setting, batch)
            if key not in best or found.step_s < best[key].score.step_s:
                best[key] = Costed(draft, found, grouping.origin)
    return sorted(best.values(), key=lambda costed: costed.score.step_s)


def _fitted(drafts: list[Costed], setting: Setting, batch: int, effort: Effort) -> list[Costed]:
    """Settings that fit, for the cheapest drafts of each number of visits: where memory is short,
    more visits may be all that helps.
    """
    ready: dict[Draft, Costed] = {}
    found: Counter[int] = Counter()
    tried: Counter[int] = Counter()
    for each in drafts:
        visits = each.draft.num_visits
        enough = found[visits] >= effort.fitted_per_visits
        if enough or tried[visits] >= 3 * effort.fitted_per_visits:
            continue
        fit = _fitted_with_caps(each.draft, setting, batch)
        options = [fit] if fit.overflow_bytes else [fit, *_recut(fit, setting, batch)]
        tried[visits] += 1
        found[visits] += not fit.overflow_bytes
        for option in options:
            cost = score(option.draft, setting, batch)
            costed = Costed(option.draft, cost, each.origin, option.overflow_bytes)
            ready.setdefault(option.draft, costed)
    return list(ready.values())


def _fitted_with_caps(draft: Draft, setting: Setting, batch: int) -> Fit:
    """Settings that fit; groups that overflow with all of them get fewer layers."""
    most = [setting.model.num_layers] * len(draft.groups)
    fit = fitted(draft, setting, batch)
    for _ in range(CAPPED_TIMES):
        if not fit.overflow_bytes:
            break
        for index, group in enumerate(fit.draft.groups):
            worst = max((fit.memory[rank] for rank in group.ranks), key=_overflow_share)
            count = sum(layers.size for _, layers in fit.draft.stages_of(index))
            if worst.overflow_bytes:
                most[index] = count - max(1, ceil(count * _overflow_share(worst)))
        capped = recut(fit.draft, setting, most=most)
        if capped is None:
            break
        fit = fitted(capped, setting, batch)
    return fit


def _overflow_share(memory: RankMemory) -> float:
    return memory.overflow_bytes / memory.total_bytes


def _recut(fit: Fit, setting: Setting, batch: int) -> list[Fit]:
    """Settings slow some groups down, so layers are cut anew for them."""
    draft = recut(fit.draft, setting)
    if draft is None or draft.layers == fit.draft.layers:
        return []
    return [fitted(draft, setting, batch)]
