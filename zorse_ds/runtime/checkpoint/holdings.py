"""Which parts of which parameters a rank holds, and which of them it writes."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor, nn

from zorse_ds.core.plan import GpuGroup, Plan
from zorse_ds.core.shards import cut_into_shards
from zorse_ds.ranges import Range
from zorse_ds.runtime.assembly import StageModel
from zorse_ds.runtime.bucket import Bucket
from zorse_ds.runtime.optimizer import ShardedOptimizer
from zorse_ds.schedule.trace import Tie


@dataclass(frozen=True, slots=True)
class Holding:
    """A part of one parameter in this rank's memory.

    `window` and `own` count elements of the flattened parameter: what is held, and the part of it
    that this rank writes; over all ranks each element is written once.
    """

    name: str
    shape: tuple[int, ...]
    window: Range
    own: Range
    values: Tensor
    """The held elements (1-D): of the master where there is one."""


@dataclass(frozen=True, slots=True)
class Place:
    """A part of one parameter in a bucket's master, which the inner optimizer keeps state for."""

    holding: Holding
    at: Range
    """Where the held part lies within the master."""


@dataclass(frozen=True, slots=True)
class RankState:
    """What a rank of a plan is asked for by saving and loading.

    `models` maps own stages to their models. `optimizer` is None where nothing is trained.
    """

    rank: int
    plan: Plan
    ties: Sequence[Tie]
    models: Mapping[int, StageModel]
    optimizer: ShardedOptimizer | None


def places_in(bucket: Bucket) -> list[Place]:
    """The parameters of a bucket, as far as its master on this rank reaches."""
    flat, master = bucket.flat, bucket.master.detach()
    places = []
    for name, shape, window in zip(flat.names, flat.shapes, flat.windows, strict=True):
        held = window.intersect(bucket.window)
        own = held.intersect(bucket.own)
        at = held.relative_to(bucket.window.start)
        holding = Holding(
            name,
            tuple(shape),
            held.relative_to(window.start),
            own.relative_to(window.start),
            master[at.as_slice()],
        )
        places.append(Place(holding, at))
    return places


def holdings_of(state: RankState) -> Iterator[Holding]:
    """Every parameter of the own stages: trained ones by their masters, then all others.

    Trainable copies of what another stage owns are left out: they follow their owner.
    """
    seen: set[int] = set()
    if state.optimizer is not None:
        for own in state.optimizer.stages.values():
            for bucket in own.buckets:
                seen.update(map(id, bucket.flat.parameters))
                yield from (place.holding for place in places_in(bucket))
            for copy in own.copies:
                seen.update(map(id, copy.parameters))
    for stage, model in state.models.items():
        sharded = _sharded_parameters(state, stage, seen)
        for name, parameter in model.global_parameters():
            if id(parameter) in seen:
                continue
            writes = _is_first_with(state.ties, model, stage, name)
            if id(parameter) in sharded:
                yield _shard(name, *sharded[id(parameter)], writes)
            else:
                yield _whole(state, stage, name, parameter, writes)


def buffers_of(state: RankState) -> Iterator[tuple[str, Tensor, bool]]:
    """Every buffer that is saved with the model: name, tensor, and whether this rank writes it.

    Buffers of a group's ranks may differ (running means of batch norm); the first rank's are saved.
    """
    for stage, model in state.models.items():
        first = state.plan.group_of_stage(stage).ranks[0]
        for name, buffer in model.global_buffers():
            writes = state.rank == first and _is_first_with(state.ties, model, stage, name)
            yield name, buffer, writes


def _is_first_with(ties: Sequence[Tie], model: StageModel, stage: int, name: str) -> bool:
    """No stage before this one has the same parameter or buffer."""
    owners = {tie.index: tie.owner for tie in ties if stage in tie.stages}
    tie = model.tie_of(name)
    return tie is None or owners.get(tie, stage) == stage


_Sharded = tuple[tuple[int, ...], Range, Range, Tensor]
"""Shape, window in the flat vector, own shard of that, its values."""


def _sharded_parameters(state: RankState, stage: int, seen: set[int]) -> dict[int, _Sharded]:
    """Frozen parameters that live as shards, by their `id`."""
    if state.optimizer is None:
        return {}
    found: dict[int, _Sharded] = {}
    for sharded in state.optimizer.stages[stage].sharded:
        flat = sharded.flat
        for parameter, shape, window in zip(
            flat.parameters, flat.shapes, flat.windows, strict=True
        ):
            if id(parameter) not in seen:
                found[id(parameter)] = (tuple(shape), window, sharded.window, sharded.shard)
    return found


def _shard(
    name: str, shape: tuple[int, ...], window: Range, shard: Range, values: Tensor, writes: bool
) -> Holding:
    held = window.intersect(shard)
    own = held if writes else Range(held.start, held.start)
    return Holding(
        name,
        shape,
        held.relative_to(window.start),
        own.relative_to(window.start),
        values[held.relative_to(shard.start).as_slice()],
    )


def _whole(
    state: RankState, stage: int, name: str, parameter: nn.Parameter, writes: bool
) -> Holding:
    """A parameter that every rank of the group has; the ranks write it in turns."""
    group: GpuGroup = state.plan.group_of_stage(stage)
    own = cut_into_shards(parameter.numel(), group).of(state.rank) if writes else Range(0, 0)
    values = parameter.detach().view(-1)
    return Holding(name, tuple(parameter.shape), Range(0, parameter.numel()), own, values)
