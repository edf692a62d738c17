"""The plan: which ranks run which layers on which samples, and how they share state.

A plan is frozen data. What exists is valid: `Plan.from_dict` and `Plan.load` raise `PlanError`
with one sentence per problem, all problems of a file together.
"""

import json
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, PlainSerializer, ValidationError

from zorse_ds.core.plan_checks import plan_problems
from zorse_ds.core.recompute import KEPT, RECOMPUTE_KEYS, Recomputed, first_of
from zorse_ds.core.strict import StrictModel, problems_of, without_faults
from zorse_ds.errors import PlanError
from zorse_ds.files import read_json, write_text
from zorse_ds.ranges import Range, apportion, consecutive

Recompute = Literal["none", "full"]

Dtype = Literal["float32", "bfloat16", "float16"]

_MOST = 2**31 - 1
"""Ranks, samples and layers are numbered in 32 bits."""


def _to_range(value: object) -> object:
    if isinstance(value, Range):
        return value
    whole = isinstance(value, list | tuple) and len(value) == 2
    if not whole or any(type(bound) is not int for bound in value):  # type: ignore[attr-defined]
        raise ValueError("two whole numbers [first, one behind the last]")
    if not all(0 <= bound <= _MOST for bound in value):  # type: ignore[attr-defined]
        raise ValueError(f"two whole numbers from 0 to {_MOST}")
    return Range(*value)  # type: ignore[misc]


LayerRange = Annotated[Range, BeforeValidator(_to_range), PlainSerializer(list)]
MicroBatchSize = Annotated[int, Field(ge=1, le=_MOST)]


def _as_tuple(value: object) -> object:
    return tuple(value) if isinstance(value, list) else value


def _whole(value: object) -> object:
    """A literal number takes what equals it: `true` for 1, 2.0 for 2."""
    if type(value) is not int:
        raise ValueError("a whole number")
    return value


class GpuShare(StrictModel):
    """What one rank does inside its group."""

    rank: int = Field(ge=0, le=_MOST)
    micro_batches: Annotated[tuple[MicroBatchSize, ...], BeforeValidator(_as_tuple)]
    """Samples in each of the rank's micro-batches of a step, in the order it runs them."""
    shard_weight: float = Field(default=1.0, ge=0)
    """Share of optimizer state, gradients and parameters, as far as `zero_level` cuts them."""

    @property
    def num_samples(self) -> int:
        """Samples of a global batch that this rank runs."""
        return sum(self.micro_batches)


class GpuGroup(StrictModel):
    """GPUs that run the same stages, data-parallel among themselves (Zorse §3.1)."""

    name: str = Field(min_length=1)
    gpus: Annotated[tuple[GpuShare, ...], BeforeValidator(_as_tuple)]
    zero_level: Annotated[Literal[0, 1, 2, 3], BeforeValidator(_whole)] = 0
    reduce_after: Literal["step", "micro_batch"] = "step"
    """`micro_batch`: each micro-batch's gradients are summed into shards beside its backward pass,
    and never whole on a rank; for `zero_level` 2 in a plan of one stage."""
    recompute: Recompute = "none"
    recompute_every: int = Field(default=1, ge=1, le=_MOST)
    """With recompute: layers between two kept activations."""
    recompute_layers: Annotated[int, Field(ge=1, le=_MOST)] | None = None
    """With recompute: so many layers of each stage, its first ones; default: all."""
    offload: Literal["none", "params", "params+activations"] = "none"
    dtype: Dtype | None = None
    """What the group computes in; default: what the DeepSpeed config says."""
    transport: Literal["auto", "direct", "staged"] = "auto"

    @property
    def ranks(self) -> tuple[int, ...]:
        """Ranks of the group, ascending."""
        return tuple(gpu.rank for gpu in self.gpus)


class Stage(StrictModel):
    """A contiguous run of pipeline layers hosted by one group."""

    group: str
    layers: LayerRange
    recompute: Recompute | None = None
    recompute_every: Annotated[int, Field(ge=1, le=_MOST)] | None = None
    recompute_layers: Annotated[int, Field(ge=1, le=_MOST)] | None = None
    """All three override the group's value when given."""


class Plan(StrictModel):
    """The whole decision: groups, stages, batch and schedule."""

    version: Annotated[Literal[1], BeforeValidator(_whole)] = 1
    global_batch_size: int = Field(ge=1, le=_MOST)
    schedule: Literal["1f1b", "gpipe", "ministage"] = "1f1b"
    turnaround: bool = True
    """With schedule "ministage": at its last stage a group runs backward as gradients arrive."""
    ahead: Annotated[int, Field(ge=0, le=_MOST)] = 0
    """Micro-batches that each GPU is further ahead of the stage below than routing asks for, where
    the pipeline turns around: messages and unlike groups then hold nobody up, for the memory of
    that many more activations."""
    groups: Annotated[tuple[GpuGroup, ...], BeforeValidator(_as_tuple)]
    stages: Annotated[tuple[Stage, ...], BeforeValidator(_as_tuple)]

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> "Plan":
        """Validate plain data. Raises `PlanError` that tells all problems."""
        try:
            plan = cls.model_validate(data)
        except ValidationError as error:
            problems = problems_of(error, cls)
            rest = without_faults(data, error, cls) if isinstance(data, dict) else None
            if rest is not None:
                problems += plan_problems(cls.model_validate(_with_what_allows_most(rest)))
            raise PlanError(problems) from None
        problems = plan_problems(plan)
        if problems:
            raise PlanError(problems)
        return plan._with_ranks_ascending()

    @classmethod
    def load(cls, path: str | Path) -> "Plan":
        """Read a plan file. Raises `PlanError` that tells all problems, each with the path."""
        data = read_json(path, PlanError)
        try:
            return cls.from_dict(data)
        except PlanError as error:
            raise PlanError(f"{path}: {problem}" for problem in error.problems) from None

    def to_dict(self) -> dict[str, Any]:
        """The plan as plain data; what was left at its default is left out."""
        return {"version": self.version, **self.model_dump(mode="json", exclude_defaults=True)}

    def save(self, path: str | Path) -> None:
        """Write the plan as JSON, atomically."""
        write_text(path, json.dumps(self.to_dict(), indent=2) + "\n")

    @property
    def world_size(self) -> int:
        """How many ranks the plan names."""
        return sum(len(group.gpus) for group in self.groups)

    @property
    def num_layers(self) -> int:
        """How many pipeline layers the plan covers."""
        return self.stages[-1].layers.stop

    def group_named(self, name: str) -> GpuGroup:
        """The group of that name."""
        return next(group for group in self.groups if group.name == name)

    def group_of_stage(self, stage: int) -> GpuGroup:
        """The group that hosts a stage."""
        return self.group_named(self.stages[stage].group)

    def group_of_rank(self, rank: int) -> GpuGroup:
        """The group that a rank belongs to."""
        return next(group for group in self.groups if rank in group.ranks)

    def stages_of_rank(self, rank: int) -> tuple[int, ...]:
        """Indices of the stages that a rank hosts, in model order."""
        name = self.group_of_rank(rank).name
        return tuple(i for i, stage in enumerate(self.stages) if stage.group == name)

    def stage_of_layer(self, layer: int) -> int:
        """Index of the stage that holds a pipeline layer."""
        return next(i for i, stage in enumerate(self.stages) if layer < stage.layers.stop)

    def recompute_of(self, stage: int) -> Recompute:
        """The stage's own setting, or else its group's."""
        return self.stages[stage].recompute or self.group_of_stage(stage).recompute

    def recomputed(self, stage: int) -> Recomputed:
        """The layers of a stage that are made anew in its backward pass."""
        if self.recompute_of(stage) == "none":
            return KEPT
        own, group = self.stages[stage], self.group_of_stage(stage)
        number = own.recompute_layers or group.recompute_layers
        return first_of(own.layers, number, own.recompute_every or group.recompute_every)

    def boundary_dtypes(self, default: Dtype) -> dict[int, tuple[Dtype, Dtype]]:
        """Boundaries between groups of unlike dtype → what leaves above, what enters below.

        The sender converts: activations to what the next stage computes in, gradients back.
        """
        dtypes = [self.group_of_stage(i).dtype or default for i in range(len(self.stages))]
        pairs = enumerate(pairwise(dtypes))
        return {boundary: pair for boundary, pair in pairs if pair[0] != pair[1]}

    def resized(self, batch_size: int) -> "Plan":
        """The same plan for a global batch of another size (a short last batch, evaluation).

        Every group cuts the new batch in proportion to its micro-batches; those that would be
        empty fall away, so a rank may end with none.
        """
        assert batch_size >= 1, f"a global batch of {batch_size} samples"
        if batch_size == self.global_batch_size:
            return self
        groups = tuple(_resized_group(group, batch_size) for group in self.groups)
        return self.model_copy(update={"global_batch_size": batch_size, "groups": groups})

    def _with_ranks_ascending(self) -> "Plan":
        """`torch.distributed` sorts the ranks of a process group, so the plan does too."""
        groups = tuple(
            group.model_copy(update={"gpus": tuple(sorted(group.gpus, key=lambda gpu: gpu.rank))})
            for group in self.groups
        )
        return self.model_copy(update={"groups": groups})


def _with_what_allows_most(rest: dict[str, Any]) -> dict[str, Any]:
    """A misspelt schedule or recompute was told; what it may have allowed is not told as well."""

    def recomputing(part: Any) -> Any:
        return {"recompute": "full", **part} if RECOMPUTE_KEYS & part.keys() else part

    parts = {key: [recomputing(part) for part in rest[key]] for key in ("groups", "stages")}
    return {"schedule": "ministage", **rest, **parts}


def _resized_group(group: GpuGroup, batch_size: int) -> GpuGroup:
    sizes = [size for gpu in group.gpus for size in gpu.micro_batches]
    new_sizes = apportion(batch_size, sizes)
    spans = consecutive([len(gpu.micro_batches) for gpu in group.gpus])
    gpus = tuple(
        gpu.model_copy(
            update={"micro_batches": tuple(size for size in new_sizes[span.as_slice()] if size)}
        )
        for gpu, span in zip(group.gpus, spans, strict=True)
    )
    return group.model_copy(update={"gpus": gpus})
