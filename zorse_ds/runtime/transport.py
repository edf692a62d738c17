"""Messages between two ranks: what the `Worker` asks of a wire."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from zorse_ds.core.layout import Transfer
from zorse_ds.runtime.values import Message
from zorse_ds.schedule.instructions import (
    Instruction,
    RecvActivation,
    RecvGrad,
    SendActivation,
    TransferInstruction,
    describe,
)


@dataclass(frozen=True, slots=True)
class Receive:
    """A message to come."""

    boundary: int
    peer: int
    tag: int
    instruction: TransferInstruction

    @property
    def text(self) -> str:
        """What is received, for messages to people."""
        return describe(self.instruction)


def is_forward(instruction: TransferInstruction) -> bool:
    """Activations travel forward, gradients backward."""
    return isinstance(instruction, SendActivation | RecvActivation)


def tag_of(transfer: Transfer, forward: bool) -> int:
    """A number no other message of a step has."""
    return 2 * transfer.index + (0 if forward else 1)


def receives_of(program: Sequence[Instruction]) -> list[Receive]:
    """The messages that a program receives, in its order."""
    receives = []
    for instruction in program:
        if isinstance(instruction, RecvActivation | RecvGrad):
            transfer, forward = instruction.transfer, is_forward(instruction)
            peer = transfer.source_rank if forward else transfer.target_rank
            tag = tag_of(transfer, forward)
            receives.append(Receive(transfer.boundary, peer, tag, instruction))
    return receives


class Transport(Protocol):
    """The wires of one rank. Nothing blocks but `take` and `end`."""

    def begin(self, receives: Sequence[Receive]) -> None:
        """Start a step in which these messages will come, in this order."""

    def reached(self) -> None:
        """The program reached its next receive: one more may be under way."""

    def send(self, boundary: int, peer: int, tag: int, message: Message) -> None:
        """Start to send; the message is kept until it has left."""

    def take(self, tag: int) -> Message:
        """Wait for a message. Raises `TransportError` when it does not come in time."""

    def end(self) -> None:
        """Wait until everything sent has left; nothing may be left to take."""
