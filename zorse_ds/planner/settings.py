"""What a group may do for memory, and what each costs it."""

from dataclasses import replace
from itertools import product

from zorse_ds.cost.activations import activation_table
from zorse_ds.cost.compute import compute_times
from zorse_ds.cost.dtypes import MASTER_BYTES
from zorse_ds.cost.optimizer import step_s
from zorse_ds.cost.setting import Setting
from zorse_ds.cost.state import params_of
from zorse_ds.planner.draft import Draft, GroupDraft, Offload, ZeroLevel
from zorse_ds.planner.traffic import gather_s, ring_pace

OFFLOADS: tuple[Offload, ...] = ("none", "params", "params+activations")


def rungs(draft: Draft, index: int, setting: Setting, batch: int) -> list[GroupDraft]:
    """Settings of a group, the cheapest first."""
    group = draft.groups[index]
    visits = [visit for visit, _ in draft.stages_of(index)]
    recomputes = {
        tuple(visit in again for visit in range(draft.num_visits))
        for again in ((), visits[:-1], visits)
    }
    alone = len(group.ranks) == 1
    gathered = draft.schedule == "ministage"
    levels: tuple[ZeroLevel, ...] = (0 if alone else 2, 3) if gathered else (0 if alone else 2,)
    every = [
        replace(group, recompute=again, zero_level=level, offload=offload, shard_weights=None)
        for again, level, offload in product(recomputes, levels, OFFLOADS)
    ]
    return sorted(every, key=lambda rung: _cost(draft, index, rung, setting, batch))


def _cost(
    draft: Draft, index: int, rung: GroupDraft, setting: Setting, batch: int
) -> tuple[float, int, tuple[bool, ...], int]:
    """Seconds a step that the settings add on an average rank; then what is simpler."""
    samples = batch / len(rung.ranks)
    sums = compute_times(setting).sums(rung.gpu_types[0], rung.dtype, rung.size)
    stages = draft.stages_of(index)
    again = sum(sums.forward_s(layers) for visit, layers in stages if rung.recompute[visit])
    seconds = again / rung.size * samples + host_s(draft, index, rung, setting, batch)
    if rung.zero_level == 3:
        pace = ring_pace(rung.ranks, setting)
        seconds += sum(gather_s(draft, index, layers, setting, pace) for _, layers in stages)
    return seconds, OFFLOADS.index(rung.offload), rung.recompute, rung.zero_level


def host_s(draft: Draft, index: int, group: GroupDraft, setting: Setting, batch: int) -> float:
    """Seconds a step of copies to and from host memory and of the optimizer there."""
    if group.offload == "none":
        return 0.0
    gpu = setting.cluster.gpus[group.ranks[0]]
    table = activation_table(setting)
    seconds = 0.0
    for visit, layers in draft.stages_of(index):
        stepped = params_of(setting.model, layers).owned / len(group.ranks)
        seconds += step_s(setting, gpu.type, group.dtype, stepped, on_host=True)
        seconds += 2 * stepped * MASTER_BYTES / gpu.host_bytes_per_s
        if group.offload == "params+activations":
            again = int(group.recompute[visit])
            copied = table.of(layers, group.dtype, again, offloaded=True).host_per_sample
            seconds += 2 * copied * batch / len(group.ranks) / gpu.host_bytes_per_s
    return seconds
