"""Bytes that each rank of a plan needs, from the plan alone: no trace is compiled.

A rank goes through its group's visits; in each it holds its state, the gradients that are open or
reduced, what its micro-batches in flight keep, and what the current pass adds. The peak is the
largest of these moments. Purposes are those of the engine's ledger (`runtime.ledger`).
"""

from collections.abc import Mapping
from dataclasses import dataclass

from zorse_ds.core.cluster import Cluster
from zorse_ds.core.gpus import GIB
from zorse_ds.core.layout import lay_out
from zorse_ds.core.plan import GpuGroup, GpuShare, Plan
from zorse_ds.cost.moments import Moment, StageBook, moments_of
from zorse_ds.cost.setting import Setting
from zorse_ds.schedule.compile import limits_of
from zorse_ds.schedule.inflight import InFlightLimits
from zorse_ds.schedule.visits import turning_tail


@dataclass(frozen=True, slots=True)
class RankMemory:
    """Bytes of one rank at the peak of a step, and what it has."""

    parameters: int
    """Whole ones, shards, and those gathered for the current and the next stage."""
    gradients: int
    optimizer: int
    """Masters and moments."""
    activations: int
    """Of micro-batches between their forward and the end of their backward."""
    buffers: int
    """Messages on their way, and pieces of a reduction."""
    workspace: int
    """Of the pass under way: temporaries, and what recompute makes anew."""
    reserve: int
    """`Setting.reserve_bytes`."""
    host_bytes: int
    """In host memory."""
    usable_bytes: int

    @property
    def total_bytes(self) -> int:
        """On the device."""
        return self.counted_bytes + self.reserve

    @property
    def counted_bytes(self) -> int:
        """On the device without the reserve: what the engine's ledger counts."""
        held = self.parameters + self.gradients + self.optimizer
        return held + self.activations + self.buffers + self.workspace

    @property
    def fits(self) -> bool:
        """It is not more than the device has."""
        return self.total_bytes <= self.usable_bytes

    @property
    def overflow_bytes(self) -> int:
        """What is missing on the device."""
        return max(0, self.total_bytes - self.usable_bytes)

    @property
    def overflow_share(self) -> float:
        """What is missing, as a part of what the device has."""
        return self.overflow_bytes / self.usable_bytes


def memory_of(
    plan: Plan,
    setting: Setting,
    limits: InFlightLimits | None = None,
    *,
    interleaved: bool = False,
) -> dict[int, RankMemory]:
    """Peak bytes of every rank, by rank.

    `limits`: in-flight limits where the caller has them. `interleaved`: stages step as soon as
    their backward ends, as in `compile_trace`.
    """
    if limits is None:
        limits = {}
        if turning_tail(plan, plan.schedule):
            limits = limits_of(plan, lay_out(plan))
    memory: dict[int, RankMemory] = {}
    for group in plan.groups:
        memory |= group_memory(plan, group, setting, limits, interleaved=interleaved)
    return dict(sorted(memory.items()))


def group_memory(
    plan: Plan,
    group: GpuGroup,
    setting: Setting,
    limits: InFlightLimits,
    *,
    interleaved: bool = False,
) -> dict[int, RankMemory]:
    """Peak bytes of the ranks of one group; of the plan only its stages and schedule matter.

    `limits` may lack stages at which all micro-batches wait.
    """
    memory: dict[int, RankMemory] = {}
    book = StageBook(plan, group, setting)
    peaks: dict[object, tuple[Moment, float]] = {}
    for gpu in group.gpus:
        every = len(gpu.micro_batches)
        own = tuple(limits.get((gpu.rank, stage), every) for stage in book.params)
        key = (gpu.micro_batches, gpu.shard_weight, own)
        if key not in peaks:
            peaks[key] = _peak(book, gpu, own, interleaved)
        memory[gpu.rank] = rank_memory(*peaks[key], gpu.rank, setting)
    return memory


def hosts_overflow(memory: Mapping[int, RankMemory], cluster: Cluster) -> dict[int, int]:
    """Nodes whose ranks together want more host memory than there is → bytes that are missing."""
    wanted: dict[int, int] = {}
    for rank, own in memory.items():
        node = cluster.gpus[rank].node
        wanted[node] = wanted.get(node, 0) + own.host_bytes
    known = {
        node: int(cluster.nodes[node].host_memory_gib * GIB)  # type: ignore[operator]
        for node in wanted
        if cluster.nodes[node].host_memory_gib is not None
    }
    return {node: wanted[node] - has for node, has in known.items() if wanted[node] > has}


def _peak(
    book: StageBook, gpu: GpuShare, limits: tuple[int, ...], interleaved: bool
) -> tuple[Moment, float]:
    """The peak moment, and the bytes in host memory."""
    peak = max(moments_of(book, gpu, limits, interleaved), key=lambda moment: moment.total)
    hosted = book.hosted(gpu)
    state = sum(each.state.host for each in hosted.values())
    saved = sum(each.activations.host_per_sample for each in hosted.values())
    return peak, state + saved * sum(gpu.micro_batches)


def rank_memory(peak: Moment, host: float, rank: int, setting: Setting) -> RankMemory:
    """The peak of a rank beside what it has."""
    return RankMemory(
        parameters=round(peak.parameters),
        gradients=round(peak.gradients),
        optimizer=round(peak.optimizer),
        activations=round(peak.activations),
        buffers=round(peak.buffers),
        workspace=round(peak.workspace),
        reserve=setting.reserve_bytes,
        host_bytes=round(host),
        usable_bytes=setting.cluster.gpus[rank].usable_bytes,
    )
