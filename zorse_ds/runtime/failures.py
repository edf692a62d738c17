"""Failures of the wires, told as what was being done and with whom."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from zorse_ds.errors import TransportError


@contextmanager
def wires(rank: int, doing: str, peers: Sequence[int]) -> Iterator[None]:
    """Inside are calls of `torch.distributed` alone; what they raise becomes `TransportError`."""
    try:
        yield
    except RuntimeError as error:
        others = ", ".join(str(peer) for peer in peers if peer != rank)
        raise TransportError(
            f"rank {rank} could not {doing} with rank {others} ({reason_of(error)}); expected "
            "every one of them alive and at the same point"
        ) from error


def reason_of(error: BaseException) -> str:
    """The cause in few words, without the place in somebody else's source."""
    line = str(error).split("\n")[0].split("] ")[-1]
    return line.split(". This ")[0].split(". GLHF")[0].strip() or type(error).__name__
