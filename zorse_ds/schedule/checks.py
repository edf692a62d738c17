"""Proof by replay that a trace can be run: complete, in order, within limits, without deadlock."""

from collections import Counter

from zorse_ds.errors import ScheduleError
from zorse_ds.schedule.instructions import (
    BackwardPass,
    ForwardPass,
    Instruction,
    PrefetchParams,
    ReshardParams,
    UnshardParams,
    describe,
)
from zorse_ds.schedule.needs import Needs
from zorse_ds.schedule.rendezvous import check_rendezvous
from zorse_ds.schedule.residency import GATHERED_LEVEL
from zorse_ds.schedule.trace import Trace


def check_trace(trace: Trace) -> None:
    """Run every check. Raises `ScheduleError` that names rank and instruction. Linear."""
    needs = Needs(trace)
    check_complete(trace, needs)
    check_order(trace, needs)
    check_limits(trace)
    check_residency(trace)
    check_rendezvous(trace)


_RESIDENCY = (PrefetchParams, UnshardParams, ReshardParams)
MOST_RESIDENT = 2
"""Stages whose full parameters a rank may hold at once: the current and the next."""


def check_complete(trace: Trace, needs: Needs) -> None:
    """Every instruction that the plan asks for is there once, and no other."""
    trains = any(type(instruction) is BackwardPass for instruction in trace.instructions)
    found = Counter(each for each in trace.instructions if not isinstance(each, _RESIDENCY))
    for wanted in needs.everything(trains):
        if found[wanted] != 1:
            raise ScheduleError(f"{_named(wanted)} stands {found[wanted]} times; expected once")
        del found[wanted]
    for foreign in found:
        raise ScheduleError(f"{_named(foreign)} is not asked for by the plan; expected it absent")


def check_order(trace: Trace, needs: Needs) -> None:
    """Every instruction finds what it needs done before it on its rank."""
    done: set[Instruction] = set()
    for instruction in trace.instructions:
        for needed in needs.before(instruction):
            if needed not in done:
                raise ScheduleError(
                    f"{_named(instruction)} stands before {describe(needed)}; expected it behind"
                )
        done.add(instruction)


def check_limits(trace: Trace) -> None:
    """No rank holds more micro-batches of a stage between forward and backward than its limit."""
    if not any(type(instruction) is BackwardPass for instruction in trace.instructions):
        return
    held: Counter[tuple[int, int]] = Counter()
    for instruction in trace.instructions:
        if isinstance(instruction, ForwardPass):
            key = (instruction.rank, instruction.stage)
            held[key] += 1
            if held[key] > trace.limits[key]:
                raise ScheduleError(
                    f"{_named(instruction)} makes {held[key]} micro-batches in flight; expected at "
                    f"most {trace.limits[key]}"
                )
        elif isinstance(instruction, BackwardPass):
            held[instruction.rank, instruction.stage] -= 1


def check_residency(trace: Trace) -> None:
    """Sharded stages are whole when they run, at most two at a time, and dropped at the end."""
    sharded = {
        (rank, stage)
        for stage in range(len(trace.plan.stages))
        if trace.plan.group_of_stage(stage).zero_level >= GATHERED_LEVEL
        for rank in trace.plan.group_of_stage(stage).ranks
    }
    fetched: set[tuple[int, int]] = set()
    whole: dict[int, list[int]] = {rank: [] for rank in range(trace.plan.world_size)}
    for instruction in trace.instructions:
        own = whole[instruction.rank]
        match instruction:
            case PrefetchParams(rank, stage):
                own.append(stage)
                fetched.add((rank, stage))
                wrong = (rank, stage) not in sharded or _too_many(own)
            case UnshardParams(rank, stage):
                if (rank, stage) not in fetched:
                    own.append(stage)
                fetched.discard((rank, stage))
                wrong = (rank, stage) not in sharded or _too_many(own)
            case ReshardParams(_, stage):
                wrong = stage not in own
                own[:] = [each for each in own if each != stage]
            case ForwardPass(rank, stage, _) | BackwardPass(rank, stage, _):
                wrong = (rank, stage) in sharded and stage not in own
            case _:
                wrong = False
        if wrong:
            raise ScheduleError(
                f"{_named(instruction)} finds the parameters of stages {own} whole; expected its "
                f"own stage among at most {MOST_RESIDENT}, each gathered once"
            )
    left = {rank: own for rank, own in whole.items() if own}
    if left:
        raise ScheduleError(
            f"full parameters are left at the end of the step: {left}; expected none"
        )


def _too_many(whole: list[int]) -> bool:
    """A stage is there twice, or there are more than may be."""
    return len(set(whole)) < len(whole) or len(whole) > MOST_RESIDENT


def _named(instruction: Instruction) -> str:
    return f"rank {instruction.rank}: {describe(instruction)}"
