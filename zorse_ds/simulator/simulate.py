"""A plan's step in time: how long, how busy, what limits it, what it holds."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from zorse_ds.core.plan import Plan
from zorse_ds.cost.compute import best_samples_per_s
from zorse_ds.cost.dtypes import usable_dtype
from zorse_ds.cost.memory import RankMemory
from zorse_ds.cost.network import lane_name
from zorse_ds.cost.setting import Setting
from zorse_ds.schedule.garbage import collector_paused
from zorse_ds.schedule.trace import Trace
from zorse_ds.simulator.durations import Durations
from zorse_ds.simulator.peaks import peaks_of
from zorse_ds.simulator.run import Run
from zorse_ds.simulator.script import script_of_trace
from zorse_ds.simulator.timeline import Timeline
from zorse_ds.simulator.wires import LaneUse


@dataclass(frozen=True)
class Simulation:
    """What became of a step."""

    plan: Plan
    step_s: float
    tokens_per_s: float
    achieved_flops_per_s: float
    """Floating-point operations of the model (forward, and twice that for backward) a second;
    what recompute repeats does not count."""
    ceiling_share: float
    """Of `ceiling_samples_per_s` (0–1)."""
    busy_share: tuple[float, ...]
    """Per rank: the share of the step in which it runs forward or backward passes (0–1)."""
    lane_share: dict[str, float]
    """Lane of the network → share of the step in which something passes it, the most used first."""
    memory: dict[int, RankMemory]
    """Peaks along the programs."""
    timeline: Timeline
    """What ranks do themselves; empty unless recorded."""
    background: Timeline
    """Messages (on their senders), gathers of parameters and copies from host memory."""
    lane_uses: tuple[LaneUse, ...]
    lane_names: tuple[str, ...]
    """By the number that `lane_uses` names."""

    @property
    def bubble_share(self) -> float:
        """The share of all ranks' time in which they run no pass (0–1)."""
        return 1 - sum(self.busy_share) / len(self.busy_share)

    @property
    def limit(self) -> tuple[str, float]:
        """The most used resource and its share of the step: `rank 3`, or a lane's name."""
        rank = max(range(len(self.busy_share)), key=self.busy_share.__getitem__)
        shares = {f"rank {rank}": self.busy_share[rank], **self.lane_share}
        name = max(shares, key=shares.__getitem__)
        return name, shares[name]


def simulate(trace: Trace, setting: Setting, *, record: bool = True) -> Simulation:
    """Run a compiled step on the setting's cluster, as discrete events.

    Passes, messages, collectives and copies take the seconds of `zorse_ds.cost`; lanes of the
    network are shared: a message holds all lanes of its path, each for its bytes over the lane's
    bandwidth, first come first served, and arrives `latency + bytes / slowest bandwidth` after its
    start (cut-through). `zorse_ds.simulator.run` says what waits for what, as in the engine.
    `record=False` keeps no spans and is quicker. Raises `PlanError` if the plan does not fit the
    cluster or the model.
    """
    plan = trace.plan
    durations = Durations(plan, trace.layout, setting)
    with collector_paused():
        run = Run(script_of_trace(trace), durations, record)
        run.run()
        memory = peaks_of(trace, setting)
    step_s = max(run.now_s)
    samples_per_s = plan.global_batch_size / step_s
    return Simulation(
        plan=plan,
        step_s=step_s,
        tokens_per_s=samples_per_s * setting.seq_len,
        achieved_flops_per_s=samples_per_s * flops_per_sample(setting),
        ceiling_share=samples_per_s / ceiling_samples_per_s(setting),
        busy_share=tuple(busy / step_s for busy in run.busy_s),
        lane_share=_lane_shares(run, step_s),
        memory=memory,
        timeline=Timeline.joined([Timeline(tuple(run.spans))]),
        background=Timeline.joined([Timeline(tuple(run.background))]),
        lane_uses=tuple(run.wires.uses),
        lane_names=tuple(lane_name(lane.key) for lane in durations.network.lanes),
    )


@lru_cache(maxsize=8)
def ceiling_samples_per_s(setting: Setting) -> float:
    """What all GPUs would do if each ran the whole model alone: no communication, no bubble.

    Per GPU 1 / (2·forward + backward) of all layers (full recompute) at its best micro-batch size.
    """
    by_type = {gpu.type.name: gpu.type for gpu in setting.cluster.gpus}
    speed = {
        name: best_samples_per_s(setting, name, usable_dtype(setting.dtype, kind))
        for name, kind in by_type.items()
    }
    return sum(speed[gpu.type.name] for gpu in setting.cluster.gpus)


def flops_per_sample(setting: Setting) -> float:
    """Of one sample forward and backward."""
    return 3 * sum(shape.forward_flops(setting.seq_len) for shape in setting.model.shapes)


def _lane_shares(run: Run, step_s: float) -> dict[str, float]:
    lanes = run.durations.network.lanes
    busy: Sequence[float] = run.wires.busy_s
    used = sorted(range(len(busy)), key=lambda lane: -busy[lane])
    return {lane_name(lanes[lane].key): busy[lane] / step_s for lane in used if busy[lane]}
