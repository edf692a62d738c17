"""What must hold between the parts of a plan; one function a rule, one sentence a problem."""

from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING

from zorse_ds.core.recompute import RECOMPUTE_KEYS
from zorse_ds.core.strict import listed, suggestion

if TYPE_CHECKING:
    from zorse_ds.core.plan import GpuGroup, Plan, Stage


def plan_problems(plan: "Plan") -> list[str]:
    """Every contradiction between the parts of a plan whose parts are well-formed."""
    of_groups = (_not_empty, _names, _ranks, _samples, _weights)
    of_stages = (_tiling, _hosts, _one_stage_a_group, _reduced_often)
    without_effect = (_turnaround, _ahead, _recompute)
    rules = (*of_groups, *of_stages, *without_effect)
    return [problem for rule in rules for problem in rule(plan)]


def _not_empty(plan: "Plan") -> Iterator[str]:
    if not plan.groups:
        yield "groups is empty; expected at least one group of GPUs"
    if not plan.stages:
        yield "stages is empty; expected at least one stage"
    for i, group in enumerate(plan.groups):
        if not group.gpus:
            yield f"groups[{i}].gpus is empty; expected at least one GPU"


def _names(plan: "Plan") -> Iterator[str]:
    first: dict[str, int] = {}
    for i, group in enumerate(plan.groups):
        if group.name in first:
            yield (
                f"groups[{i}].name is {group.name!r}, which groups[{first[group.name]}] has too; "
                "expected a name of its own"
            )
        first.setdefault(group.name, i)


def _ranks(plan: "Plan") -> Iterator[str]:
    owner: dict[int, str] = {}
    for i, group in enumerate(plan.groups):
        for j, gpu in enumerate(group.gpus):
            where = f"groups[{i}].gpus[{j}].rank"
            if gpu.rank in owner:
                yield (
                    f"{where} is {gpu.rank}, which {owner[gpu.rank]} is too; "
                    "expected each rank once"
                )
            owner.setdefault(gpu.rank, where)
    missing = sorted(set(range(len(owner))) - set(owner))
    if missing:
        extra = min(rank for rank in owner if rank >= len(owner))
        yield (
            f"{owner[extra]} is {extra}, but the plan names {len(owner)} ranks; expected 0 to "
            f"{len(owner) - 1} each once, and rank {missing[0]} is missing"
        )


def _samples(plan: "Plan") -> Iterator[str]:
    for i, group in enumerate(plan.groups):
        found = sum(gpu.num_samples for gpu in group.gpus)
        wanted = plan.global_batch_size
        if found != wanted:
            change = f"{wanted - found} more" if found < wanted else f"{found - wanted} fewer"
            yield (
                f"groups[{i}].gpus[*].micro_batches of group {group.name!r} sum to {found}, but "
                f"global_batch_size is {wanted}; expected {change}"
            )


def _weights(plan: "Plan") -> Iterator[str]:
    for i, group in enumerate(plan.groups):
        if group.gpus and not any(gpu.shard_weight for gpu in group.gpus):
            yield (
                f"groups[{i}].gpus[*].shard_weight are all 0; expected at least one above 0, "
                "for somebody must hold the state"
            )


def _tiling(plan: "Plan") -> Iterator[str]:
    end = 0
    before = "the model starts at 0"
    for i, stage in enumerate(plan.stages):
        start, stop = stage.layers
        if start != end:
            yield f"stages[{i}].layers is [{start}, {stop}], but {before}; expected [{end}, …]"
        if stop <= start:
            yield (
                f"stages[{i}].layers is [{start}, {stop}], which holds no layer; expected at "
                f"least [{start}, {start + 1}]"
            )
        if stop > end:
            end = stop
            before = f"stages[{i}] ends at {end}"


def _hosts(plan: "Plan") -> Iterator[str]:
    names = [group.name for group in plan.groups]
    for i, stage in enumerate(plan.stages):
        if names and stage.group not in names:
            yield (
                f"stages[{i}].group is {stage.group!r}, which is no group; expected {listed(names)}"
                f"{suggestion(stage.group, names)}"
            )
    used = {stage.group for stage in plan.stages}
    for i, name in enumerate(names):
        if name not in used:
            yield f"groups[{i}] {name!r} hosts no stage; expected it in stages[*].group"


def _one_stage_a_group(plan: "Plan") -> Iterator[str]:
    if plan.schedule == "ministage":
        return
    for name, count in Counter(stage.group for stage in plan.stages).items():
        if count > 1:
            yield (
                f"schedule is {plan.schedule!r}, but group {name!r} hosts {count} stages; expected "
                "one stage a group, or schedule 'ministage'"
            )


def _reduced_often(plan: "Plan") -> Iterator[str]:
    """What runs beside the backward pass must not get between the groups of a pipeline."""
    for i, group in enumerate(plan.groups):
        if group.reduce_after == "step":
            continue
        if len(plan.stages) > 1:
            yield (
                f"groups[{i}].reduce_after is 'micro_batch', but the plan has {len(plan.stages)} "
                "stages; expected 'step', or one stage over all GPUs"
            )
        if group.zero_level != 2:
            yield (
                f"groups[{i}].reduce_after is 'micro_batch', but zero_level of group "
                f"{group.name!r} is {group.zero_level}; expected zero_level 2, or 'step'"
            )
        if group.offload != "none":
            yield (
                f"groups[{i}].reduce_after is 'micro_batch', but offload of group {group.name!r} "
                f"is {group.offload!r}; expected offload 'none', or 'step'"
            )


def _turnaround(plan: "Plan") -> Iterator[str]:
    if plan.schedule != "ministage" and not plan.turnaround:
        yield (
            f"turnaround is false, but schedule {plan.schedule!r} has no turn-around to switch "
            "off; expected schedule 'ministage', or no such key"
        )


def _ahead(plan: "Plan") -> Iterator[str]:
    if plan.ahead and (plan.schedule == "gpipe" or not plan.turnaround):
        yield (
            f"ahead is {plan.ahead}, but every forward comes first without a turn-around; expected "
            "0, or no such key"
        )
        return
    most = max((len(gpu.micro_batches) for group in plan.groups for gpu in group.gpus), default=0)
    if plan.ahead > most > 0:
        yield (
            f"ahead is {plan.ahead}, but no GPU has more than {most} micro-batches; expected at "
            f"most {most}"
        )


def _recompute(plan: "Plan") -> Iterator[str]:
    of_groups = {group.name: group.recompute for group in plan.groups}
    recomputing: set[str] = set()
    for i, stage in enumerate(plan.stages):
        recompute = stage.recompute or of_groups.get(stage.group)
        if recompute == "full":
            recomputing.add(stage.group)
        elif recompute == "none":
            for key in sorted(RECOMPUTE_KEYS & _given(stage)):
                yield (
                    f"stages[{i}].{key} is {getattr(stage, key)}, but its recompute is 'none'; "
                    "expected recompute 'full', or no such key"
                )
        if (stage.recompute_layers or 0) > stage.layers.size:
            yield (
                f"stages[{i}].recompute_layers is {stage.recompute_layers}, but the stage has "
                f"{stage.layers.size} layers; expected at most {stage.layers.size}"
            )
    for i, group in enumerate(plan.groups):
        if group.name not in recomputing:
            for key in sorted(RECOMPUTE_KEYS & _given(group)):
                yield (
                    f"groups[{i}].{key} is {getattr(group, key)}, but recompute of group "
                    f"{group.name!r} is 'none'; expected recompute 'full', or no such key"
                )


def _given(part: "GpuGroup | Stage") -> set[str]:
    return {key for key in part.model_fields_set if getattr(part, key) is not None}
