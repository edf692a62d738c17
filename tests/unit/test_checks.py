"""The checks catch what they are for: each test breaks a good trace in one way."""

import random
from collections.abc import Callable
from dataclasses import replace

import pytest

from tests.random_plans import random_plan
from zorse_ds.errors import ScheduleError
from zorse_ds.schedule.checks import check_limits, check_trace
from zorse_ds.schedule.compile import compile_trace
from zorse_ds.schedule.instructions import (
    KINDS,
    BackwardPass,
    BroadcastTiedParams,
    CountTargets,
    ForwardPass,
    Instruction,
    LoadMicroBatch,
    OptimizerStep,
    PrefetchParams,
    RecvActivation,
    RecvGrad,
    ReduceGradNorm,
    ReduceGrads,
    ReduceTiedGrads,
    ReshardParams,
    SendActivation,
    SendGrad,
    UnshardParams,
)
from zorse_ds.schedule.needs import Needs
from zorse_ds.schedule.rendezvous import check_rendezvous
from zorse_ds.schedule.trace import Trace

SEEDS = range(15)
COUNTED = [kind for kind in KINDS if kind not in (PrefetchParams, UnshardParams, ReshardParams)]
"""What a plan asks for once each; how often parameters come and go is another check's matter."""


def trace_of(seed: int) -> Trace:
    """A trace of at least two stages with a tie, so that it holds every kind of instruction."""
    while True:
        plan = random_plan(seed, num_layers=8, max_batch=8)
        if len(plan.stages) > 1:
            return compile_trace(plan, tied_layers=[(0, plan.num_layers - 1)])
        seed += 1000


def with_instructions(trace: Trace, instructions: list[Instruction]) -> Trace:
    return replace(trace, instructions=tuple(instructions))


def position_of(rng: random.Random, trace: Trace, kind: type[Instruction]) -> int:
    return rng.choice([i for i, each in enumerate(trace.instructions) if type(each) is kind])


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("kind", COUNTED, ids=lambda kind: kind.__name__)
def test_a_missing_instruction_is_found(kind: type[Instruction], seed: int) -> None:
    trace = trace_of(seed)
    instructions = list(trace.instructions)
    removed = instructions.pop(position_of(random.Random(seed), trace, kind))
    with pytest.raises(ScheduleError, match=f"^rank {removed.rank}: {kind.__name__}.* 0 times"):
        check_trace(with_instructions(trace, instructions))


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("kind", COUNTED, ids=lambda kind: kind.__name__)
def test_a_repeated_instruction_is_found(kind: type[Instruction], seed: int) -> None:
    trace = trace_of(seed)
    instructions = list(trace.instructions)
    at = position_of(random.Random(seed), trace, kind)
    instructions.insert(at, instructions[at])
    with pytest.raises(ScheduleError, match="2 times; expected once"):
        check_trace(with_instructions(trace, instructions))


@pytest.mark.parametrize("seed", SEEDS)
def test_a_foreign_instruction_is_found(seed: int) -> None:
    trace = trace_of(seed)
    foreign = ForwardPass(0, len(trace.plan.stages) + 1, 0)
    with pytest.raises(ScheduleError, match="not asked for by the plan"):
        check_trace(with_instructions(trace, [*trace.instructions, foreign]))


# What one rank must do first, and what then: every rule of the check has a line here.
PAIRS: list[tuple[type[Instruction], type[Instruction]]] = [
    (LoadMicroBatch, ForwardPass),
    (RecvActivation, ForwardPass),
    (ForwardPass, SendActivation),
    (ForwardPass, BackwardPass),
    (RecvGrad, BackwardPass),
    (CountTargets, BackwardPass),
    (BackwardPass, SendGrad),
    (BackwardPass, ReduceTiedGrads),
    (BackwardPass, ReduceGrads),
    (ReduceTiedGrads, ReduceGrads),
    (ReduceGrads, ReduceGradNorm),
    (ReduceGradNorm, OptimizerStep),
    (OptimizerStep, BroadcastTiedParams),
]


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(
    ("first", "second"), PAIRS, ids=[f"{a.__name__}-{b.__name__}" for a, b in PAIRS]
)
def test_a_swapped_order_is_found(
    first: type[Instruction], second: type[Instruction], seed: int
) -> None:
    trace = trace_of(seed)
    instructions = list(trace.instructions)
    needs = Needs(trace)
    swaps = [
        (instructions.index(needed), at)
        for at, instruction in enumerate(instructions)
        if type(instruction) is second
        for needed in needs.before(instruction)
        if type(needed) is first
    ]
    one, other = random.Random(seed).choice(swaps)
    instructions[one], instructions[other] = instructions[other], instructions[one]
    with pytest.raises(ScheduleError, match="stands before"):
        check_trace(with_instructions(trace, instructions))


def test_too_many_in_flight_are_found() -> None:
    trace = trace_of(1)
    key, limit = max(trace.limits.items(), key=lambda item: item[1])
    check_limits(trace)
    with pytest.raises(ScheduleError, match=f"rank {key[0]}: .* in flight; expected at most"):
        check_limits(replace(trace, limits={**trace.limits, key: limit - 1}))


def deadlocked(trace: Trace, change: Callable[[list[Instruction]], None]) -> None:
    instructions = list(trace.instructions)
    change(instructions)
    with pytest.raises(ScheduleError, match="deadlocks: rank"):
        check_rendezvous(with_instructions(trace, instructions))


@pytest.mark.parametrize("kind", [SendActivation, RecvActivation, SendGrad, RecvGrad])
@pytest.mark.parametrize("seed", SEEDS)
def test_a_message_with_one_end_deadlocks(kind: type[Instruction], seed: int) -> None:
    trace = trace_of(seed)
    at = position_of(random.Random(seed), trace, kind)
    deadlocked(trace, lambda instructions: instructions.__delitem__(at))


@pytest.mark.parametrize("seed", SEEDS)
def test_crossed_messages_deadlock(seed: int) -> None:
    """Two ranks that both send first wait for each other, though every buffer would be fine."""
    trace = trace_of(seed)
    instructions = list(trace.instructions)
    for i, first in enumerate(instructions):
        if not isinstance(first, SendActivation):
            continue
        pair = {first.transfer.source_rank, first.transfer.target_rank}
        for j in range(i + 2, len(instructions)):
            second = instructions[j]
            if isinstance(second, SendActivation | SendGrad) and pair == {
                second.transfer.source_rank,
                second.transfer.target_rank,
            }:
                # The receiver of the first takes the second exchange before it.
                moved = [k for k in (j, j + 1) if instructions[k].rank == instructions[i + 1].rank]
                instructions.insert(i + 1, instructions.pop(moved[0]))
                with pytest.raises(ScheduleError, match="deadlocks"):
                    check_rendezvous(with_instructions(trace, instructions))
                return
    pytest.fail("no two messages between one pair of ranks")


def test_collectives_in_another_order_on_one_rank_deadlock() -> None:
    trace = trace_of(2)
    rank = trace.plan.groups[0].ranks[0]

    def swap(instructions: list[Instruction]) -> None:
        own = [i for i, each in enumerate(instructions) if each.rank == rank]
        norm = next(i for i in own if type(instructions[i]) is ReduceGradNorm)
        tied = next(i for i in own if type(instructions[i]) is ReduceTiedGrads)
        instructions[norm], instructions[tied] = instructions[tied], instructions[norm]

    deadlocked(trace, swap)


def test_a_collective_of_two_rounds_waits_in_both() -> None:
    trace = trace_of(2)
    norm = [each for each in trace.instructions if type(each) is ReduceGradNorm]
    assert len(norm) > 1
    check_rendezvous(with_instructions(trace, norm + norm))
    with pytest.raises(ScheduleError, match=f"deadlocks: rank {norm[0].rank} at ReduceGradNorm"):
        check_rendezvous(with_instructions(trace, [*norm, norm[0]]))
