"""The transport of a rank in a `torch.distributed` world.

Headers go through a gloo group that spans the world, payloads through the channel of their edge.
One thread posts receives in program order, a few ahead of the program, so that messages travel
while the rank computes; another holds what was sent until it has left.
"""

import queue
import threading
from collections.abc import Callable, Sequence

from torch import Tensor

from zorse_ds.errors import TransportError
from zorse_ds.runtime.channels import Arriving, Channel, GlooChannel, Sending
from zorse_ds.runtime.failures import reason_of, wires
from zorse_ds.runtime.transport import Receive
from zorse_ds.runtime.values import Message
from zorse_ds.runtime.wire import (
    HEADER_BYTES,
    decode_header,
    encode_header,
    fill,
    header_frames,
    missing_header_bytes,
    payload_bytes,
    payload_of,
)

RECEIVES_AHEAD = 2
"""Receives that may be under way beyond the one the program has reached; each holds a buffer."""
_PARTS = 3


class DistTransport:
    """See `Transport`.

    `channel_of(boundary, peer, tag)` names the channel of a payload; both ends must agree.
    """

    def __init__(
        self,
        rank: int,
        control: GlooChannel,
        channel_of: Callable[[int, int, int], Channel],
        timeout_s: float,
    ) -> None:
        self._rank = rank
        self._control = control
        self._channel_of = channel_of
        self._timeout_s = timeout_s
        self._permits = threading.Semaphore(0)
        self._inbox = _Inbox()
        self._wanted: queue.SimpleQueue[Receive | None] = queue.SimpleQueue()
        self._leaving: queue.SimpleQueue[Sending | threading.Event | None] = queue.SimpleQueue()
        self._expected: dict[int, Receive] = {}
        self._threads = [
            threading.Thread(target=target, name=f"zorse-{name}", daemon=True)
            for name, target in (("receive", self._receive_all), ("send", self._see_off_all))
        ]
        for thread in self._threads:
            thread.start()

    def begin(self, receives: Sequence[Receive]) -> None:
        """See `Transport.begin`."""
        self._permits = threading.Semaphore(RECEIVES_AHEAD)
        self._expected = {receive.tag: receive for receive in receives}
        for receive in receives:
            self._wanted.put(receive)

    def reached(self) -> None:
        """See `Transport.reached`."""
        self._permits.release()

    def send(self, boundary: int, peer: int, tag: int, message: Message) -> None:
        """See `Transport.send`."""
        frame, rest = header_frames(encode_header(message))
        payload = payload_of(message)
        with wires(self._rank, "send a message", [peer]):
            self._leaving.put(self._control.isend(frame, peer, _PARTS * tag))
            if rest is not None:
                self._leaving.put(self._control.isend(rest, peer, _PARTS * tag + 1))
            if payload is not None:
                channel = self._channel_of(boundary, peer, tag)
                self._leaving.put(channel.isend(payload, peer, _PARTS * tag + 2))

    def take(self, tag: int) -> Message:
        """See `Transport.take`."""
        receive = self._expected.pop(tag)
        try:
            message, arriving = self._inbox.take(tag, self._timeout_s)
            return fill(message, arriving.wait() if arriving is not None else None)
        except (RuntimeError, TimeoutError) as error:
            raise TransportError(
                f"rank {self._rank} waited in vain for {receive.text}, which rank {receive.peer} "
                f"did not deliver ({reason_of(error)}); expected it alive"
            ) from error

    def end(self) -> None:
        """See `Transport.end`."""
        assert not self._expected, f"messages never taken: {list(self._expected.values())}"
        drained = threading.Event()
        self._leaving.put(drained)
        try:
            if not drained.wait(self._timeout_s):
                raise TimeoutError("they have not left")
            self._inbox.raise_failure()
        except (RuntimeError, TimeoutError) as error:
            raise TransportError(
                f"rank {self._rank} could not deliver all its messages within "
                f"{self._timeout_s:g} s ({reason_of(error)}); expected the receiving ranks alive"
            ) from error

    def close(self) -> None:
        """End the threads; call once nothing is under way."""
        self._wanted.put(None)
        self._leaving.put(None)
        for thread in self._threads:
            thread.join(timeout=1.0)

    def _receive_all(self) -> None:
        while (receive := self._wanted.get()) is not None:
            self._permits.acquire()
            try:
                self._inbox.put(receive.tag, self._announced(receive))
            except RuntimeError as error:
                self._inbox.fail(RuntimeError(f"rank {receive.peer}: {reason_of(error)}"))
                return

    def _announced(self, receive: Receive) -> tuple[Message, Arriving | None]:
        """Wait for the header and post the payload's receive."""
        frame = self._control.irecv(HEADER_BYTES, receive.peer, _PARTS * receive.tag).wait()
        rest: Tensor | None = None
        missing = missing_header_bytes(frame)
        if missing:
            rest = self._control.irecv(missing, receive.peer, _PARTS * receive.tag + 1).wait()
        message = decode_header(frame, rest)
        size = payload_bytes(message)
        if not size:
            return message, None
        channel = self._channel_of(receive.boundary, receive.peer, receive.tag)
        return message, channel.irecv(size, receive.peer, _PARTS * receive.tag + 2)

    def _see_off_all(self) -> None:
        while (item := self._leaving.get()) is not None:
            if isinstance(item, threading.Event):
                item.set()
                continue
            try:
                item.wait()
            except RuntimeError as error:
                self._inbox.fail(error)


class _Inbox:
    """Announced messages by tag, handed from the receiving thread to the program."""

    def __init__(self) -> None:
        self._items: dict[int, tuple[Message, Arriving | None]] = {}
        self._changed = threading.Condition()
        self._failure: RuntimeError | None = None

    def put(self, tag: int, item: tuple[Message, Arriving | None]) -> None:
        with self._changed:
            self._items[tag] = item
            self._changed.notify_all()

    def fail(self, error: RuntimeError) -> None:
        with self._changed:
            self._failure = self._failure or error
            self._changed.notify_all()

    def take(self, tag: int, timeout_s: float) -> tuple[Message, Arriving | None]:
        with self._changed:
            self._changed.wait_for(lambda: tag in self._items or self._failure, timeout_s)
            if tag in self._items:
                return self._items.pop(tag)
        self.raise_failure()
        raise TimeoutError(f"nothing arrived within zorse.timeout_s, {timeout_s:g} s")

    def raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure


def all_gloo(control: GlooChannel) -> Callable[[int, int, int], Channel]:
    """Every payload through host memory, as on CPU."""
    return lambda boundary, peer, tag: control


def edge_channels(
    edges: dict[tuple[int, bool], Channel], staged: Channel, is_staged: Callable[[int], bool]
) -> Callable[[int, int, int], Channel]:
    """One channel per directed stage edge `(boundary, forward)`; staged where `is_staged`."""

    def channel_of(boundary: int, peer: int, tag: int) -> Channel:
        return staged if is_staged(boundary) else edges[boundary, tag % 2 == 0]

    return channel_of
