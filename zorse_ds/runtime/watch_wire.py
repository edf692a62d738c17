"""Messages between the watches of a job: one JSON object a line over TCP.

The kernel tells of a process that died, whose sockets it closes, and of a host that is lost, which
leaves its probes unanswered; a process that is merely busy or stopped still answers them.
"""

import json
import select
import socket
import threading
from collections.abc import Iterable
from typing import Any, Protocol, TypeVar

PROBE_AFTER_S, PROBE_EVERY_S, NUM_PROBES = 4, 2, 3
"""A host that is lost is noticed after 4 + 2·3 seconds."""
MOST_BYTES = 1 << 20
"""Of a line."""


class _HasFile(Protocol):
    def fileno(self) -> int: ...


Readable = TypeVar("Readable", bound=_HasFile)


def ready(ends: Iterable[Readable], timeout_s: float) -> list[Readable]:
    """Those that have something to read, waiting for the first; any number of open files."""
    poll = select.poll()
    by_file = {end.fileno(): end for end in ends}
    for file in by_file:
        if file >= 0:
            poll.register(file, select.POLLIN)
    return [by_file[file] for file, _ in poll.poll(1000 * timeout_s)]


class Line:
    """One end of a connection."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self._rest = b""
        self._lock = threading.Lock()
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in (
            ("TCP_KEEPIDLE", PROBE_AFTER_S),
            ("TCP_KEEPINTVL", PROBE_EVERY_S),
            ("TCP_KEEPCNT", NUM_PROBES),
            ("TCP_USER_TIMEOUT", 1000 * (PROBE_AFTER_S + PROBE_EVERY_S * NUM_PROBES)),
        ):
            if hasattr(socket, name):
                connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)

    def fileno(self) -> int:
        """For `select`."""
        return self.connection.fileno()

    def send(self, message: dict[str, Any]) -> bool:
        """Any thread; False when the other end is gone."""
        data = json.dumps(message).encode() + b"\n"
        try:
            with self._lock:
                self.connection.sendall(data)
        except OSError:
            return False
        return True

    def receive(self) -> list[dict[str, Any]] | None:
        """What has arrived, once there is something; None when the other end is gone."""
        try:
            data = self.connection.recv(1 << 16)
        except OSError:
            return None
        if not data or len(self._rest) > MOST_BYTES:
            return None
        *lines, self._rest = (self._rest + data).split(b"\n")
        try:
            messages = [json.loads(line) for line in lines]
        except ValueError:
            return None
        return messages if all(isinstance(each, dict) for each in messages) else None

    def close(self) -> None:
        """Close the connection."""
        self.connection.close()
