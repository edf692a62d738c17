"""What each rank does in a step, with the messages beside its instructions rather than between."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from zorse_ds.core.layout import Layout, Transfer, TransfersByEnd, lay_out
from zorse_ds.core.plan import Plan
from zorse_ds.schedule.compile import limits_of
from zorse_ds.schedule.inflight import InFlightLimits
from zorse_ds.schedule.instructions import (
    BackwardPass,
    ForwardPass,
    Instruction,
    LoadMicroBatch,
    RecvActivation,
    RecvGrad,
    ReshardParams,
    SendActivation,
    SendGrad,
)
from zorse_ds.schedule.orders import Compute, compute_order
from zorse_ds.schedule.passes import (
    add_delayed_steps,
    add_interleaved_steps,
    add_reductions,
    add_target_count,
)
from zorse_ds.schedule.residency import add_residency
from zorse_ds.schedule.trace import Tie, Trace, ties_between_stages


class Part:
    """One rank's part of a step; the lists `program`, `sends` and `reached` go together."""

    __slots__ = ("program", "reached", "receives", "sends")

    def __init__(self) -> None:
        self.program: list[Instruction] = []
        """Without messages, and without what takes no time."""
        self.sends: list[Sequence[Transfer]] = []
        """What leaves right after each."""
        self.reached: list[int] = []
        """How many receives stand before each."""
        self.receives: list[tuple[Transfer, bool]] = []
        """What arrives, in the order of the program, and whether it is an activation."""

    def append(self, instruction: Instruction, sends: Sequence[Transfer]) -> None:
        """The next instruction."""
        self.program.append(instruction)
        self.sends.append(sends)
        self.reached.append(len(self.receives))


@dataclass(frozen=True, slots=True)
class Script:
    """A step for the simulator."""

    plan: Plan
    layout: Layout
    limits: InFlightLimits
    ties: tuple[Tie, ...]
    interleaved: bool
    parts: list[Part]
    """By rank."""


def script_of_trace(trace: Trace) -> Script:
    """The very instructions of a trace."""
    parts = [Part() for _ in range(trace.plan.world_size)]
    for instruction in trace.instructions:
        kind = type(instruction)
        part = parts[instruction.rank]
        if kind is SendActivation or kind is SendGrad:
            part.sends[-1].append(instruction.transfer)  # type: ignore[attr-defined]
        elif kind is RecvActivation or kind is RecvGrad:
            forward = kind is RecvActivation
            part.receives.append((instruction.transfer, forward))  # type: ignore[attr-defined]
        elif kind is not LoadMicroBatch and kind is not ReshardParams:
            part.append(instruction, [])
    return Script(trace.plan, trace.layout, trace.limits, trace.ties, trace.interleaved, parts)


Prepared = tuple[Layout, InFlightLimits]
"""A plan's layout and in-flight limits."""


def script_of_plan(
    plan: Plan,
    tied_layers: Iterable[Sequence[int]] = (),
    *,
    interleaved: bool = False,
    prepared: Prepared | None = None,
) -> Script:
    """What `script_of_trace(compile_trace(…))` gives, without making the messages' instructions."""
    if prepared is None:
        layout = lay_out(plan)
        prepared = layout, limits_of(plan, layout)
    layout, limits = prepared
    ties = ties_between_stages(plan, tied_layers)
    order = compute_order(plan, layout, limits, plan.schedule)
    trace: Iterable[Instruction] = _passes(order)
    trace = add_residency(trace, order, plan, plan.schedule)
    trace = add_target_count(trace, plan, interleaved)
    trace = add_reductions(trace, plan, layout, ties)
    add_steps = add_interleaved_steps if interleaved else add_delayed_steps
    trace = add_steps(trace, plan, ties)
    parts = [Part() for _ in range(plan.world_size)]
    _fill(parts, trace, _sent(layout.outgoing), _sent(layout.incoming))
    return Script(plan, layout, limits, ties, interleaved, parts)


def _passes(order: Iterable[Compute]) -> Iterator[Instruction]:
    for compute in order:
        kind = ForwardPass if compute.phase == "forward" else BackwardPass
        yield kind(compute.rank, compute.stage, compute.micro_batch)


def _sent(transfers: TransfersByEnd) -> TransfersByEnd:
    """Those that lead from one rank to another."""
    return {
        end: [each for each in own if each.source_rank != each.target_rank]
        for end, own in transfers.items()
    }


def _fill(
    parts: list[Part],
    trace: Iterable[Instruction],
    outgoing: TransfersByEnd,
    incoming: TransfersByEnd,
) -> None:
    for instruction in trace:
        kind = type(instruction)
        if kind is ForwardPass:
            end = (instruction.stage, instruction.micro_batch)  # type: ignore[attr-defined]
            sends = outgoing.get(end, ())
            parts[instruction.rank].append(instruction, sends)
            for transfer in sends:
                parts[transfer.target_rank].receives.append((transfer, True))
        elif kind is BackwardPass:
            end = (instruction.stage, instruction.micro_batch)  # type: ignore[attr-defined]
            sends = incoming.get(end, ())
            parts[instruction.rank].append(instruction, sends)
            for transfer in sends:
                parts[transfer.source_rank].receives.append((transfer, False))
        elif kind is not ReshardParams:
            parts[instruction.rank].append(instruction, ())
