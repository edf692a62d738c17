"""Putting one rank together: from a plan and the models of its stages to a `ShardedOptimizer`."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import Parameter

from zorse_ds.core.plan import Plan
from zorse_ds.core.shards import shard_layout
from zorse_ds.errors import ModelError
from zorse_ds.runtime.flat import FlatParameters, NamedParameter
from zorse_ds.runtime.optimizer import (
    Bucket,
    OptimizerFactory,
    ParamGroup,
    ShardedOptimizer,
    cut_into_buckets,
)
from zorse_ds.runtime.process_groups import ProcessGroup
from zorse_ds.runtime.ties import OwnedTie, TiedParameters
from zorse_ds.schedule.trace import Tie


class StageModel(Protocol):
    """The layers of one stage, as the runtime sees them."""

    def __call__(self, value: Any) -> Any:
        """What enters the stage → what leaves it."""

    def global_parameters(self) -> Iterator[tuple[str, Parameter]]:
        """Every parameter once, under the name it has in the whole model."""

    def tie_of(self, name: str) -> int | None:
        """Which of the model's sets of shared parameters a parameter belongs to."""


GroupFactory = Callable[[Sequence[int]], ProcessGroup]


@dataclass(frozen=True, slots=True)
class ParamGroups:
    """The user's param groups: their options, and which one a parameter is in."""

    options: Sequence[ParamGroup]
    index_of: Callable[[Parameter], int | None]
    """None: the parameter is in no group and is not trained."""


@dataclass(frozen=True, slots=True)
class RankParts:
    """What a rank of a plan is made of."""

    rank: int
    plan: Plan
    ties: Sequence[Tie]
    models: Mapping[int, StageModel]
    """Own stages → their models."""
    process_group: GroupFactory
    """Ranks → their process group; called for the same groups in the same order on every rank."""
    world: ProcessGroup


def build_optimizer(
    parts: RankParts,
    groups: ParamGroups,
    make_optimizer: OptimizerFactory,
    originals: Mapping[str, Tensor] | None = None,
) -> ShardedOptimizer:
    """Shard the trainable parameters of a rank and set the inner optimizer on its shards.

    `originals` holds full-precision values of parameters that were cast before. Collective: all
    ranks of the plan; afterwards copies of one parameter are equal on all ranks.
    """
    buckets: dict[int, list[Bucket]] = {}
    group_of: dict[int, int] = {}
    copies: dict[int, list[FlatParameters]] = {}
    for stage in parts.plan.stages_of_rank(parts.rank):
        owned, lots = _split_by_owner(parts, stage, groups)
        for tie, lot in lots.items():
            copies.setdefault(tie, []).append(_one_flat(lot))
        buckets[stage] = []
        plan_group = parts.plan.group_of_stage(stage)
        process_group = parts.process_group(plan_group.ranks)
        for group, flat in cut_into_buckets(owned, groups.index_of):
            bucket = Bucket(flat, plan_group, process_group, originals or {})
            group_of[id(bucket)] = group
            buckets[stage].append(bucket)
    ties = _tied_parameters(parts, buckets, copies)
    optimizer = ShardedOptimizer(
        buckets,
        ties,
        groups.options,
        lambda bucket: group_of[id(bucket)],
        make_optimizer,
        parts.world,
    )
    _equalise(optimizer)
    _share_frozen(parts)
    return optimizer


def _split_by_owner(
    parts: RankParts, stage: int, groups: ParamGroups
) -> tuple[list[NamedParameter], dict[int, list[NamedParameter]]]:
    """Trainable parameters that the stage owns, and those it has copies of, by tie."""
    owners = {tie.index: tie.owner for tie in parts.ties if stage in tie.stages}
    owned: list[NamedParameter] = []
    copied: dict[int, list[NamedParameter]] = {}
    model = parts.models[stage]
    for name, parameter in model.global_parameters():
        if groups.index_of(parameter) is None:
            parameter.requires_grad_(False)
        if not parameter.requires_grad:
            continue
        tie = model.tie_of(name)
        lot = (
            owned if tie is None or owners.get(tie, stage) == stage else copied.setdefault(tie, [])
        )
        lot.append(NamedParameter(name, parameter))
    return owned, copied


def _one_flat(lot: Sequence[NamedParameter]) -> FlatParameters:
    dtypes = {named.parameter.dtype for named in lot}
    if len(dtypes) > 1:
        raise ModelError(f"tied parameters have dtypes {sorted(map(str, dtypes))}; expected one")
    return FlatParameters(sorted(lot, key=lambda named: named.name))


def _tied_parameters(
    parts: RankParts,
    buckets: Mapping[int, Sequence[Bucket]],
    copies: Mapping[int, Sequence[FlatParameters]],
) -> dict[int, TiedParameters]:
    tied: dict[int, TiedParameters] = {}
    for tie in parts.ties:
        if parts.rank not in tie.ranks:
            continue
        process_group = parts.process_group(tie.ranks)
        places = _places_of(parts, tie, buckets)
        own_copies = copies.get(tie.index, ())
        if places or own_copies:
            owner_ranks = parts.plan.group_of_stage(tie.owner).ranks
            owned = OwnedTie(places) if places else None
            tied[tie.index] = TiedParameters(process_group, owner_ranks, owned, own_copies)
    return tied


def _places_of(
    parts: RankParts, tie: Tie, buckets: Mapping[int, Sequence[Bucket]]
) -> list[tuple[FlatParameters, Any]]:
    """Where the owner's tied parameters lie, by name, as the copies have them."""
    model = parts.models.get(tie.owner)
    if model is None:
        return []
    names = {name for name, _ in model.global_parameters() if model.tie_of(name) == tie.index}
    found = [
        (name, bucket.flat, window)
        for bucket in buckets[tie.owner]
        for name, window in zip(bucket.flat.names, bucket.flat.windows, strict=True)
        if name in names
    ]
    return [(flat, window) for _, flat, window in sorted(found, key=lambda place: place[0])]


def _equalise(optimizer: ShardedOptimizer) -> None:
    """Every rank starts from its owners' values, however they were made."""
    with torch.no_grad():
        for bucket in optimizer.buckets:
            bucket.share_initial()
        for tie in sorted(optimizer.ties):
            optimizer.broadcast_tied(tie)


def _share_frozen(parts: RankParts) -> None:
    """Parameters that nobody trains: a group's ranks take those of its first."""
    for stage in parts.plan.stages_of_rank(parts.rank):
        ranks = parts.plan.group_of_stage(stage).ranks
        first_has_all = [float(rank == ranks[0]) for rank in ranks]
        for _, parameter in parts.models[stage].global_parameters():
            if not parameter.requires_grad and len(ranks) > 1:
                flat = parameter.detach().reshape(-1)
                layout = shard_layout(flat.numel(), ranks, first_has_all)
                parts.process_group(ranks).gather_shards(flat, layout)
                parameter.data.copy_(flat.view_as(parameter))
