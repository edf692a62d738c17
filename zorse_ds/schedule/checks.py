"""Proof by replay that a trace can be run: complete, in order, within limits, without deadlock."""

from collections import Counter

from zorse_ds.errors import ScheduleError
from zorse_ds.schedule.instructions import BackwardPass, ForwardPass, Instruction, describe
from zorse_ds.schedule.needs import Needs
from zorse_ds.schedule.rendezvous import check_rendezvous
from zorse_ds.schedule.trace import Trace


def check_trace(trace: Trace) -> None:
    """Run every check. Raises `ScheduleError` that names rank and instruction. Linear."""
    needs = Needs(trace)
    check_complete(trace, needs)
    check_order(trace, needs)
    check_limits(trace)
    check_rendezvous(trace)


def check_complete(trace: Trace, needs: Needs) -> None:
    """Every instruction that the plan asks for is there once, and no other."""
    trains = any(type(instruction) is BackwardPass for instruction in trace.instructions)
    found = Counter(trace.instructions)
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


def _named(instruction: Instruction) -> str:
    return f"rank {instruction.rank}: {describe(instruction)}"
