"""From a compute order to a whole trace: each pass adds one kind of instruction."""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

from zorse_ds.core.layout import Layout, Transfer, TransfersByEnd
from zorse_ds.core.plan import Plan
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
    ReshardParams,
    SendActivation,
    SendGrad,
)
from zorse_ds.schedule.orders import Compute
from zorse_ds.schedule.trace import Tie


def add_target_count(
    trace: Iterable[Instruction], plan: Plan, interleaved: bool
) -> Iterator[Instruction]:
    """Know the divisor of the loss before the first backward.

    The last stage's group needs it. Where stages step before the step's end, everybody does: a step
    without targets must change nothing.
    """
    last = len(plan.stages) - 1
    ranks = range(plan.world_size) if interleaved else plan.group_of_stage(last).ranks
    yield from (CountTargets(rank, last) for rank in ranks)
    yield from trace


def add_loads_and_transfers(order: Iterable[Compute], layout: Layout) -> Iterator[Instruction]:
    """Load before the first and the last stage's forward; hand on right after each computation."""
    ends = (0, layout.num_stages - 1)
    for compute in order:
        key = (compute.stage, compute.micro_batch)
        if compute.phase == "forward":
            if compute.stage in ends:
                yield LoadMicroBatch(compute.rank, *key)
            yield ForwardPass(compute.rank, *key)
            for transfer in _sent(layout.outgoing, key):
                yield SendActivation(transfer.source_rank, transfer)
                yield RecvActivation(transfer.target_rank, transfer)
        else:
            yield BackwardPass(compute.rank, *key)
            for transfer in _sent(layout.incoming, key):
                yield SendGrad(transfer.target_rank, transfer)
                yield RecvGrad(transfer.source_rank, transfer)


def _sent(transfers: TransfersByEnd, end: tuple[int, int]) -> Iterator[Transfer]:
    return (transfer for transfer in transfers.get(end, ()) if not transfer.is_local)


def add_reductions(
    trace: Iterable[Instruction], plan: Plan, layout: Layout, ties: Sequence[Tie]
) -> Iterator[Instruction]:
    """Reduce a stage's gradients once a step, as soon as the last backward of its group ended.

    A tie is reduced before the stage that owns it. What the backward hands on goes first, for a
    stage above waits for it, and so does the drop of what the stage needs no more.
    """
    left = Counter({i: len(micro_batches) for i, micro_batches in enumerate(layout.micro_batches)})
    open_ties = {tie.index: set(tie.stages) for tie in ties}
    owned = {stage: [t for t in ties if t.owner == stage] for stage in range(layout.num_stages)}
    due: list[Instruction] = []
    for instruction in trace:
        if not isinstance(instruction, ReshardParams | SendGrad | RecvGrad):
            yield from due
            due.clear()
        yield instruction
        if not isinstance(instruction, BackwardPass):
            continue
        stage = instruction.stage
        left[stage] -= 1
        if left[stage] == 0:
            due += _close_ties(stage, ties, open_ties)
            if not any(open_ties[tie.index] for tie in owned[stage]):
                due += _on_group(ReduceGrads, plan, stage)
    yield from due


def _close_ties(
    stage: int, ties: Sequence[Tie], open_ties: dict[int, set[int]]
) -> Iterator[Instruction]:
    for tie in ties:
        if stage in open_ties[tie.index]:
            open_ties[tie.index].discard(stage)
            if not open_ties[tie.index]:
                yield from (ReduceTiedGrads(rank, tie.index) for rank in tie.ranks)


def add_delayed_steps(
    trace: Iterable[Instruction], plan: Plan, ties: Sequence[Tie]
) -> Iterator[Instruction]:
    """Agree on norm and validity over the world, step every stage, refresh the tied copies."""
    yield from trace
    yield from (ReduceGradNorm(rank, 0) for rank in range(plan.world_size))
    for stage in range(len(plan.stages)):
        yield from _step(plan, stage, ties)


def add_interleaved_steps(
    trace: Iterable[Instruction], plan: Plan, ties: Sequence[Tie]
) -> Iterator[Instruction]:
    """Step each stage as soon as its gradients are reduced (Zorse §3), and agree at the end."""
    left = {i: len(plan.group_of_stage(i).ranks) for i in range(len(plan.stages))}
    for instruction in trace:
        yield instruction
        if isinstance(instruction, ReduceGrads):
            left[instruction.index] -= 1
            if not left[instruction.index]:
                yield from _step(plan, instruction.index, ties)
    yield from (ReduceGradNorm(rank, 0) for rank in range(plan.world_size))


def _step(plan: Plan, stage: int, ties: Sequence[Tie]) -> Iterator[Instruction]:
    yield from _on_group(OptimizerStep, plan, stage)
    for tie in ties:
        if tie.owner == stage:
            yield from (BroadcastTiedParams(rank, tie.index) for rank in tie.ranks)


def _on_group(
    kind: type[ReduceGrads] | type[OptimizerStep], plan: Plan, stage: int
) -> Iterator[Instruction]:
    return (kind(rank, stage) for rank in plan.group_of_stage(stage).ranks)
