"""Replay of a trace in which every send, receive and collective blocks until its partners come."""

from collections import defaultdict

from zorse_ds.errors import ScheduleError
from zorse_ds.schedule.instructions import (
    CollectiveInstruction,
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


def check_rendezvous(trace: Trace) -> None:
    """Replay the programs; all must end, and the check is linear. Raises `ScheduleError`."""
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
            meets = type(other) is wanted and getattr(other, "transfer", None) == transfer
            return sorted(ends) if meets else []
        if isinstance(instruction, CollectiveInstruction):
            key = _collective(instruction)
            self.arrived[key].add(instruction.rank)
            # Taken out when complete, so that a second round of the same collective waits anew.
            return sorted(self.arrived.pop(key)) if self.arrived[key] == self.members[key] else []
        return [instruction.rank]


def _collective(instruction: CollectiveInstruction) -> tuple[str, int]:
    return type(instruction).__name__, instruction.index
