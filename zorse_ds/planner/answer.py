"""A search's answer explained, as plain data: the plan, why it is this one, and what limits it."""

from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

from zorse_ds.core.plan import GpuGroup, Plan
from zorse_ds.cost.setting import Setting
from zorse_ds.planner.judge import LOOKS, Judged
from zorse_ds.planner.search import Found
from zorse_ds.schedule.compile import compile_trace
from zorse_ds.simulator.facts import facts_of
from zorse_ds.simulator.simulate import Simulation, simulate

TIGHT_SHARE = 0.95
"""From here on memory counts as full, and a link as the limit."""
SECONDS_PER_HOUR = 3600


def answer_of(found: Found, setting: Setting) -> dict[str, Any]:
    """Everything `zorse plan` tells; shares are 0–1."""
    best = found.best
    simulation = simulated(best.plan, setting)
    facts = facts_of(simulation, setting)
    return {
        **facts,
        "plan": best.plan.to_dict(),
        "origin": best.origin,
        "groups": [_group(best.plan, group, setting) for group in best.plan.groups],
        "limits": _limits(facts),
        "price_per_billion_tokens": price_per_billion_tokens(simulation.tokens_per_s, setting),
        "alternatives": _alternatives(found),
        "num_costed": found.num_costed,
        "num_simulated": found.num_simulated,
        "num_events": found.num_events,
    }


def simulated(plan: Plan, setting: Setting) -> Simulation:
    """The whole step, without spans."""
    return simulate(compile_trace(plan, setting.model.tied_layers), setting, record=False)


def price_per_billion_tokens(tokens_per_s: float, setting: Setting) -> float | None:
    """In the cluster's currency; None unless every node has a price."""
    per_hour = setting.cluster.price_per_hour
    if per_hour is None:
        return None
    return per_hour / SECONDS_PER_HOUR / tokens_per_s * 1e9


def _group(plan: Plan, group: GpuGroup, setting: Setting) -> dict[str, Any]:
    stages = [stage for stage in plan.stages if stage.group == group.name]
    types = [setting.cluster.gpus[rank].type.name for rank in group.ranks]
    samples: dict[str, list[int]] = {}
    for gpu, name in zip(group.gpus, types, strict=True):
        samples.setdefault(name, []).append(gpu.num_samples)
    return {
        "name": group.name,
        "ranks": list(group.ranks),
        "nodes": sorted({setting.cluster.gpus[rank].node for rank in group.ranks}),
        "gpu_types": dict(Counter(types)),
        "layers": [list(stage.layers) for stage in stages],
        "samples": {name: [min(own), max(own)] for name, own in samples.items()},
        "micro_batch_size": max(max(gpu.micro_batches, default=0) for gpu in group.gpus),
        "zero_level": group.zero_level,
        "reduce_after": group.reduce_after,
        "recompute_layers": [
            plan.recomputed(i).layers.size
            for i, stage in enumerate(plan.stages)
            if stage.group == group.name
        ],
        "offload": group.offload,
        "dtype": group.dtype,
    }


def _limits(facts: dict[str, Any]) -> list[str]:
    """Sentences: the busiest resource first, then whatever is full."""
    limit = facts["limit"]
    kind = "compute" if limit["resource"].startswith("rank ") else "link"
    sentences = [f"{kind}: {limit['resource']} is busy for {limit['busy_share']:.0%} of the step"]
    full = {
        rank["group"]
        for rank in facts["ranks"]
        if rank["peak_bytes"] >= TIGHT_SHARE * rank["memory"]["usable_bytes"]
    }
    if full:
        sentences.append(f"memory: full in {_listed(sorted(full))}")
    hot = [lane for lane in facts["lanes"] if lane["busy_share"] >= TIGHT_SHARE]
    sentences += [f"link: {lane['lane']} is busy all the time" for lane in hot[:3]]
    return sentences


def _listed(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def _alternatives(found: Found) -> list[dict[str, Any]]:
    """The best plan of another schedule, number of groups and grouping; what each would lose."""
    best = found.best
    alternatives = []
    for name, look in LOOKS.items():
        other = _first_other(found.ranked, look, best)
        if other is not None:
            alternatives.append(_alternative(name, other, best))
    return alternatives


def _first_other(
    ranked: Iterable[Judged], look: Callable[[Judged], object], best: Judged
) -> Judged | None:
    return next((each for each in ranked if look(each) != look(best)), None)


def _alternative(name: str, other: Judged, best: Judged) -> dict[str, Any]:
    return {
        "other": name,
        "schedule": other.plan.schedule,
        "num_visits": other.draft.num_visits,
        "num_groups": len(other.plan.groups),
        "origin": other.origin,
        "step_s": other.step_s,
        "lost_share": 1 - best.step_s / other.step_s,
    }
