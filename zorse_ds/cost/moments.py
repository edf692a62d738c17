"""The moments of a step that may be the peak of a rank's memory, one visit after the other."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from zorse_ds.core.plan import GpuGroup, GpuShare, Plan
from zorse_ds.cost.activations import StageActivations, activation_table
from zorse_ds.cost.dtypes import DTYPE_BYTES, MASTER_BYTES, dtype_of
from zorse_ds.cost.rounds import UnderWay, lots_of
from zorse_ds.cost.setting import Setting
from zorse_ds.cost.state import StageParams, StateBytes, params_of, state_bytes
from zorse_ds.schedule.residency import residencies_of
from zorse_ds.schedule.visits import Visit, visits_of

MESSAGES_AHEAD = 3
"""Messages that may be on their way to a rank: the next, and two that it receives ahead."""
REDUCED_AT_ONCE = 1 << 20
"""Elements of a stage that a reduction exchanges at once."""


@dataclass(frozen=True, slots=True)
class Moment:
    """Bytes on the device at an instant, by purpose."""

    parameters: float = 0.0
    gradients: float = 0.0
    optimizer: float = 0.0
    activations: float = 0.0
    buffers: float = 0.0
    workspace: float = 0.0

    @property
    def total(self) -> float:
        """All of them."""
        held = self.parameters + self.gradients + self.optimizer
        return held + self.activations + self.buffers + self.workspace


@dataclass(frozen=True, slots=True)
class HostedStage:
    """One stage of a group, as a rank with a certain share of the group's shards holds it."""

    stage: int
    params: StageParams
    state: StateBytes
    activations: StageActivations


class StageBook:
    """What the stages of one group take on its ranks; made once a plan and group."""

    def __init__(self, plan: Plan, group: GpuGroup, setting: Setting) -> None:
        self.plan, self.group, self.setting = plan, group, setting
        self.dtype = dtype_of(group, setting)
        self.visits = visits_of(plan, group.name, plan.schedule)
        self.stays = residencies_of(plan, group.name, plan.schedule)
        self.weights = sum(gpu.shard_weight for gpu in group.gpus)
        table = activation_table(setting)
        offloaded = group.offload == "params+activations"
        self.activations = {
            i: table.of(stage.layers, self.dtype, plan.recomputed(i), offloaded)
            for i, stage in enumerate(plan.stages)
            if stage.group == group.name
        }
        self.params = {i: params_of(setting.model, plan.stages[i].layers) for i in self.activations}

    def hosted(self, gpu: GpuShare) -> dict[int, HostedStage]:
        """The group's stages on one of its ranks."""
        share = gpu.shard_weight / self.weights
        group, optimizer_bytes = self.group, self.setting.optimizer_bytes
        return {
            stage: HostedStage(
                stage,
                params,
                state_bytes(
                    params, group.zero_level, share, self.dtype, group.offload, optimizer_bytes
                ),
                self.activations[stage],
            )
            for stage, params in self.params.items()
        }


class RankBook:
    """What one rank of a group takes: the parts that moments are made of."""

    def __init__(self, book: StageBook, gpu: GpuShare) -> None:
        self.book, self.hosted = book, book.hosted(gpu)
        self.share = gpu.shard_weight / book.weights
        self.width = len(book.group.gpus)
        states = [each.state for each in self.hosted.values()]
        level = book.group.zero_level
        self.sums_often = book.group.reduce_after == "micro_batch"
        """Each micro-batch's gradients by themselves, in lots; a rank keeps its shard alone."""
        self.cuts_gradients = level >= 2 and not self.sums_often
        """Whole gradients are there only from a stage's first backward to its reduction."""
        self.keeps_gradients = level < 2
        activations = [each.activations for each in self.hosted.values()]
        longest = max(max(each.input_per_sample, each.output_per_sample) for each in activations)
        most = max(gpu.micro_batches, default=0)
        self.at_rest = Moment(
            parameters=sum(each.parameters for each in states),
            gradients=sum(each.open_gradients for each in states) if self.keeps_gradients else 0.0,
            optimizer=sum(each.optimizer for each in states),
            buffers=MESSAGES_AHEAD * most * longest,
        )
        """Between the passes, with nothing in flight and nothing gathered."""

    def forward_bytes(self, stage: int, size: int) -> float:
        """What a forward pass of `size` samples holds at most beside what they keep."""
        return self.hosted[stage].activations.extra_bytes(size)

    def backward_bytes(self, stage: int, size: int) -> float:
        """What a backward pass holds so: more where gradients are summed beside it."""
        if not self.sums_often:
            return self.forward_bytes(stage, size)
        return self.hosted[stage].activations.extra_bytes(size, self._under_way.beside)

    @cached_property
    def after_pass_bytes(self) -> float:
        """Gradients that are still under way while the next forward pass runs."""
        return self._under_way.after_pass if self.sums_often else 0.0

    @cached_property
    def _under_way(self) -> UnderWay:
        model, wire = self.book.setting.model, DTYPE_BYTES[self.book.dtype]
        return UnderWay(lots_of(model), wire, self.width * self.share if self.width > 1 else 0.0)

    def opened(self, stage: int) -> float:
        """What a stage's gradients add from its first backward to its reduction."""
        return self.hosted[stage].state.open_gradients if self.cuts_gradients else 0.0

    def reduced(self, stage: int) -> float:
        """What they add from then to its step."""
        return 0.0 if self.keeps_gradients else self.hosted[stage].state.reduced_gradients

    def summed(self, stage: int) -> float:
        """What they add from the end of its first backward to its reduction."""
        return self.hosted[stage].state.reduced_gradients if self.sums_often else 0.0

    def reduction_bytes(self, stage: int) -> float:
        """Pieces that are exchanged, and the own shard of the sum."""
        if self.width == 1 or self.sums_often:
            return 0.0
        owned = self.hosted[stage].params.owned
        numel, wire = min(REDUCED_AT_ONCE, owned), DTYPE_BYTES[self.book.dtype]
        is_copied = owned > REDUCED_AT_ONCE or wire != MASTER_BYTES
        sent = wire * numel if is_copied else 0.0
        received = wire * self.width * numel * self.share
        return sent + received + MASTER_BYTES * owned * self.share

    def step_bytes(self, stage: int) -> float:
        """Temporaries of the optimizer's step on the device."""
        if self.book.group.offload != "none":
            return 0.0
        stepped = self.hosted[stage].params.owned
        share = self.share if self.book.group.zero_level else 1.0
        return self.book.setting.step_workspace_bytes * stepped * share


def moments_of(
    book: StageBook, gpu: GpuShare, limits: Sequence[int], interleaved: bool
) -> Iterator[Moment]:
    """The moments of a rank; `limits`: in-flight limit of each of its stages, in model order."""
    rank = RankBook(book, gpu)
    limit_of = dict(zip(rank.hosted, limits, strict=True))
    sweep = _Sweep(rank, gpu.micro_batches, interleaved)
    for visit, whole in zip(book.visits, _whole_by_visit(rank), strict=True):
        at = replace(rank.at_rest, parameters=rank.at_rest.parameters + whole)
        if gpu.micro_batches:
            yield from sweep.computing(at, visit, limit_of[visit.stage])
        if visit.backward:
            yield sweep.reducing(at, visit.stage)
    yield from sweep.stepping(rank.at_rest)


class _Sweep:
    """What changes from visit to visit: gradients and activations."""

    def __init__(self, rank: RankBook, sizes: Sequence[int], interleaved: bool) -> None:
        self.rank, self.sizes, self.interleaved = rank, sizes, interleaved
        self.samples, self.distinct = sum(sizes), set(sizes)
        self.waiting = 0.0
        """Activations of stages that have run forward and not backward."""
        self.gradients = rank.at_rest.gradients
        """Of all stages but the current one."""
        self.late: int | None = None
        """The stage before: a rank may go on while others of its group still run backward."""

    def computing(self, at: Moment, visit: Visit, limit: int) -> Iterator[Moment]:
        """The most within a visit while layers run, or while the stage before is reduced."""
        activations = self.rank.hosted[visit.stage].activations
        kept = activations.kept_per_sample
        if visit.forward and visit.backward:
            held = self.waiting + kept * samples_in_flight(self.sizes, limit)
        else:
            self.waiting += kept * self.samples if visit.forward else 0.0
            held = self.waiting
            self.waiting -= kept * self.samples if visit.backward else 0.0
        opened = self.rank.opened(visit.stage) if visit.backward else 0.0
        at = replace(at, gradients=self.gradients + opened, activations=held)
        if self.late is not None:
            at = replace(at, gradients=at.gradients + self.rank.opened(self.late))
            yield replace(at, buffers=at.buffers + self.rank.reduction_bytes(self.late))
        sizes = self.distinct
        if self.rank.sums_often and limit == 1:
            # Alone in flight, the first micro-batch does not find its own sums there yet.
            first, *later = self.sizes
            yield replace(at, activations=kept * first, workspace=self._most(visit, {first}))
            sizes = set(later)
            at = replace(at, activations=kept * max(later, default=0))
        at = replace(at, gradients=at.gradients + self.rank.summed(visit.stage))
        if self.rank.sums_often:
            plain = max((self.rank.forward_bytes(visit.stage, each) for each in sizes), default=0.0)
            yield replace(at, workspace=plain + self.rank.after_pass_bytes)
        yield replace(at, workspace=self._most(visit, sizes))

    def _most(self, visit: Visit, sizes: set[int]) -> float:
        """A small micro-batch may add more: it finds fewer bytes freed by later layers."""
        return max((self.rank.backward_bytes(visit.stage, size) for size in sizes), default=0.0)

    def reducing(self, at: Moment, stage: int) -> Moment:
        """The reduction of a stage: its gradients whole and, in part, as a shard."""
        opened = self.rank.opened(stage)
        buffers = at.buffers + self.rank.reduction_bytes(stage)
        gradients = self.gradients + opened + self.rank.summed(stage)
        self.late = stage if self.rank.width > 1 else None
        self.gradients += 0.0 if self.interleaved else self.rank.reduced(stage)
        return replace(at, gradients=gradients, activations=self.waiting, buffers=buffers)

    def stepping(self, at: Moment) -> Iterator[Moment]:
        """The optimizer's steps."""
        for stage in self.rank.hosted:
            gradients = self.gradients
            gradients += self.rank.reduced(stage) if self.interleaved else 0.0
            yield replace(at, gradients=gradients, workspace=self.rank.step_bytes(stage))


def samples_in_flight(sizes: Sequence[int], limit: int) -> int:
    """The most samples in `limit` micro-batches in a row."""
    most = held = sum(sizes[:limit])
    for arriving, leaving in zip(sizes[limit:], sizes, strict=False):
        held += arriving - leaving
        most = max(most, held)
    return most


def _whole_by_visit(rank: RankBook) -> list[float]:
    """Gathered parameters at each visit: of its stage and the one that is gathered meanwhile."""
    book = rank.book
    whole = [0.0] * len(book.visits)
    for i, stay in enumerate(book.stays):
        following = book.stays[i + 1].stage if i + 1 < len(book.stays) else None
        ahead = 0.0 if following is None else rank.hosted[following].state.gathered
        for visit in range(stay.first_visit, stay.last_visit + 1):
            whole[visit] = rank.hosted[stay.stage].state.gathered + ahead
    return whole
