"""What of a plan Megatron-Core can express, as the flags of its training scripts.

Megatron's world is a rectangle: pipeline ranks times one data-parallel width, one micro-batch size,
one dtype. How layers are cut is free, also into stages that a pipeline rank visits in turn.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from zorse_ds.core.plan import Dtype, Plan


@dataclass(frozen=True, slots=True)
class MegatronFlags:
    """Command-line words, and one sentence for each thing of the plan that they do not say."""

    flags: tuple[str, ...]
    unsaid: tuple[str, ...]


def megatron_flags(plan: Plan, seq_len: int, dtype: Dtype = "bfloat16") -> MegatronFlags:
    """The flags for a plan of a model with embedding (layer 0), blocks, and norm with head (last).

    `dtype` is that of groups that name none.
    """
    flags = [
        *("--num-layers", str(plan.num_layers - 2)),
        *("--seq-length", str(seq_len)),
        *("--tensor-model-parallel-size", "1"),
        *("--pipeline-model-parallel-size", str(len(plan.groups))),
        *("--pipeline-model-parallel-layout", layout_of(plan)),
        *("--global-batch-size", str(plan.global_batch_size)),
        *("--micro-batch-size", str(_micro_batch_size(plan))),
        *_shared(plan, dtype),
    ]
    return MegatronFlags(tuple(flags), tuple(_unsaid(plan, dtype)))


def layout_of(plan: Plan) -> str:
    """The stages in model order, as `Et*3|t*2|tL`: embedding, blocks, loss with its head."""
    return "|".join(_layers(stage.layers.start, stage.layers.stop, plan) for stage in plan.stages)


def _layers(start: int, stop: int, plan: Plan) -> str:
    last = plan.num_layers - 1
    blocks = min(stop, last) - max(start, 1)
    text = "E" if start == 0 else ""
    if blocks > 0:
        text += "t" if blocks == 1 else f"t*{blocks}"
    return text + ("L" if stop > last else "")


def _micro_batch_size(plan: Plan) -> int:
    """The size most samples are in, among those that divide a rank's share of the batch."""
    samples: Counter[int] = Counter()
    for group in plan.groups:
        for gpu in group.gpus:
            for size in gpu.micro_batches:
                samples[size] += size
    width = _width(plan)
    fitting = [size for size in samples if plan.global_batch_size % (size * width) == 0]
    return max(fitting, key=lambda size: (samples[size], -size), default=1)


def _width(plan: Plan) -> int:
    """The data-parallel width that Megatron would have with all of the plan's ranks."""
    return max(plan.world_size // len(plan.groups), 1)


def _shared(plan: Plan, dtype: Dtype) -> list[str]:
    """Flags for what a group says and Megatron says for all."""
    flags = []
    dtypes = Counter(group.dtype or dtype for group in plan.groups)
    most = max(dtypes, key=lambda name: dtypes[name])
    if most != "float32":
        flags.append("--bf16" if most == "bfloat16" else "--fp16")
    numbers = [plan.recomputed(i).layers.size for i in range(len(plan.stages))]
    if any(numbers):
        flags += ["--recompute-granularity", "full", *_recompute_method(plan, max(numbers))]
    if any(group.zero_level > 0 for group in plan.groups):
        flags.append("--use-distributed-optimizer")
    if any(group.offload != "none" for group in plan.groups):
        flags.append("--optimizer-cpu-offload")
    return flags


def _recompute_method(plan: Plan, most: int) -> list[str]:
    """All layers one by one, or the first ones of each stage."""
    recomputed = [plan.recomputed(i).layers for i in range(len(plan.stages))]
    if all(
        own.size in (0, stage.layers.size)
        for own, stage in zip(recomputed, plan.stages, strict=True)
    ):
        return ["--recompute-method", "uniform", "--recompute-num-layers", "1"]
    return ["--recompute-method", "block", "--recompute-num-layers", str(most)]


def _unsaid(plan: Plan, dtype: Dtype) -> Iterator[str]:
    rules = (_of_order, _of_widths, _of_batches, _of_state, _of_schedule)
    for rule in rules:
        yield from rule(plan)
    dtypes = {group.dtype or dtype for group in plan.groups}
    if len(dtypes) > 1:
        yield f"groups compute in {_listed(sorted(dtypes))}; Megatron has one dtype for all"
    stages = [(plan.recomputed(i), stage.layers) for i, stage in enumerate(plan.stages)]
    whole = {recomputed.layers == layers for recomputed, layers in stages}
    numbers = {recomputed.layers.size for recomputed, _ in stages}
    if len(whole) > 1 and len(numbers) > 1:
        most = max(numbers)
        yield f"stages recompute unlike numbers of layers; Megatron is told {most} in all"
    if any(recomputed.every > 1 for recomputed, _ in stages):
        yield "recompute_every is more than 1; Megatron is told to keep the input of every layer"


def _of_order(plan: Plan) -> Iterator[str]:
    names = [group.name for group in plan.groups]
    visits = [stage.group for stage in plan.stages]
    first = visits[: len(names)]
    if len(visits) % len(names) or visits != first * (len(visits) // len(names)):
        yield (
            f"stages go to the groups {_listed(visits)} in turn; Megatron deals them out round by "
            "round, so that each pipeline rank has as many as the others"
        )
        return
    by_name = {group.name: group for group in plan.groups}
    ranks = [rank for name in first for rank in by_name[name].ranks]
    if ranks != sorted(ranks):
        yield (
            f"the plan's ranks come in the order {_listed(ranks)} along the pipeline; Megatron "
            "numbers ranks along it, so list the hosts in that order"
        )


def _of_widths(plan: Plan) -> Iterator[str]:
    widths = [len(group.gpus) for group in plan.groups]
    if len(set(widths)) > 1:
        yield (
            f"groups are {_listed(widths)} ranks wide; Megatron has one data-parallel width, so "
            f"the layout needs {len(plan.groups)} pipeline ranks of equal width"
        )


def _of_batches(plan: Plan) -> Iterator[str]:
    sizes = {size for group in plan.groups for gpu in group.gpus for size in gpu.micro_batches}
    if len(sizes) > 1:
        yield (
            f"micro-batches have {_listed(sorted(sizes))} samples; Megatron has one size, here "
            f"{_micro_batch_size(plan)}"
        )
    shares = {gpu.num_samples for group in plan.groups for gpu in group.gpus}
    uneven = any(len({gpu.num_samples for gpu in group.gpus}) > 1 for group in plan.groups)
    if uneven:
        yield (
            f"ranks of a group work on {_listed(sorted(shares))} samples; Megatron gives each as "
            "many as the others"
        )


def _of_state(plan: Plan) -> Iterator[str]:
    levels = sorted({group.zero_level for group in plan.groups})
    if levels not in ([0], [1]):
        yield (
            f"groups have zero_level {_listed(levels)}; the distributed optimizer is level 1 for "
            "all"
        )
    if any(len({gpu.shard_weight for gpu in group.gpus}) > 1 for group in plan.groups):
        yield "shards are of unequal size; Megatron's are equal"
    offloads = {group.offload for group in plan.groups}
    if offloads != {"none"}:
        yield (
            f"offload is {_listed(sorted(offloads))} by group; Megatron is told to keep the "
            "optimizer's state in host memory for all"
        )


def _of_schedule(plan: Plan) -> Iterator[str]:
    if plan.schedule != "1f1b":
        yield (
            f"the schedule is {plan.schedule!r}; Megatron runs 1F1B, interleaved where a pipeline "
            "rank has several stages"
        )


def _listed(values: Sequence[object]) -> str:
    return ", ".join(map(str, values))
