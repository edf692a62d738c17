"""Putting one rank together: from a plan and the models of its stages to a `ShardedOptimizer`."""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import Parameter

from zorse_ds.core.plan import Plan
from zorse_ds.core.shards import LEAST_LOT, cut_into_shards, shard_layout
from zorse_ds.errors import ModelError
from zorse_ds.runtime.bucket import Bucket
from zorse_ds.runtime.flat import FlatParameters, NamedParameter
from zorse_ds.runtime.host_memory import HostMemory
from zorse_ds.runtime.optimizer import (
    OptimizerFactory,
    ParamGroup,
    ShardedOptimizer,
    StageParameters,
    cut_into_buckets,
)
from zorse_ds.runtime.process_groups import ProcessGroup, gather_shards
from zorse_ds.runtime.rounds import Rounds
from zorse_ds.runtime.sharded import ShardedFlat
from zorse_ds.runtime.ties import OwnedPlace, TiedCopy, TiedParameters
from zorse_ds.schedule.residency import GATHERED_LEVEL
from zorse_ds.schedule.trace import Tie


class StageModel(Protocol):
    """The layers of one stage, as the runtime sees them."""

    def __call__(self, value: Any) -> Any:
        """What enters the stage → what leaves it."""

    def global_parameters(self) -> Iterator[tuple[str, Parameter]]:
        """Every parameter once, under the name it has in the whole model."""

    def buffers(self) -> Iterator[Tensor]:
        """Every tensor that is no parameter."""

    def global_buffers(self) -> Iterator[tuple[str, Tensor]]:
        """Those of them that are saved with the model, under names that no plan changes."""

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
    host: HostMemory | None = None
    """Set where the group keeps masters, optimizer state and shards in host memory."""
    wire: torch.dtype | None = None
    """What gradients travel in to be summed up in a group; None: what they accumulate in."""


def build_optimizer(
    parts: RankParts,
    groups: ParamGroups,
    make_optimizer: OptimizerFactory,
    originals: Mapping[str, Tensor] | None = None,
) -> ShardedOptimizer:
    """Shard the parameters of a rank and set the inner optimizer on its master shards.

    `originals` holds full-precision values of parameters that were cast before. Collective: all
    ranks of the plan; afterwards copies of one parameter are equal on all ranks.
    """
    with torch.no_grad():
        _share_initial(parts, originals or {})
    group_of: dict[int, int] = {}
    stages: dict[int, StageParameters] = {}
    copies: dict[int, list[TiedCopy]] = {}
    for stage in parts.plan.stages_of_rank(parts.rank):
        lots = _split(parts, stage, groups)
        buckets = _buckets(parts, stage, lots.owned, groups, originals or {}, group_of)
        own_copies = {tie: _copy(parts, stage, lot) for tie, lot in lots.copied.items()}
        for tie, copy in own_copies.items():
            copies.setdefault(tie, []).append(copy)
        sharded = [bucket.sharded for bucket in buckets]
        sharded += [copy.sharded for copy in own_copies.values()]
        sharded += [_sharded(parts, stage, flat) for flat in _by_dtype(lots.frozen)]
        by_round = parts.plan.group_of_stage(stage).reduce_after == "micro_batch"
        stages[stage] = StageParameters(
            tuple(buckets),
            tuple(copy.flat for copy in own_copies.values()),
            tuple(each for each in sharded if each is not None),
            Rounds(buckets) if by_round else None,
        )
    optimizer = ShardedOptimizer(
        stages,
        _tied_parameters(parts, stages, copies),
        groups.options,
        lambda bucket: group_of[id(bucket)],
        make_optimizer,
        parts.world,
        parts.host,
    )
    _share_tied(optimizer)
    return optimizer


@dataclass(frozen=True, slots=True)
class _Lots:
    """The parameters of a stage by what becomes of them."""

    owned: list[NamedParameter]
    copied: dict[int, list[NamedParameter]]
    """Trainable copies of what another stage owns, by tie."""
    frozen: list[NamedParameter]


def _split(parts: RankParts, stage: int, groups: ParamGroups) -> _Lots:
    owners = {tie.index: tie.owner for tie in parts.ties if stage in tie.stages}
    lots = _Lots([], {}, [])
    model = parts.models[stage]
    for name, parameter in model.global_parameters():
        if groups.index_of(parameter) is None:
            parameter.requires_grad_(False)
        tie = model.tie_of(name)
        lot = lots.owned
        if not parameter.requires_grad:
            lot = lots.frozen
        elif tie is not None and owners.get(tie, stage) != stage:
            lot = lots.copied.setdefault(tie, [])
        lot.append(NamedParameter(name, parameter))
    return lots


def _buckets(
    parts: RankParts,
    stage: int,
    owned: Sequence[NamedParameter],
    groups: ParamGroups,
    originals: Mapping[str, Tensor],
    group_of: dict[int, int],
) -> list[Bucket]:
    plan_group = parts.plan.group_of_stage(stage)
    process_group = parts.process_group(plan_group.ranks)
    buckets = []
    by_round = plan_group.reduce_after == "micro_batch"
    for lot in _by_layers(owned) if by_round else [owned]:
        for group, flat in cut_into_buckets(lot, groups.index_of, accumulates=not by_round):
            made = Bucket(flat, plan_group, process_group, originals, parts.host, parts.wire)
            buckets.append(made)
            group_of[id(made)] = group
    return buckets


def _by_layers(parameters: Sequence[NamedParameter]) -> list[list[NamedParameter]]:
    """Whole layers, as many as it takes to `LEAST_LOT`: those of one agree up to a number."""
    lots: list[list[NamedParameter]] = []
    numel = 0
    for _, layer in groupby(parameters, _layer_of):
        own = list(layer)
        if not lots or numel >= LEAST_LOT:
            lots.append([])
            numel = 0
        lots[-1] += own
        numel += sum(named.parameter.numel() for named in own)
    return lots


def _layer_of(named: NamedParameter) -> str:
    """Its name up to the first number: `model.layers.3`; empty where there is none."""
    found = re.match(r"(.*?\.)?\d+(?=\.)", named.name)
    return found[0] if found else ""


def _copy(parts: RankParts, stage: int, lot: Sequence[NamedParameter]) -> TiedCopy:
    dtypes = {named.parameter.dtype for named in lot}
    if len(dtypes) > 1:
        raise ModelError(f"tied parameters have dtypes {sorted(map(str, dtypes))}; expected one")
    flat = FlatParameters(sorted(lot, key=lambda named: named.name))
    return TiedCopy(flat, _sharded(parts, stage, flat))


def _by_dtype(lot: Sequence[NamedParameter]) -> list[FlatParameters]:
    return [flat for _, flat in cut_into_buckets(lot, lambda parameter: 0)]


def _sharded(parts: RankParts, stage: int, flat: FlatParameters) -> ShardedFlat | None:
    """The flat vector in shards where the stage's group keeps parameters so."""
    group = parts.plan.group_of_stage(stage)
    if group.zero_level < GATHERED_LEVEL:
        return None
    layout = cut_into_shards(flat.numel, group)
    return ShardedFlat(flat, layout, parts.process_group(group.ranks), parts.host)


def _tied_parameters(
    parts: RankParts,
    stages: Mapping[int, StageParameters],
    copies: Mapping[int, Sequence[TiedCopy]],
) -> dict[int, TiedParameters]:
    tied: dict[int, TiedParameters] = {}
    for tie in parts.ties:
        if parts.rank not in tie.ranks:
            continue
        places = _places_of(parts, tie, stages)
        own_copies = copies.get(tie.index, ())
        if places or own_copies:
            group = parts.process_group(tie.ranks)
            some = places[0].bucket.flat if places else own_copies[0].flat
            device = some.data.device
            tied[tie.index] = TiedParameters(group, places, own_copies, device, tie.owner)
    return tied


def _places_of(
    parts: RankParts, tie: Tie, stages: Mapping[int, StageParameters]
) -> list[OwnedPlace]:
    """Where the owner's tied parameters lie, by name, as the copies have them."""
    model = parts.models.get(tie.owner)
    if model is None:
        return []
    names = {name for name, _ in model.global_parameters() if model.tie_of(name) == tie.index}
    found = [
        (name, OwnedPlace(bucket, window))
        for bucket in stages[tie.owner].buckets
        for name, window in zip(bucket.flat.names, bucket.flat.windows, strict=True)
        if name in names
    ]
    return [place for _, place in sorted(found, key=lambda item: item[0])]


def _share_tied(optimizer: ShardedOptimizer) -> None:
    """Copies of tied parameters start from their owner's values."""
    with torch.no_grad():
        for tie in sorted(optimizer.ties):
            optimizer.broadcast_tied(tie)


def _share_initial(parts: RankParts, originals: Mapping[str, Tensor]) -> None:
    """A group's ranks take parameters and buffers from its first, however each made its own.

    Values in full precision are shared where there are some, and parameters rounded from them.
    """
    for stage in parts.plan.stages_of_rank(parts.rank):
        ranks = parts.plan.group_of_stage(stage).ranks
        if len(ranks) == 1:
            continue
        group = parts.process_group(ranks)
        model = parts.models[stage]
        for name, parameter in model.global_parameters():
            source = originals.get(name, parameter.detach())
            _take_from_first(group, source)
            parameter.data.copy_(source)
        for buffer in model.buffers():
            _take_from_first(group, buffer)


def _take_from_first(group: ProcessGroup, tensor: Tensor) -> None:
    flat = tensor.reshape(-1)
    first_has_all = [float(rank == group.ranks[0]) for rank in group.ranks]
    gather_shards(group, flat, shard_layout(flat.numel(), group.ranks, first_has_all))
    tensor.copy_(flat.view_as(tensor))
