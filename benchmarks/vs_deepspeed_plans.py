"""The planner's plan, and the same with one idea taken out of it."""

from collections.abc import Callable

from benchmarks.fidelity import one_stage_a_group
from zorse_ds.core.plan import Plan
from zorse_ds.core.recompute import RECOMPUTE_KEYS
from zorse_ds.cost.memory import memory_of
from zorse_ds.cost.setting import Setting
from zorse_ds.planner.effort import Effort
from zorse_ds.planner.search import search
from zorse_ds.ranges import apportion, consecutive


def effort_of(times: int) -> Effort:
    """More of everything than a planner's usual search tries."""
    usual = Effort()
    return Effort(
        judged_per_grouping=usual.judged_per_grouping + 1,
        judged=usual.judged * times,
        improved=10 * times,
        events=usual.events * times,
        workers=2,
    )


def planned(setting: Setting, batch: int, effort: Effort, tell: Callable[[str], None]) -> Plan:
    """The planner's best; `tell` hears what it is doing."""

    def progress(what: str, done: int, whole: int) -> None:
        tell(f"planner: {what}, {done} of {whole}")

    return search(setting, batch, effort, progress).best.plan


def ablated(name: str, plan: Plan, setting: Setting, batch: int) -> Plan:
    """The plan without one idea; it may not fit."""
    return ABLATIONS[name](plan, setting, batch)


def _equal_layers(plan: Plan, setting: Setting, batch: int) -> Plan:
    cuts = consecutive(apportion(plan.num_layers, [1] * len(plan.stages)))
    data = plan.to_dict()
    for stage, cut in zip(data["stages"], cuts, strict=True):
        stage["layers"] = [cut.start, cut.stop]
    return _with_room(Plan.from_dict(data), setting)


def _with_room(plan: Plan, setting: Setting) -> Plan:
    """The plan or, if it does not fit, with recompute and nobody further ahead than need be."""
    if all(own.fits for own in memory_of(plan, setting).values()):
        return plan
    data = plan.to_dict() | {"ahead": 0}
    for part in (*data["groups"], *data["stages"]):
        for key in ("recompute", *RECOMPUTE_KEYS):
            part.pop(key, None)
    for group in data["groups"]:
        group["recompute"] = "full"
    return Plan.from_dict(data)


def _equal_micro_batches(plan: Plan, setting: Setting, batch: int) -> Plan:
    """Every GPU of a group takes as many samples as any other, in micro-batches as before."""
    data = plan.to_dict()
    for group in data["groups"]:
        shares = apportion(batch, [1] * len(group["gpus"]))
        for gpu, share in zip(group["gpus"], shares, strict=True):
            count = max(1, len(gpu["micro_batches"]))
            gpu["micro_batches"] = [size for size in apportion(share, [1] * count) if size]
    return Plan.from_dict(data)


def _no_ministages(plan: Plan, setting: Setting, batch: int) -> Plan:
    """The best plan with one stage a group, where this one has more."""
    if plan.schedule != "ministage":
        return plan
    for judged in search(setting, batch, effort_of(1)).ranked:
        if judged.plan.schedule != "ministage":
            return judged.plan
    return one_stage_a_group(plan, "1f1b")


def _even_shards(plan: Plan, setting: Setting, batch: int) -> Plan:
    data = plan.to_dict()
    for group in data["groups"]:
        for gpu in group["gpus"]:
            gpu.pop("shard_weight", None)
    return Plan.from_dict(data)


ABLATIONS: dict[str, Callable[[Plan, Setting, int], Plan]] = {
    "equal-layers": _equal_layers,
    "equal-micro-batches": _equal_micro_batches,
    "no-ministages": _no_ministages,
    "even-shards": _even_shards,
}
