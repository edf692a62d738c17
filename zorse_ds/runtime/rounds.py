"""Sums of gradients after every micro-batch, beside its backward pass (ZeRO level 2).

A rank never holds more gradients than those of a few layers and its own shard of their sum: those
of a bucket travel as soon as backward has made the last of them. What travels is as autograd made
it, and is summed in the master's dtype, so 16 bits on the wire cost no precision.
"""

from collections import deque
from collections.abc import Callable, Sequence

import torch
from torch.nn import Parameter

from zorse_ds.runtime.bucket import Bucket
from zorse_ds.runtime.process_groups import Reducing


class Rounds:
    """The rounds of one stage on one rank: one for each micro-batch of the rank that has most.

    `buckets`: in the order of the model. They travel from the last to the first, on every rank, so
    all ranks come to the same sums in the same order, however far each of them is.
    """

    def __init__(self, buckets: Sequence[Bucket]) -> None:
        self._buckets = tuple(reversed(buckets))
        self._missing = [0] * len(self._buckets)
        """Gradients that each bucket still waits for."""
        self._next = len(self._buckets)
        """The bucket that travels next; behind the last one no round is open."""
        self._under_way: deque[tuple[Bucket, Reducing]] = deque()
        self._count = 0
        for at, bucket in enumerate(self._buckets):
            for index, parameter in enumerate(bucket.flat.parameters):
                parameter.register_post_accumulate_grad_hook(self._taker(at, index))

    def begin(self) -> None:
        """A new step."""
        assert not self._under_way, "the last step closed its rounds"
        self._count = 0

    def open(self) -> None:
        """Before a micro-batch's backward. Collective where the round before is not through."""
        self._close()
        self._count += 1
        self._next = 0
        self._missing = [len(bucket.flat.parameters) for bucket in self._buckets]

    def end(self, num_rounds: int) -> None:
        """Collective: close the last round; who had fewer micro-batches adds zeros."""
        while self._count < num_rounds:
            self.open()
        self._close()

    def _close(self) -> None:
        """Collective: what backward left out travels as zeros, and everything arrives."""
        while self._next < len(self._buckets):
            self._start()
        self._finish(leave=0)

    def _taker(self, at: int, index: int) -> Callable[[Parameter], None]:
        def take(parameter: Parameter) -> None:
            """Called by autograd when it has made a gradient."""
            if self._next > at or parameter.grad is None:
                return
            bucket = self._buckets[at]
            if bucket.flat.grad is None:
                self._finish(leave=1)
                _make_room(bucket)
            bucket.flat.grad_of(index).copy_(parameter.grad)
            parameter.grad = None
            self._missing[at] -= 1
            while self._next < len(self._buckets) and not self._missing[self._next]:
                self._start()

        return take

    def _start(self) -> None:
        """The next bucket travels."""
        bucket = self._buckets[self._next]
        self._next += 1
        if bucket.flat.grad is None:
            _make_room(bucket)
        self._under_way.append((bucket, bucket.start_reduce()))

    def _finish(self, leave: int) -> None:
        """Wait for the oldest, until so many are left: they bound what a rank holds."""
        while len(self._under_way) > leave:
            bucket, reducing = self._under_way.popleft()
            bucket.finish_reduce(reducing)


def _make_room(bucket: Bucket) -> None:
    """For one micro-batch's gradients, in the dtype in which autograd makes them."""
    bucket.flat.grad = torch.zeros_like(bucket.flat.data)
