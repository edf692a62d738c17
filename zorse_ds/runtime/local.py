"""All ranks in one process: one thread a rank, mailboxes for messages, barriers for collectives.

The same `Worker` runs here and on a cluster; nothing is imitated but the wires.
"""

import threading
from collections.abc import Callable, Hashable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from zorse_ds.core.shards import ShardLayout
from zorse_ds.runtime.process_groups import (
    Arrived,
    Contributions,
    Gathering,
    ReduceOp,
    Reducing,
)
from zorse_ds.runtime.transport import Receive
from zorse_ds.runtime.values import Message

T = TypeVar("T")
TIMEOUT_S = 60.0


class LocalProcessGroup:
    """Collectives between threads: everybody shows a tensor, everybody computes from all."""

    def __init__(self, rank: int, ranks: Sequence[int], board: "_Board") -> None:
        self.rank = rank
        self.ranks = tuple(ranks)
        self._board = board

    def all_reduce(self, tensor: Tensor, op: ReduceOp = "sum") -> None:
        """See `ProcessGroup.all_reduce`."""
        shown = torch.stack(
            [other.clone() for other in self._board.show(self.rank, tensor.clone())]
        )
        tensor.copy_(shown.sum(0) if op == "sum" else shown.amax(0))

    def start_gather(self, flat: Tensor, layout: ShardLayout) -> Gathering:
        """See `ProcessGroup.start_gather`; threads meet at once."""
        own = flat[layout.of(self.rank).as_slice()].clone()
        for shard, other in zip(layout.shards, self._board.show(self.rank, own), strict=True):
            flat[shard.as_slice()] = other
        return Arrived()

    def reduce_shards(
        self, flat: Tensor, layout: ShardLayout, wire: torch.dtype | None = None
    ) -> Tensor:
        """See `ProcessGroup.reduce_shards`."""
        if len(self.ranks) == 1:
            return flat.clone()
        own = layout.of(self.rank).as_slice()
        sent = flat.clone() if wire is None else flat.to(wire, copy=True)
        parts = [other[own] for other in self._board.show(self.rank, sent)]
        total = parts[0].to(flat.dtype, copy=True)
        for part in parts[1:]:
            total += part
        return total

    def start_reduce(self, flat: Tensor, layout: ShardLayout, wire: torch.dtype) -> Reducing:
        """See `ProcessGroup.start_reduce`; threads meet at once."""
        own = layout.of(self.rank).as_slice()
        shown = self._board.show(self.rank, flat.to(wire, copy=True))
        return Contributions(self, torch.cat([other[own] for other in shown]))


class LocalExchange:
    """What saving and loading need of the ranks: see `runtime.checkpoint.exchange.Exchange`."""

    def __init__(self, rank: int, size: int, board: "_Board") -> None:
        self.rank, self.size, self._board = rank, size, board

    def gather_objects(self, value: Any) -> list[Any]:
        """See `Exchange.gather_objects`."""
        return self._board.show(self.rank, value)


class _Board:
    """Where the members of one group show each other a tensor, or anything else."""

    def __init__(self, ranks: Sequence[int]) -> None:
        self._ranks = tuple(ranks)
        self._shown: dict[int, Any] = {}
        self.barrier = threading.Barrier(len(self._ranks))

    def show(self, rank: int, value: Any) -> list[Any]:
        """All members' values, in rank order."""
        self._shown[rank] = value
        self.barrier.wait(TIMEOUT_S)
        everybody = [self._shown[other] for other in self._ranks]
        self.barrier.wait(TIMEOUT_S)
        return everybody


class Mailboxes:
    """Messages between all ranks of a `LocalWorld`."""

    def __init__(self) -> None:
        self._messages: dict[tuple[int, int], Message] = {}
        self._changed = threading.Condition()
        self.closed = False

    def put(self, rank: int, tag: int, message: Message) -> None:
        """Leave a message for `rank`."""
        with self._changed:
            assert (rank, tag) not in self._messages, f"two messages for rank {rank} tag {tag}"
            self._messages[rank, tag] = message
            self._changed.notify_all()

    def take(self, rank: int, tag: int) -> Message:
        """Wait for the message and remove it."""
        with self._changed:
            self._changed.wait_for(lambda: self.closed or (rank, tag) in self._messages, TIMEOUT_S)
            return self._messages.pop((rank, tag))

    def close(self) -> None:
        """Wake everybody who waits, because a rank failed."""
        with self._changed:
            self.closed = True
            self._changed.notify_all()

    def __len__(self) -> int:
        return len(self._messages)


class MailboxTransport:
    """The `Transport` of one rank of a `LocalWorld`."""

    def __init__(self, rank: int, mailboxes: Mailboxes) -> None:
        self._rank = rank
        self._mailboxes = mailboxes

    def begin(self, receives: Sequence[Receive]) -> None:
        """Nothing to prepare: a mailbox is always open."""

    def reached(self) -> None:
        """Nothing to bound: messages are references."""

    def send(self, boundary: int, peer: int, tag: int, message: Message) -> None:
        """See `Transport.send`."""
        leaves = [leaf.clone() if isinstance(leaf, Tensor) else leaf for leaf in message.leaves]
        copy = Message(
            message.structure, leaves, message.per_sample, message.needs_grad, message.extent
        )
        self._mailboxes.put(peer, tag, copy)

    def take(self, tag: int) -> Message:
        """See `Transport.take`."""
        return self._mailboxes.take(self._rank, tag)

    def end(self) -> None:
        """Nothing to drain."""


class LocalWorld:
    """Ranks 0 to `size - 1` as threads of this process."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.mailboxes = Mailboxes()
        self._boards: dict[Hashable, _Board] = {}
        self._lock = threading.Lock()

    def transport(self, rank: int) -> MailboxTransport:
        """The transport of one rank."""
        return MailboxTransport(rank, self.mailboxes)

    def process_group(self, rank: int, ranks: Sequence[int]) -> LocalProcessGroup:
        """The view of `rank` on the group of `ranks`."""
        return LocalProcessGroup(rank, ranks, self._board(tuple(ranks), ranks))

    def exchange(self, rank: int) -> LocalExchange:
        """How `rank` exchanges objects with all; apart from collectives, so a thread may use it."""
        return LocalExchange(rank, self.size, self._board("exchange", range(self.size)))

    def run(self, function: Callable[[int], T]) -> list[T]:
        """Call `function(rank)` on every rank at once; results by rank.

        The first error of any rank ends all and is raised here.
        """
        results: list[Any] = [None] * self.size
        errors: list[BaseException] = []

        def target(rank: int) -> None:
            try:
                results[rank] = function(rank)
            except BaseException as error:
                errors.append(error)
                self._stop()

        threads = [threading.Thread(target=target, args=(rank,)) for rank in range(self.size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if errors:
            raise errors[0]
        return results

    def _board(self, key: Hashable, ranks: Sequence[int]) -> _Board:
        with self._lock:
            return self._boards.setdefault(key, _Board(ranks))

    def _stop(self) -> None:
        self.mailboxes.close()
        with self._lock:
            for board in self._boards.values():
                board.barrier.abort()
