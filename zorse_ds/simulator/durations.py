"""How long everything in a plan's step takes when it is alone."""

from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from math import ceil, log2

from zorse_ds.core.layout import Layout
from zorse_ds.core.plan import Dtype, GpuGroup, Plan
from zorse_ds.cost.activations import activation_table
from zorse_ds.cost.collectives import NOTHING, Collective, gather, reduce_scatter
from zorse_ds.cost.compute import compute_times
from zorse_ds.cost.dtypes import DTYPE_BYTES, MASTER_BYTES, dtype_of
from zorse_ds.cost.network import network_of
from zorse_ds.cost.optimizer import lot_sum_s, opening_s, reduction_s, step_s
from zorse_ds.cost.rounds import Lot, lots_of
from zorse_ds.cost.setting import Setting
from zorse_ds.cost.state import StageParams, params_of, tied_trained
from zorse_ds.errors import PlanError
from zorse_ds.ranges import Range
from zorse_ds.schedule.trace import Tie


@dataclass(frozen=True, slots=True)
class StagePasses:
    """Seconds of one stage's micro-batches, by index."""

    forward_s: list[float]
    backward_s: list[float]


class Durations:
    """Seconds and bytes of one plan's parts in a setting. Raises `PlanError` if they do not fit."""

    def __init__(self, plan: Plan, layout: Layout, setting: Setting) -> None:
        check_fits(plan, setting)
        self.plan, self.layout, self.setting = plan, layout, setting
        self.network = network_of(setting)
        self.group_of: dict[int, GpuGroup] = {
            rank: group for group in plan.groups for rank in group.ranks
        }
        by_name = {group.name: group for group in plan.groups}
        self.groups = [by_name[stage.group] for stage in plan.stages]
        """Of each stage."""
        dtype_by_name = {group.name: dtype_of(group, setting) for group in plan.groups}
        self.dtypes: list[Dtype] = [dtype_by_name[stage.group] for stage in plan.stages]
        self.params: list[StageParams] = [
            params_of(setting.model, stage.layers) for stage in plan.stages
        ]

    def passes(self, stage: int) -> StagePasses:
        """Seconds of every micro-batch of a stage.

        In them are copies of offloaded activations, and in each rank's first backward the zeroing
        of its gradients.
        """
        times = compute_times(self.setting)
        layers, dtype = self.plan.stages[stage].layers, self.dtypes[stage]
        recomputed = self.plan.recomputed(stage)
        copied = self._copied_per_sample(stage)
        found: dict[tuple[int, int], tuple[float, float]] = {}
        forward, backward = [], []
        opened: set[int] = set()
        for each in self.layout.micro_batches[stage]:
            size = each.samples.stop - each.samples.start
            key = (each.rank, size)
            seconds = found.get(key)
            if seconds is None:
                gpu = self.setting.cluster.gpus[each.rank]
                sums = times.sums(gpu.type.name, dtype, size)
                copy_s = copied * size / gpu.host_bytes_per_s
                seconds = found[key] = (
                    sums.forward_s(layers) + copy_s,
                    sums.backward_s(layers, recomputed) + copy_s,
                )
            forward.append(seconds[0])
            backward.append(seconds[1])
            if each.rank not in opened and not self.lots(stage):
                opened.add(each.rank)
                kind = self.setting.cluster.gpus[each.rank].type
                backward[-1] += opening_s(kind, self.params[stage].trained)
        return StagePasses(forward, backward)

    @cached_property
    def bytes_per_sample(self) -> list[tuple[float, float]]:
        """Of each boundary: activations, gradients. The sender converts to the other's dtype."""
        table = activation_table(self.setting)
        sizes = []
        for boundary in range(len(self.plan.stages) - 1):
            layer = self.plan.stages[boundary].layers.stop - 1
            above, below = self.dtypes[boundary], self.dtypes[boundary + 1]
            sizes.append(
                (
                    table.boundary_per_sample(layer, below),
                    table.boundary_per_sample(layer, above),
                )
            )
        return sizes

    @cached_property
    def staged_boundaries(self) -> frozenset[int]:
        """Boundaries whose messages go through host memory."""
        ends = enumerate(pairwise(self.groups))
        return frozenset(
            boundary
            for boundary, pair in ends
            if any(group.transport == "staged" for group in pair)
        )

    def staged_s_per_byte(self, source: int, target: int) -> float:
        """Copies to and from host memory of a message that cannot go directly."""
        gpus = self.setting.cluster.gpus
        return 1 / gpus[source].host_bytes_per_s + 1 / gpus[target].host_bytes_per_s

    def unshard(self, stage: int) -> Collective:
        """Gather the parameters of a stage."""
        element = DTYPE_BYTES[self.dtypes[stage]]
        return self._gather(self.groups[stage], self.params[stage].held * element)

    def reduce(self, stage: int) -> Collective:
        """Sum a stage's gradients over its group; at level 0 everybody gets all of them.

        They travel in the group's dtype, and sums in float32.
        """
        group = self.groups[stage]
        numel = self.params[stage].owned
        sent = _shards(group, numel * DTYPE_BYTES[self.dtypes[stage]])
        scattered = reduce_scatter(self.network, group.ranks, sent)
        if group.zero_level:
            return scattered
        return scattered.followed_by(self._gather(group, numel * MASTER_BYTES))

    def lots(self, stage: int) -> tuple[Lot, ...]:
        """What travels together where each micro-batch's gradients are summed, else nothing."""
        often = self.groups[stage].reduce_after == "micro_batch"
        return lots_of(self.setting.model) if often else ()

    def sum_lot(self, stage: int, lot: Lot) -> Collective:
        """Sum the gradients of a lot over its stage's group."""
        group = self.groups[stage]
        sent = _shards(group, lot.numel * DTYPE_BYTES[self.dtypes[stage]])
        return reduce_scatter(self.network, group.ranks, sent)

    def sum_lot_s(self, rank: int, stage: int, lot: Lot) -> float:
        """What a rank's own memory adds to it."""
        group, kind = self.groups[stage], self.setting.cluster.gpus[rank].type
        share, width = _share(group, rank), len(group.gpus)
        return lot_sum_s(kind, self.dtypes[stage], lot.numel, share, width)

    def lot_ready_s(self, stage: int, micro_batch: int) -> list[float]:
        """When a backward pass has made the gradients of each lot, from its start."""
        own = self.layout.micro_batches[stage][micro_batch]
        name = self.setting.cluster.gpus[own.rank].type.name
        sums = compute_times(self.setting).sums(name, self.dtypes[stage], own.samples.size)
        recomputed, last = self.plan.recomputed(stage), self.plan.num_layers
        return [
            sums.backward_s(Range(lot.layers.start, last), recomputed) for lot in self.lots(stage)
        ]

    def reduce_s(self, rank: int, stage: int) -> float:
        """What a rank's own memory adds to the reduction: sums, norm, a copy to the host."""
        group = self.groups[stage]
        gpu = self.setting.cluster.gpus[rank]
        share = _share(group, rank)
        params = self.params[stage].owned
        seconds = reduction_s(gpu.type, self.dtypes[stage], params, share, len(group.gpus))
        if group.offload != "none":
            seconds += self._stepped(rank, stage) * MASTER_BYTES / gpu.host_bytes_per_s
        return seconds

    def step_s(self, rank: int, stage: int) -> float:
        """The optimizer's step of a rank's share of a stage, before anything is gathered."""
        group = self.groups[stage]
        gpu = self.setting.cluster.gpus[rank]
        stepped = self._stepped(rank, stage)
        on_host = group.offload != "none"
        seconds = step_s(self.setting, gpu.type, self.dtypes[stage], stepped, on_host)
        if on_host and group.zero_level < 3:
            seconds += stepped * MASTER_BYTES / gpu.host_bytes_per_s
        return seconds

    def publish(self, stage: int) -> Collective:
        """Gather stepped parameters, at levels 1 and 2."""
        group = self.groups[stage]
        if group.zero_level not in (1, 2):
            return NOTHING
        return self._gather(group, self.params[stage].owned * DTYPE_BYTES[self.dtypes[stage]])

    def prefetch_s(self, rank: int, stage: int) -> float:
        """Copy a rank's shard of a stage from host memory."""
        share = _share(self.groups[stage], rank)
        num_bytes = share * self.params[stage].held * DTYPE_BYTES[self.dtypes[stage]]
        return num_bytes / self.setting.cluster.gpus[rank].host_bytes_per_s

    def tied(self, tie: Tie, *, reduces: bool) -> Collective:
        """Gradients of a tie to its owner's ranks, or their new values to everybody."""
        owner = self.groups[tie.owner]
        numel = tied_trained(self.setting.model)
        element = MASTER_BYTES if reduces else DTYPE_BYTES[self.dtypes[tie.owner]]
        own = dict(zip(owner.ranks, _shards(owner, numel * element), strict=True))
        shards = [own.get(rank, 0.0) for rank in tie.ranks]
        kind = reduce_scatter if reduces else gather
        return kind(self.network, tie.ranks, shards)

    def agree_s(self, ranks: tuple[int, ...]) -> float:
        """Sum a few numbers: latency alone, there and back along a tree."""
        if len(ranks) < 2:
            return 0.0
        pairs = zip(ranks, (*ranks[1:], ranks[0]), strict=True)
        slowest = max(self.network.route(a, b).latency_s for a, b in pairs)
        return 2 * ceil(log2(len(ranks))) * slowest

    def _gather(self, group: GpuGroup, num_bytes: float) -> Collective:
        return gather(self.network, group.ranks, _shards(group, num_bytes))

    def _stepped(self, rank: int, stage: int) -> float:
        group = self.groups[stage]
        return self.params[stage].owned * (_share(group, rank) if group.zero_level else 1.0)

    def _copied_per_sample(self, stage: int) -> float:
        group = self.groups[stage]
        if group.offload != "params+activations":
            return 0.0
        recomputed = self.plan.recomputed(stage)
        layers = self.plan.stages[stage].layers
        table = activation_table(self.setting)
        return table.of(layers, self.dtypes[stage], recomputed, True).host_per_sample


def check_fits(plan: Plan, setting: Setting) -> None:
    """Raises `PlanError` when a plan names GPUs or layers that the setting does not have."""
    have = len(setting.cluster.gpus)
    if plan.world_size > have:
        raise PlanError(
            f"the plan has {plan.world_size} ranks, but the cluster has {have} GPUs; expected at "
            f"most {have} ranks"
        )
    if plan.num_layers != setting.model.num_layers:
        raise PlanError(
            f"stages[{len(plan.stages) - 1}].layers ends at {plan.num_layers}, but the model has "
            f"{setting.model.num_layers} pipeline layers; expected {setting.model.num_layers}"
        )


def _share(group: GpuGroup, rank: int) -> float:
    weights = {gpu.rank: gpu.shard_weight for gpu in group.gpus}
    return weights[rank] / sum(weights.values())


def _shards(group: GpuGroup, num_bytes: float) -> list[float]:
    whole = sum(gpu.shard_weight for gpu in group.gpus)
    return [num_bytes * gpu.shard_weight / whole for gpu in group.gpus]
