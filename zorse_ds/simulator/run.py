"""A step as discrete events: every rank runs its part, and waits where the engine waits.

What the engine does today, and so the simulator: sends return at once; a rank takes messages in
the order of its program, at most two before it has come to them; a pass waits for its messages and
for its stage to be whole; gathers of parameters and copies from the host run beside the passes; a
reduction, the agreement on the norm and the optimizer's step hold the rank until they end.
"""

import heapq
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

from zorse_ds.core.layout import Transfer
from zorse_ds.schedule import instructions as kinds
from zorse_ds.schedule.instructions import BackwardPass, ForwardPass, Instruction
from zorse_ds.simulator.durations import Durations
from zorse_ds.simulator.meetings import Meetings
from zorse_ds.simulator.rounds import SimulatedRounds
from zorse_ds.simulator.script import Part, Script
from zorse_ds.simulator.timeline import Span
from zorse_ds.simulator.wires import Wires

RECEIVES_AHEAD = 2
"""As in the engine's transport."""
Handler = Callable[[Any, float], bool]
"""Does an instruction at a time; true when the rank is held up until an event wakes it."""


class Passes:
    """Forward or backward passes of all stages: what each waits for, and how long it takes."""

    def __init__(self, seconds: Sequence[Sequence[float]]) -> None:
        self.seconds = seconds
        self.missing = [[0] * len(own) for own in seconds]
        """Messages whose arrival nobody knows yet."""
        self.ready_s = [[0.0] * len(own) for own in seconds]
        """When the last of the others arrives."""


class Receiver:
    """Where a rank is in the list of what it receives."""

    __slots__ = ("next", "order", "reached")

    def __init__(self, part: Part) -> None:
        self.order = part.receives
        self.next = 0
        self.reached = 0
        """Receives that its program has come to."""


class Run:
    """One step in time. Events are taken by time, ties by rank."""

    def __init__(self, script: Script, durations: Durations, record: bool) -> None:
        self.script, self.durations, self.record = script, durations, record
        self.wires = Wires(durations, record)
        self.spans: list[Span] = []
        """What each rank does itself."""
        self.messages: list[Span] = []
        """On their senders."""
        world = len(script.parts)
        self.busy_s = [0.0] * world
        """In forward and backward passes."""
        self.now_s = [0.0] * world
        """When each rank was woken last; at the end, when it ended."""
        passes = [durations.passes(stage) for stage in range(script.layout.num_stages)]
        self.forward = Passes([each.forward_s for each in passes])
        self.backward = Passes([each.backward_s for each in passes])
        self.receivers = [Receiver(part) for part in script.parts]
        self.sent: set[int] = set()
        self.waiting: list[Instruction | None] = [None] * world
        """The pass that a rank is held up at."""
        self.events: list[tuple[float, int]] = [(0.0, rank) for rank in range(world)]
        self.meetings = Meetings(script, durations, self.wires, self._wake, record)
        self.timers: list[Callable[[float], None]] = []
        """What happens at a time, whatever ranks do: events of numbers behind the ranks'."""
        self.rounds = {
            stage: SimulatedRounds(stage, durations, self.wires, self._at, self._know)
            for stage in range(script.layout.num_stages)
            if durations.lots(stage)
        }

    @property
    def background(self) -> list[Span]:
        """What runs beside the passes: messages, gathers of parameters, copies from the host."""
        return self.messages + self.meetings.background

    def run(self) -> None:
        """Advance until every part has ended."""
        self._expect()
        handlers = self._handlers
        position = [0] * len(self.script.parts)
        events, parts, now_s = self.events, self.script.parts, self.now_s
        while events:
            now, rank = heapq.heappop(events)
            if rank >= len(parts):
                self.timers[rank - len(parts)](now)
                continue
            now_s[rank] = now
            part = parts[rank]
            at, program = position[rank], part.program
            if at:
                self._send(part.sends[at - 1], type(program[at - 1]) is ForwardPass, now)
            held = False
            while not held and at < len(program):
                self._reach(rank, part.reached[at], now)
                instruction = program[at]
                at += 1
                held = handlers[type(instruction)](instruction, now)
            position[rank] = at
        left = [rank for rank, part in enumerate(parts) if position[rank] < len(part.program)]
        assert not left, f"ranks {left} never reached the end; a compiled step cannot deadlock"

    def _expect(self) -> None:
        """Count the messages that each pass waits for."""
        forward, backward = self.forward.missing, self.backward.missing
        for part in self.script.parts:
            for transfer, is_forward in part.receives:
                if is_forward:
                    forward[transfer.boundary + 1][transfer.target] += 1
                else:
                    backward[transfer.boundary][transfer.source] += 1

    @cached_property
    def _handlers(self) -> dict[type[Instruction], Handler]:
        return {
            ForwardPass: self._forward,
            BackwardPass: self._backward,
            kinds.PrefetchParams: self.meetings.prefetch,
            kinds.UnshardParams: self._unshard,
            kinds.CountTargets: self.meetings.agree,
            kinds.ReduceGradNorm: self.meetings.agree,
            kinds.ReduceTiedGrads: self.meetings.tied,
            kinds.ReduceGrads: self._reduce,
            kinds.OptimizerStep: self.meetings.step,
            kinds.BroadcastTiedParams: self.meetings.tied,
        }

    def _forward(self, at: Any, now: float) -> bool:
        return self._pass(at, self.forward, now)

    def _backward(self, at: Any, now: float) -> bool:
        return self._pass(at, self.backward, now)

    def _pass(self, at: Any, passes: Passes, now: float) -> bool:
        """Start a pass, or wait for what it needs. Always holds the rank."""
        rank, stage, micro_batch = at.rank, at.stage, at.micro_batch
        if passes.missing[stage][micro_batch]:
            self.waiting[rank] = at
            return True
        start = passes.ready_s[stage][micro_batch]
        if start < now:
            start = now
        if self.meetings.whole_s:
            whole = self.meetings.whole_s.get((rank, stage), 0.0)
            if whole is None:
                self.waiting[rank] = at
                return True
            start = max(start, whole)
        if stage in self.rounds and passes is self.backward:
            ready = self.rounds[stage].ready_s(rank)
            if ready is None:
                self.waiting[rank] = at
                return True
            start = max(start, ready)
            self.rounds[stage].begin(rank, start, micro_batch)
        seconds = passes.seconds[stage][micro_batch]
        self.busy_s[rank] += seconds
        heapq.heappush(self.events, (start + seconds, rank))
        if self.record:
            name = type(at).__name__
            self.spans.append(Span(rank, name, start, start + seconds, stage, micro_batch))
        return True

    def _retry(self, rank: int, now: float) -> None:
        """A rank may have got what it waits for."""
        at = self.waiting[rank]
        if at is not None:
            self.waiting[rank] = None
            self._handlers[type(at)](at, now)

    def _reduce(self, at: Any, now: float) -> bool:
        """A stage's gradients summed: all at once, or the rest of them."""
        if at.index not in self.rounds:
            return self.meetings.reduce(at, now)
        stop = self.rounds[at.index].end(at.rank, now)
        if stop is None:
            self.waiting[at.rank] = at
        else:
            self._wake(at.rank, "ReduceGrads", at.index, max(now, stop))
        return True

    def _at(self, when: float, what: Callable[[float], None]) -> None:
        self.timers.append(what)
        heapq.heappush(self.events, (when, len(self.script.parts) + len(self.timers) - 1))

    def _know(self, ranks: Sequence[int], now: float) -> None:
        """A round is through: who waits for it knows when."""
        for rank in ranks:
            self._retry(rank, now)

    def _wake(self, rank: int, name: str, stage: int, stop: float) -> None:
        heapq.heappush(self.events, (stop, rank))
        if self.record:
            self.spans.append(Span(rank, name, self.now_s[rank], stop, stage))

    def _unshard(self, at: Any, now: float) -> bool:
        for rank in self.meetings.unshard(at, now):
            self._retry(rank, now)
        return False

    def _send(self, transfers: Sequence[Transfer], forward: bool, now: float) -> None:
        for transfer in transfers:
            self.sent.add(2 * transfer.index + forward)
            receiver = transfer.target_rank if forward else transfer.source_rank
            self._take_messages(receiver, now)

    def _reach(self, rank: int, reached: int, now: float) -> None:
        """A program comes to receives one by one: each lets one more be under way."""
        receiver = self.receivers[rank]
        if reached > receiver.reached:
            receiver.reached = reached
            self._take_messages(rank, now)

    def _take_messages(self, rank: int, now: float) -> None:
        """Start the messages to a rank whose turn it is."""
        receiver = self.receivers[rank]
        order = receiver.order
        last = min(receiver.reached + RECEIVES_AHEAD, len(order))
        while receiver.next < last:
            transfer, is_forward = order[receiver.next]
            if 2 * transfer.index + is_forward not in self.sent:
                return
            receiver.next += 1
            start, arrival = self.wires.send(transfer, is_forward, now)
            if is_forward:
                passes, stage, micro_batch = self.forward, transfer.boundary + 1, transfer.target
            else:
                passes, stage, micro_batch = self.backward, transfer.boundary, transfer.source
            passes.missing[stage][micro_batch] -= 1
            ready_s = passes.ready_s[stage]
            if arrival > ready_s[micro_batch]:
                ready_s[micro_batch] = arrival
            if self.record:
                self._note_message(transfer, is_forward, start, arrival)
            if self.waiting[rank] is not None and not passes.missing[stage][micro_batch]:
                self._retry(rank, now)

    def _note_message(self, transfer: Transfer, forward: bool, start: float, stop: float) -> None:
        if forward:
            origin = (transfer.source_rank, "SendActivation")
            where = (transfer.boundary, transfer.source)
        else:
            origin = (transfer.target_rank, "SendGrad")
            where = (transfer.boundary + 1, transfer.target)
        self.messages.append(Span(*origin, start, stop, *where))
