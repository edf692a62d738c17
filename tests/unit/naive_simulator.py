"""The same step by brute force: look through all ranks for the earliest next instruction.

Written anew from the rules, over the trace's own list of instructions and the cluster's paths; only
seconds of passes and of the optimizer come from outside. Quadratic, for small plans.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from math import ceil, inf, log2
from typing import Any

from zorse_ds.core.cluster import Cluster
from zorse_ds.schedule import instructions as kinds
from zorse_ds.schedule.trace import Trace

AHEAD = 2


class NaiveRun:
    """Seconds of a float32 step. `pass_s(kind, stage, size)`, `update_s(kind, rank, stage)`."""

    def __init__(
        self,
        trace: Trace,
        cluster: Cluster,
        sample_bytes: float,
        stage_bytes: list[float],
        pass_s: Callable[[str, int, int], float],
        update_s: Callable[[str, int, int], float],
    ) -> None:
        self.trace, self.cluster = trace, cluster
        self.sample_bytes, self.stage_bytes = sample_bytes, stage_bytes
        self.pass_s, self.update_s = pass_s, update_s
        self.programs = {rank: list(program) for rank, program in trace.programs.items()}
        self.clock = dict.fromkeys(self.programs, 0.0)
        self.free: dict[Any, float] = defaultdict(float)
        self.sent: set[Any] = set()
        self.opened: set[Any] = set()
        self.arrived: dict[Any, float] = {}
        self.receives: dict[int, list[Any]] = defaultdict(list)
        self.reached: dict[int, int] = defaultdict(int)
        self.taken: dict[int, int] = defaultdict(int)
        self.come: dict[Any, dict[int, float]] = defaultdict(dict)
        self.whole: dict[Any, float] = {}
        self.loaded: dict[Any, float] = {}
        self.copying: dict[int, float] = defaultdict(float)
        for at in trace.instructions:
            if isinstance(at, kinds.RecvActivation | kinds.RecvGrad):
                self.receives[at.rank].append((at.transfer, isinstance(at, kinds.RecvActivation)))

    def run(self) -> float:
        """When the last rank ends."""
        while True:
            able = [
                (self.clock[rank], rank)
                for rank, program in self.programs.items()
                if program and self._may_go(program[0])
            ]
            if not able:
                break
            now, rank = min(able)
            self._do(self.programs[rank].pop(0), now)
        assert not any(self.programs.values())
        return max(self.clock.values())

    def _needs(self, at: Any) -> list[Any]:
        forward = isinstance(at, kinds.ForwardPass)
        ends = self.trace.layout.incoming if forward else self.trace.layout.outgoing
        transfers = ends.get((at.stage, at.micro_batch), [])
        return [(each.index, forward) for each in transfers if not each.is_local]

    def _may_go(self, at: Any) -> bool:
        if isinstance(at, kinds.ForwardPass | kinds.BackwardPass):
            is_whole = self.whole.get((at.rank, at.stage), 0.0) < inf
            return is_whole and all(need in self.arrived for need in self._needs(at))
        return self.clock[at.rank] < inf

    def _do(self, at: Any, now: float) -> None:
        match at:
            case kinds.ForwardPass(rank, stage, micro_batch) | kinds.BackwardPass(
                rank, stage, micro_batch
            ):
                size = self.trace.layout.micro_batches[stage][micro_batch].samples.size
                arrivals = [self.arrived[need] for need in self._needs(at)]
                start = max([now, self.whole.get((rank, stage), 0.0), *arrivals])
                self.clock[rank] = start + self.pass_s(type(at).__name__, stage, size)
                if isinstance(at, kinds.BackwardPass) and (rank, stage) not in self.opened:
                    self.opened.add((rank, stage))
                    self.clock[rank] += self.update_s("open", rank, stage)
            case kinds.SendActivation(_, transfer) | kinds.SendGrad(_, transfer):
                forward = isinstance(at, kinds.SendActivation)
                self.sent.add((transfer.index, forward))
                self._take(transfer.target_rank if forward else transfer.source_rank, now)
            case kinds.RecvActivation(rank, _) | kinds.RecvGrad(rank, _):
                self.reached[rank] += 1
                self._take(rank, now)
            case kinds.PrefetchParams(rank, stage):
                start = max(now, self.copying[rank])
                self.copying[rank] = start + self.update_s("Prefetch", rank, stage)
                self.loaded[rank, stage] = self.copying[rank]
            case kinds.UnshardParams(rank, stage):
                self.whole[rank, stage] = inf
                self._meet(at, max(now, self.loaded.pop((rank, stage), 0.0)))
            case kinds.OptimizerStep(rank, stage):
                self._step(at, now + self.update_s("OptimizerStep", rank, stage))
            case kinds.CollectiveInstruction():
                self.clock[at.rank] = inf
                self._meet(at, now)

    def _take(self, rank: int, now: float) -> None:
        while self.taken[rank] < min(len(self.receives[rank]), self.reached[rank] + AHEAD):
            transfer, forward = self.receives[rank][self.taken[rank]]
            if (transfer.index, forward) not in self.sent:
                return
            self.taken[rank] += 1
            ends = (transfer.source_rank, transfer.target_rank)
            path = self.cluster.path(*(ends if forward else ends[::-1]))
            num_bytes = transfer.samples.size * self.sample_bytes
            start = max([now, *(self.free[lane.key] for lane in path.lanes)])
            for lane in path.lanes:
                self.free[lane.key] = start + num_bytes / lane.bytes_per_s
            arrival = start + path.latency_s + num_bytes / path.bytes_per_s
            self.arrived[transfer.index, forward] = arrival

    def _step(self, at: Any, ready: float) -> None:
        group = self.trace.plan.group_of_stage(at.index)
        if self.trace.interleaved:
            ready += self._agreement_s(group.ranks)
        gathers = group.zero_level in (1, 2) and len(group.gpus) > 1
        self.clock[at.rank] = inf if gathers else ready
        if gathers:
            self._meet(at, ready)

    def _meet(self, at: Any, ready: float) -> None:
        ranks = self._members(at)
        come = self.come[type(at), at.index]
        come[at.rank] = ready
        if len(come) < len(ranks):
            return
        start = max(come.values())
        del self.come[type(at), at.index]
        match at:
            case kinds.CountTargets() | kinds.ReduceGradNorm():
                stops = dict.fromkeys(ranks, start + self._agreement_s(ranks))
            case kinds.ReduceGrads(_, stage):
                both = self.trace.plan.group_of_stage(stage).zero_level == 0
                stop = self._ring(ranks, stage, start, reduces=True, gathers=both)
                stops = {r: stop + self.update_s("ReduceGrads", r, stage) for r in ranks}
            case _:
                stop = self._ring(ranks, at.index, start, reduces=False, gathers=True)
                stops = dict.fromkeys(ranks, stop)
        if isinstance(at, kinds.UnshardParams):
            self.whole |= {(rank, at.index): stop for rank, stop in stops.items()}
        else:
            self.clock |= stops

    def _members(self, at: Any) -> tuple[int, ...]:
        everybody = tuple(self.programs)
        if isinstance(at, kinds.ReduceGradNorm):
            return everybody
        if isinstance(at, kinds.CountTargets) and self.trace.interleaved:
            return everybody
        return self.trace.plan.group_of_stage(at.index).ranks

    def _agreement_s(self, ranks: tuple[int, ...]) -> float:
        if len(ranks) == 1:
            return 0.0
        around = zip(ranks, ranks[1:] + ranks[:1], strict=True)
        return 2 * ceil(log2(len(ranks))) * max(self.cluster.path(*ab).latency_s for ab in around)

    def _ring(
        self, ranks: tuple[int, ...], stage: int, ready: float, *, reduces: bool, gathers: bool
    ) -> float:
        """Around the ring each member hands on everything but one shard."""
        group = self.trace.plan.group_of_stage(stage)
        whole = self.stage_bytes[stage]
        weights = [gpu.shard_weight for gpu in group.gpus]
        shards = [whole * weight / sum(weights) for weight in weights]
        taken: dict[Any, float] = defaultdict(float)
        latency = 0.0
        for i, rank in enumerate(ranks):
            following = (i + 1) % len(ranks)
            if following == i:
                return ready
            path = self.cluster.path(rank, ranks[following])
            load = (whole - shards[i]) * reduces + (whole - shards[following]) * gathers
            latency = max(latency, path.latency_s * (len(ranks) - 1) * (reduces + gathers))
            for lane in path.lanes:
                taken[lane.key] += load / lane.bytes_per_s
        ends = [self.free[lane] for lane in taken]
        start = max([ready, self.free["group", ranks], *ends])
        for lane, seconds in taken.items():
            self.free[lane] = start + seconds
        stop = start + latency + max(taken.values())
        self.free["group", ranks] = stop
        return stop
