"""When nothing fits: what is missing, and the nearest change with which something would."""

from collections.abc import Iterator
from dataclasses import replace

from zorse_ds.core.gpus import GIB
from zorse_ds.cost.memory import RankMemory, memory_of
from zorse_ds.cost.setting import Setting
from zorse_ds.planner.draft import plan_of
from zorse_ds.planner.effort import Effort, silent
from zorse_ds.planner.screen import Costed, screened

SMALL = Effort(most_groups=6, judged=1)


def what_is_missing(nearest: list[Costed], setting: Setting, batch: int) -> str:
    """One sentence for the user. `nearest`: drafts that do not fit, the nearest first."""
    gpus = len(setting.cluster.gpus)
    if not nearest:
        return (
            f"no plan can be made for {gpus} GPUs, {setting.model.num_layers} layers and a batch "
            f"of {batch}; expected at least as many layers as groups of GPUs"
        )
    rank, memory = _worst(nearest[0], setting, batch)
    part, num_bytes = _largest_part(memory)
    advice = next(_changes(setting, batch), "expected GPUs with more memory or a smaller model")
    gpu = setting.cluster.gpus[rank].type.name
    return (
        f"no plan fits the memory of {gpus} GPUs: in the nearest, rank {rank} ({gpu}) lacks "
        f"{memory.overflow_bytes / GIB:.1f} of {memory.total_bytes / GIB:.1f} GiB, most of it "
        f"{part} ({num_bytes / GIB:.1f} GiB); {advice}"
    )


def _worst(costed: Costed, setting: Setting, batch: int) -> tuple[int, RankMemory]:
    memory = memory_of(plan_of(costed.draft, setting, batch), setting)
    rank = max(memory, key=lambda each: (memory[each].overflow_bytes, -each))
    return rank, memory[rank]


def _largest_part(memory: RankMemory) -> tuple[str, int]:
    parts = {
        "parameters": memory.parameters,
        "gradients": memory.gradients,
        "optimizer state": memory.optimizer,
        "activations": memory.activations,
        "temporaries": memory.workspace + memory.buffers,
    }
    name = max(parts, key=lambda each: parts[each])
    return name, parts[name]


def _changes(setting: Setting, batch: int) -> Iterator[str]:
    """Changes that make something fit, the smallest of each kind."""
    for part in (2, 4, 8, 16):
        if setting.seq_len // part and _feasible(
            replace(setting, seq_len=setting.seq_len // part), batch
        ):
            yield f"it would fit with samples of {setting.seq_len // part} tokens"
            break
    for part in (2, 4, 8, 16):
        if batch // part and _feasible(setting, batch // part):
            yield f"it would fit with a global batch of {batch // part}"
            break
    richest = max(setting.cluster.gpus, key=lambda gpu: (gpu.usable_bytes, -gpu.rank)).type.name
    for number in (1, 2, 4, 8, 16, 32):
        cluster = setting.cluster.with_added(f"{number}x{richest}")
        if _feasible(replace(setting, cluster=cluster), batch):
            yield f"it would fit with {number} more {richest}"
            return


def _feasible(setting: Setting, batch: int) -> bool:
    return bool(screened(setting, batch, SMALL, silent).ready)
