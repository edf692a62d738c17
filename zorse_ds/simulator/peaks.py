"""What each rank of a trace holds along its program: the peak of this very order."""

from dataclasses import replace

from zorse_ds.core.plan import GpuShare
from zorse_ds.cost.memory import RankMemory, rank_memory
from zorse_ds.cost.moments import RankBook, StageBook
from zorse_ds.cost.setting import Setting
from zorse_ds.schedule.instructions import (
    BackwardPass,
    ForwardPass,
    Instruction,
    OptimizerStep,
    PrefetchParams,
    ReduceGrads,
    ReshardParams,
    TransferInstruction,
    UnshardParams,
)
from zorse_ds.schedule.trace import Trace


def peaks_of(trace: Trace, setting: Setting) -> dict[int, RankMemory]:
    """Peak bytes of every rank of a compiled step.

    `cost.memory.memory_of` bounds the same from the plan alone: it takes every visit to be as full
    as its limits allow. What a rank holds does not depend on seconds, for its program is fixed.
    """
    peaks: dict[int, RankMemory] = {}
    for group in trace.plan.groups:
        book = StageBook(trace.plan, group, setting)
        for gpu in group.gpus:
            walk = _Walk(trace, RankBook(book, gpu), gpu)
            for instruction in trace.project(gpu.rank):
                if not isinstance(instruction, TransferInstruction):
                    walk.do(instruction)
            host = walk.host_bytes
            peaks[gpu.rank] = rank_memory(walk.peak, host, gpu.rank, setting)
    return dict(sorted(peaks.items()))


class _Walk:
    """One rank on its way through its program."""

    def __init__(self, trace: Trace, rank: RankBook, gpu: GpuShare) -> None:
        self._micro_batches = trace.layout.micro_batches
        self._rank = rank
        self._open: set[int] = set()
        self._gathered: set[int] = set()
        self._parameters = rank.at_rest.parameters
        self._gradients = rank.at_rest.gradients
        self._under_way = 0.0
        """Gradients of the pass before that have not arrived."""
        self._kept = 0.0
        self._kept_on_host = self._most_on_host = 0.0
        sizes = set(gpu.micro_batches)
        both = [(stage, size) for stage in rank.hosted for size in sizes]
        self._forward_extra = {each: rank.forward_bytes(*each) for each in both}
        self._backward_extra = {each: rank.backward_bytes(*each) for each in both}
        self._top = -1.0
        self.peak = rank.at_rest

    @property
    def host_bytes(self) -> float:
        """The most in host memory."""
        state = sum(own.state.host for own in self._rank.hosted.values())
        return state + self._most_on_host

    def do(self, at: Instruction) -> None:
        """One instruction, and what it makes of the peak."""
        if type(at) is ForwardPass:
            self._forward(at)
        elif type(at) is BackwardPass:
            self._backward(at)
        else:
            self._other(at)

    def _forward(self, at: ForwardPass) -> None:
        size = self._size(at)
        self._keep(at.stage, size, 1)
        self._look(workspace=self._forward_extra[at.stage, size])

    def _backward(self, at: BackwardPass) -> None:
        size = self._size(at)
        is_first = at.stage not in self._open
        if is_first:
            self._open.add(at.stage)
            self._gradients += self._rank.opened(at.stage)
        self._under_way = 0.0
        self._look(workspace=self._backward_extra[at.stage, size])
        self._under_way = self._rank.after_pass_bytes
        if is_first:
            self._gradients += self._rank.summed(at.stage)
        self._keep(at.stage, size, -1)

    def _other(self, at: Instruction) -> None:
        match at:
            case PrefetchParams(_, stage) | UnshardParams(_, stage):
                if stage not in self._gathered:
                    self._gathered.add(stage)
                    self._parameters += self._rank.hosted[stage].state.gathered
            case ReshardParams(_, stage):
                self._gathered.discard(stage)
                self._parameters -= self._rank.hosted[stage].state.gathered
            case ReduceGrads(_, stage):
                opened = self._rank.opened(stage) + self._rank.summed(stage)
                self._under_way = 0.0
                self._gradients += 0.0 if stage in self._open else opened
                self._look(pieces=self._rank.reduction_bytes(stage))
                self._gradients += self._rank.reduced(stage) - opened
            case OptimizerStep(_, stage):
                self._look(workspace=self._rank.step_bytes(stage))
                self._gradients -= self._rank.reduced(stage)

    def _size(self, at: ForwardPass | BackwardPass) -> int:
        first, behind = self._micro_batches[at.stage][at.micro_batch].samples
        return behind - first

    def _keep(self, stage: int, size: int, sign: int) -> None:
        activations = self._rank.hosted[stage].activations
        self._kept += sign * size * activations.kept_per_sample
        self._kept_on_host += sign * size * activations.host_per_sample
        self._most_on_host = max(self._most_on_host, self._kept_on_host)

    def _look(self, workspace: float = 0.0, pieces: float = 0.0) -> None:
        gradients = self._gradients + self._under_way
        total = self._parameters + gradients + self._kept + workspace + pieces
        if total > self._top:
            self._top = total
            rest = self._rank.at_rest
            self.peak = replace(
                rest,
                parameters=self._parameters,
                gradients=gradients,
                activations=self._kept,
                buffers=rest.buffers + pieces,
                workspace=workspace,
            )
