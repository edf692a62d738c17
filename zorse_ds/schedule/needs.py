"""What a trace must hold, and what must come before what on one rank: the rules of `checks`."""

from collections.abc import Iterator

from zorse_ds.core.layout import Transfer
from zorse_ds.schedule.instructions import (
    BackwardPass,
    BroadcastTiedParams,
    CountTargets,
    ForwardPass,
    Instruction,
    LoadMicroBatch,
    OptimizerStep,
    RecvActivation,
    RecvGrad,
    ReduceGradNorm,
    ReduceGrads,
    ReduceTiedGrads,
    SendActivation,
    SendGrad,
)
from zorse_ds.schedule.trace import Trace


class Needs:
    """The instructions that plan, layout and ties of a trace ask for, whatever their order."""

    def __init__(self, trace: Trace) -> None:
        self.plan = trace.plan
        self.layout = trace.layout
        self.ties = trace.ties
        self.interleaved = trace.interleaved
        self.last_stage = len(trace.plan.stages) - 1
        self.backwards: dict[tuple[int, int], list[Instruction]] = {}
        for stage, micro_batches in enumerate(self.layout.micro_batches):
            for each in micro_batches:
                own = self.backwards.setdefault((each.rank, stage), [])
                own.append(BackwardPass(each.rank, stage, each.index))

    def everything(self, trains: bool) -> Iterator[Instruction]:
        """All instructions of a step, each once; without backward and update unless it trains."""
        for stage, micro_batches in enumerate(self.layout.micro_batches):
            for each in micro_batches:
                if stage in (0, self.last_stage):
                    yield LoadMicroBatch(each.rank, stage, each.index)
                yield ForwardPass(each.rank, stage, each.index)
        for transfer in self._sent():
            yield SendActivation(transfer.source_rank, transfer)
            yield RecvActivation(transfer.target_rank, transfer)
        if trains:
            yield from self._backward()
            yield from self._update()

    def before(self, instruction: Instruction) -> Iterator[Instruction]:
        """What the same rank must have done before `instruction`."""
        match instruction:
            case ForwardPass(rank, stage, micro_batch):
                yield from self._before_forward(rank, stage, micro_batch)
            case BackwardPass(rank, stage, micro_batch):
                yield from self._before_backward(rank, stage, micro_batch)
            case SendActivation(rank, transfer):
                yield ForwardPass(rank, transfer.boundary, transfer.source)
            case SendGrad(rank, transfer):
                yield BackwardPass(rank, transfer.boundary + 1, transfer.target)
            case ReduceTiedGrads(rank, index):
                for stage in next(tie.stages for tie in self.ties if tie.index == index):
                    yield from self.backwards.get((rank, stage), ())
            case ReduceGrads(rank, stage):
                yield from self.backwards.get((rank, stage), ())
                yield from (ReduceTiedGrads(rank, t.index) for t in self.ties if t.owner == stage)
            case ReduceGradNorm(rank, _):
                yield from (ReduceGrads(rank, stage) for stage in self.plan.stages_of_rank(rank))
            case OptimizerStep(rank, stage):
                yield ReduceGrads(rank, stage) if self.interleaved else ReduceGradNorm(rank, 0)
            case BroadcastTiedParams(rank, index):
                owner = next(tie.owner for tie in self.ties if tie.index == index)
                if rank in self.plan.group_of_stage(owner).ranks:
                    yield OptimizerStep(rank, owner)

    def _before_forward(self, rank: int, stage: int, micro_batch: int) -> Iterator[Instruction]:
        if stage in (0, self.last_stage):
            yield LoadMicroBatch(rank, stage, micro_batch)
        for transfer in self.layout.incoming.get((stage, micro_batch), ()):
            if transfer.is_local:
                yield ForwardPass(rank, stage - 1, transfer.source)
            else:
                yield RecvActivation(rank, transfer)

    def _before_backward(self, rank: int, stage: int, micro_batch: int) -> Iterator[Instruction]:
        yield ForwardPass(rank, stage, micro_batch)
        if stage == self.last_stage:
            yield CountTargets(rank, stage)
        for transfer in self.layout.outgoing.get((stage, micro_batch), ()):
            if transfer.is_local:
                yield BackwardPass(rank, stage + 1, transfer.target)
            else:
                yield RecvGrad(rank, transfer)

    def _sent(self) -> Iterator[Transfer]:
        for boundary in self.layout.transfers:
            yield from (transfer for transfer in boundary if not transfer.is_local)

    def _backward(self) -> Iterator[Instruction]:
        for own in self.backwards.values():
            yield from own
        for transfer in self._sent():
            yield SendGrad(transfer.target_rank, transfer)
            yield RecvGrad(transfer.source_rank, transfer)

    def _update(self) -> Iterator[Instruction]:
        everybody = range(self.plan.world_size)
        counting = (
            everybody if self.interleaved else self.plan.group_of_stage(self.last_stage).ranks
        )
        yield from (CountTargets(rank, self.last_stage) for rank in counting)
        for stage in range(self.last_stage + 1):
            for rank in self.plan.group_of_stage(stage).ranks:
                yield ReduceGrads(rank, stage)
                yield OptimizerStep(rank, stage)
        for tie in self.ties:
            for rank in tie.ranks:
                yield ReduceTiedGrads(rank, tie.index)
                yield BroadcastTiedParams(rank, tie.index)
        yield from (ReduceGradNorm(rank, 0) for rank in everybody)
