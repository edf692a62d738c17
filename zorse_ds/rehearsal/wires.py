"""A rank's line to the exchange, which a thread of the first rank keeps for all of them."""

import secrets
import threading
from collections.abc import Hashable, Sequence
from multiprocessing.connection import Client, Connection, Listener, wait
from typing import Any

from zorse_ds.cost.collectives import Collective
from zorse_ds.cost.network import Network
from zorse_ds.errors import PeerError
from zorse_ds.rehearsal.exchange import Exchange, Moment
from zorse_ds.rehearsal.lanes import Lanes, Passage

Address = tuple[Any, bytes]
"""Where the exchange listens, and the key to it."""
DONE = "done"


class WireServer:
    """Serves an `Exchange` to ranks of this host, in a daemon thread that ends with them."""

    def __init__(self, network: Network, num_ranks: int) -> None:
        self._exchange = Exchange(Lanes(network), num_ranks, self._answer)
        self._num_ranks = num_ranks
        self._lines: dict[int, Connection] = {}
        key = secrets.token_bytes(16)
        self._listener = Listener(("127.0.0.1", 0), authkey=key, backlog=num_ranks)
        self.address: Address = (self._listener.address, key)
        threading.Thread(target=self._run, name="zorse-exchange", daemon=True).start()

    def _run(self) -> None:
        with self._listener:
            for _ in range(self._num_ranks):
                line = self._listener.accept()
                self._lines[line.recv()] = line
        open_lines = dict(self._lines)
        while open_lines:
            ready = wait(list(open_lines.values()))
            for rank, line in [item for item in open_lines.items() if item[1] in ready]:
                if not self._heard(line, rank):
                    del open_lines[rank]

    def _heard(self, line: Connection, rank: int) -> bool:
        """Do what a rank says; false when it is gone, and with it all it could have done."""
        try:
            name, arguments = line.recv()
        except (EOFError, OSError):
            self._exchange.finish(rank, 0.0)
            return False
        if name == "clear":
            self._exchange.clear()
        else:
            getattr(self._exchange, name)(rank, *arguments)
        if name in ("clear", "finish"):
            self._answer(rank, DONE)
        return True

    def _answer(self, rank: int, what: Any) -> None:
        try:
            self._lines[rank].send(what)
        except OSError:
            return  # It is gone; whoever waits for it will be told.


class WireClient:
    """One rank's line, used by one thread at a time. Moments are the rank's virtual seconds."""

    def __init__(self, address: Address, rank: int) -> None:
        self._rank = rank
        where, key = address
        self._line = Client(where, authkey=key)
        self._line.send(rank)
        self._numbers: dict[Hashable, int] = {}

    def clear(self) -> None:
        """A new step begins: said by one rank, while the others wait."""
        self._ask("clear")

    def finish(self, now_s: float) -> None:
        """The step is over for this rank."""
        self._ask("finish", now_s)

    def advance(self, now_s: float) -> None:
        """See `Exchange.advance`."""
        self._tell("advance", now_s)

    def expect(self, now_s: float, keys: Sequence[Hashable], ahead: int) -> None:
        """See `Exchange.expect`."""
        self._tell("expect", now_s, list(keys), ahead)

    def allow(self, now_s: float) -> None:
        """See `Exchange.allow`."""
        self._tell("allow", now_s)

    def send(
        self, now_s: float, target: int, key: Hashable, num_bytes: float, *, ordered: bool
    ) -> None:
        """See `Exchange.send`."""
        self._tell("send", now_s, target, key, num_bytes, ordered)

    def arrive(self, now_s: float, ranks: tuple[int, ...], price: Collective) -> Hashable:
        """Come to the next collective of these ranks; returns what `wait` takes."""
        key = (ranks, self.number_of(ranks))
        self._tell("arrive", now_s, key, price)
        return key

    def number_of(self, what: Hashable) -> int:
        """How often this was asked before: all ends of a thing count alike."""
        number = self._numbers[what] = self._numbers.get(what, -1) + 1
        return number

    def wait(self, now_s: float, key: Hashable, until: Moment = "stop") -> Passage:
        """Wait for a message or a collective. Raises `PeerError` if it can never come."""
        passage = self._ask("wait", now_s, key, until)
        if passage is None:
            raise PeerError(
                f"rank {self._rank} waits in vain for another virtual GPU; expected all of them "
                "alive and at the same step"
            )
        assert isinstance(passage, Passage), "what an exchange answers"
        return passage

    def _tell(self, name: str, *arguments: Any) -> None:
        try:
            self._line.send((name, arguments))
        except OSError as error:
            raise self._gone() from error

    def _ask(self, name: str, *arguments: Any) -> Any:
        self._tell(name, *arguments)
        try:
            return self._line.recv()
        except (EOFError, OSError) as error:
            raise self._gone() from error

    def _gone(self) -> PeerError:
        return PeerError(f"rank {self._rank} lost the first rank; expected it alive")
