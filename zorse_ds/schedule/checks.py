"""Proof by replay that a trace can be run: no deadlock, no missing input, nothing left over."""

from collections import defaultdict
from dataclasses import dataclass, field

from zorse_ds.errors import ScheduleError
from zorse_ds.schedule.instructions import (
    BackwardPass,
    CollectiveInstruction,
    ForwardPass,
    Instruction,
    RecvActivation,
    RecvGrad,
    SendActivation,
    SendGrad,
    TransferInstruction,
    describe,
)
from zorse_ds.schedule.trace import Trace

_PEER = {
    SendActivation: RecvActivation,
    RecvActivation: SendActivation,
    SendGrad: RecvGrad,
    RecvGrad: SendGrad,
}


def check_trace(trace: Trace) -> None:
    """Run every check. Raises `ScheduleError` that names rank and instruction. Linear."""
    check_rendezvous(trace)
    check_buffers(trace)


def check_rendezvous(trace: Trace) -> None:
    """Replay the programs with blocking sends, receives and collectives; all must end."""
    replay = _Rendezvous(trace)
    replay.run()
    stuck = {rank: at for rank, at in replay.position.items() if at < len(replay.programs[rank])}
    if stuck:
        waits = "; ".join(
            f"rank {rank} at {describe(replay.programs[rank][at])}" for rank, at in stuck.items()
        )
        raise ScheduleError(f"the trace deadlocks: {waits}; expected all ranks to reach the end")


class _Rendezvous:
    """Programs advanced one by one; who waits is woken by the partner it waits for."""

    def __init__(self, trace: Trace) -> None:
        self.programs = trace.programs
        self.position = dict.fromkeys(self.programs, 0)
        self.members: dict[tuple[str, int], set[int]] = defaultdict(set)
        self.arrived: dict[tuple[str, int], set[int]] = defaultdict(set)
        for instruction in trace.instructions:
            if isinstance(instruction, CollectiveInstruction):
                self.members[_collective(instruction)].add(instruction.rank)

    def run(self) -> None:
        """Advance until nobody can."""
        ready = sorted(self.programs)
        while ready:
            rank = ready.pop()
            while (instruction := self._current(rank)) is not None:
                partners = self._met(instruction)
                if not partners:
                    break
                for partner in partners:
                    self.position[partner] += 1
                ready.extend(partner for partner in partners if partner != rank)

    def _current(self, rank: int) -> Instruction | None:
        at = self.position[rank]
        return self.programs[rank][at] if at < len(self.programs[rank]) else None

    def _met(self, instruction: Instruction) -> list[int]:
        """All ranks that go on together, or none while somebody is not there yet."""
        if isinstance(instruction, TransferInstruction):
            transfer = instruction.transfer
            ends = {transfer.source_rank, transfer.target_rank}
            (peer,) = ends - {instruction.rank}
            other = self._current(peer)
            wanted = _PEER[type(instruction)]
            meets = type(other) is wanted and getattr(other, "transfer", None) is transfer
            return sorted(ends) if meets else []
        if isinstance(instruction, CollectiveInstruction):
            key = _collective(instruction)
            self.arrived[key].add(instruction.rank)
            return sorted(self.members[key]) if self.arrived[key] == self.members[key] else []
        return [instruction.rank]


def _collective(instruction: CollectiveInstruction) -> tuple[str, int]:
    return type(instruction).__name__, instruction.index


@dataclass(slots=True)
class _Buffers:
    """What one rank holds while the trace is replayed."""

    activations: set[int] = field(default_factory=set)
    grads: set[int] = field(default_factory=set)
    in_flight: set[tuple[int, int]] = field(default_factory=set)


def check_buffers(trace: Trace) -> None:
    """Every computation has its inputs, limits hold under 1f1b, and all buffers end empty."""
    buffers = {rank: _Buffers() for rank in trace.programs}
    trains = any(type(instruction) is BackwardPass for instruction in trace.instructions)
    for instruction in trace.instructions:
        held = buffers[instruction.rank]
        if isinstance(instruction, RecvActivation):
            held.activations.add(instruction.transfer.index)
        elif isinstance(instruction, RecvGrad):
            held.grads.add(instruction.transfer.index)
        elif isinstance(instruction, ForwardPass):
            _consume(held.activations, instruction, trace)
            if trains:
                held.in_flight.add((instruction.stage, instruction.micro_batch))
                _check_limit(held, instruction, trace)
        elif isinstance(instruction, BackwardPass):
            _consume(held.grads, instruction, trace)
            held.in_flight.remove((instruction.stage, instruction.micro_batch))
    for rank, held in buffers.items():
        left = len(held.activations) + len(held.grads) + len(held.in_flight)
        if left:
            raise ScheduleError(f"rank {rank} ends the step with {left} filled buffers; expected 0")


def _consume(held: set[int], instruction: ForwardPass | BackwardPass, trace: Trace) -> None:
    layout = trace.layout
    ends = layout.incoming if isinstance(instruction, ForwardPass) else layout.outgoing
    own = ends.get((instruction.stage, instruction.micro_batch), ())
    needed = {transfer.index for transfer in own if not transfer.is_local}
    if not needed <= held:
        raise ScheduleError(
            f"rank {instruction.rank} lacks {len(needed - held)} messages at "
            f"{describe(instruction)}; expected them received before"
        )
    held -= needed


def _check_limit(held: _Buffers, instruction: ForwardPass, trace: Trace) -> None:
    key = (instruction.rank, instruction.stage)
    count = sum(1 for stage, _ in held.in_flight if stage == instruction.stage)
    if count > trace.limits[key]:
        raise ScheduleError(
            f"rank {key[0]} holds {count} micro-batches of stage {key[1]} at "
            f"{describe(instruction)}; expected at most {trace.limits[key]}"
        )
