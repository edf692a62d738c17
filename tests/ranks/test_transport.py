"""`DistTransport` between real processes: order, sizes, channels, overlap and failures."""

from __future__ import annotations

import os
import random
import threading
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.ranks.engine_cases import Case, make_engine
from tests.ranks.engine_models import Block, batches_of, plan_of, vectors
from tests.ranks.harness import RanksError, run_ranks
from zorse_ds.core.layout import Transfer
from zorse_ds.errors import TransportError
from zorse_ds.ranges import Range
from zorse_ds.runtime.channels import GlooChannel, StagedChannel
from zorse_ds.runtime.dist_transport import DistTransport, all_gloo
from zorse_ds.runtime.transport import Receive
from zorse_ds.runtime.values import Message, flatten
from zorse_ds.schedule.instructions import RecvActivation

CPU = torch.device("cpu")
CHANNELS = ("gloo", "staged")


def transport_of(rank: int, channel: str = "gloo", timeout_s: float = 20) -> DistTransport:
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    host = GlooChannel(dist.new_group(backend="gloo"), timeout_s)
    staged = StagedChannel(host, CPU)
    channels = {"gloo": all_gloo(host), "staged": lambda boundary, peer, tag: staged}
    return DistTransport(rank, host, channels[channel], timeout_s)


def message_of(value: Any, needs_grad: bool = False) -> Message:
    structure, leaves = flatten(value)
    return Message(structure, leaves, [True] * len(leaves), [needs_grad] * len(leaves), 5)


def receive_of(tag: int, peer: int) -> Receive:
    transfer = Transfer(tag, 0, 0, 0, peer, 0, Range(4, 6))
    return Receive(0, peer, tag, RecvActivation(0, transfer))


def numbers(tag: int, sender: int, size: int = 50) -> Tensor:
    return torch.arange(size, dtype=torch.float32) + 1000 * tag + 100_000 * sender


def take_all(transport: DistTransport, tags: list[int]) -> list[Any]:
    return [transport.take(tag).leaves[0] for tag in tags]


def shuffled(count: int, seed: int) -> list[int]:
    return random.Random(seed).sample(range(count), count)


def out_of_order(rank: int, channel: str) -> bool:
    """Three ranks exchange 40 messages with each other; nobody's order is another's."""
    transport = transport_of(rank, channel)
    peers = [peer for peer in range(3) if peer != rank]
    tags = {peer: [40 * peer + i for i in shuffled(40, 10 * rank + peer)] for peer in peers}
    wanted = [receive_of(tag, peer) for peer in peers for tag in tags[peer]]
    random.Random(rank).shuffle(wanted)
    transport.begin(wanted)
    for tag in shuffled(40, rank):
        for peer in peers:
            own = 40 * rank + tag
            transport.send(0, peer, own, message_of(numbers(own, rank)))
    for _ in wanted:
        transport.reached()
    right = True
    for receive in reversed(wanted):
        (found,) = take_all(transport, [receive.tag])
        right = right and torch.equal(found, numbers(receive.tag, receive.peer))
    transport.end()
    transport.close()
    return right


@pytest.mark.parametrize("channel", CHANNELS)
def test_messages_are_told_apart_in_any_order(channel: str) -> None:
    assert run_ranks(3, out_of_order, channel, timeout_s=60) == [True] * 3


def all_kinds(rank: int, channel: str) -> list[Any]:
    """Values of every kind, both ways at once, three steps in a row."""
    transport = transport_of(rank, channel)
    peer = 1 - rank
    for step in range(3):
        transport.begin([receive_of(tag, peer) for tag in range(len(values()))])
        for tag, value in enumerate(values()):
            transport.send(0, peer, tag, message_of(value, needs_grad=step == 1))
            transport.reached()
        messages = [transport.take(tag) for tag in range(len(values()))]
        transport.end()
        for message, value in zip(messages, values(), strict=True):
            structure, leaves = flatten(value)
            assert message.structure == structure
            assert message.extent == 5
            assert message.needs_grad == [step == 1] * len(leaves)
            for found, expected in zip(message.leaves, leaves, strict=True):
                assert_same(found, expected)
    transport.close()
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("zorse-")]


def values() -> list[Any]:
    generator = torch.Generator().manual_seed(9)
    large = torch.randn(2 * 1024 * 1024, generator=generator)  # 8 MB.
    many = {f"a leaf with a long name, number {i}": torch.full((i,), float(i)) for i in range(60)}
    return [
        large,
        torch.zeros(0, 3),
        (torch.zeros(0), torch.ones(2), torch.tensor(7)),
        many,
        ["text", None, 3, 2.5, True],
        torch.randn(6, 4, generator=generator).T,
        (torch.ones(3, dtype=torch.bfloat16), torch.tensor([True, False]), torch.arange(5)),
        large[:-1],
    ]


def assert_same(found: Any, expected: Any) -> None:
    if isinstance(expected, Tensor):
        assert found.dtype == expected.dtype
        assert torch.equal(found, expected)
    else:
        assert found == expected
        assert type(found) is type(expected)


@pytest.mark.parametrize("channel", CHANNELS)
def test_every_value_arrives_as_it_was_and_threads_end(channel: str) -> None:
    assert run_ranks(2, all_kinds, channel, timeout_s=60) == [[], []]


SLEEP_S = 1.0


def sent_while_asleep(rank: int) -> tuple[float, float]:
    """Sender: when all had left. Receiver: when it woke up, and how long it then waited."""
    transport = transport_of(rank)
    size = 8 * 1024 * 1024
    transport.begin([receive_of(0, 0)] if rank else [])
    dist.barrier()
    if rank == 0:
        transport.send(0, 1, 0, message_of(numbers(0, 0, size)))
        transport.end()
        result = time.monotonic(), 0.0
    else:
        time.sleep(SLEEP_S)
        woke = time.monotonic()
        transport.take(0)
        result = woke, time.monotonic() - woke
        transport.end()
    transport.close()
    return result


def test_a_message_travels_while_the_receiver_is_busy() -> None:
    (left, _), (woke, waited_s) = run_ranks(2, sent_while_asleep, timeout_s=30)
    assert left < woke
    assert waited_s < 0.5 * SLEEP_S


def ahead_is_bounded(rank: int) -> int:
    """How many of ten messages leave while the receiver has reached none of its receives."""
    transport = transport_of(rank)
    transport.begin([receive_of(tag, 0) for tag in range(10)] if rank else [])
    dist.barrier()
    if rank == 0:
        for tag in range(10):
            transport.send(0, 1, tag, message_of(numbers(tag, 0)))
        dist.barrier()
        transport.end()
        transport.close()
        return 0
    time.sleep(0.5)
    early = len(transport._inbox._items)
    dist.barrier()
    for tag in range(10):
        transport.reached()
        transport.take(tag)
    transport.end()
    transport.close()
    return early


def test_few_messages_are_held_before_they_are_wanted() -> None:
    assert run_ranks(2, ahead_is_bounded, timeout_s=30)[1] == 2


TIMEOUT_S = 2.0


def silent_peer(rank: int) -> tuple[str, float]:
    transport = transport_of(rank, timeout_s=TIMEOUT_S)
    start = time.monotonic()
    message = ""
    if rank == 0:
        transport.begin([receive_of(4, 1)])
        transport.reached()
        try:
            transport.take(4)
        except TransportError as error:
            message = str(error)
    else:
        time.sleep(1.5 * TIMEOUT_S)
    transport.close()
    return message, time.monotonic() - start


def test_a_silent_peer_is_named_in_time() -> None:
    (message, elapsed_s), _ = run_ranks(2, silent_peer, timeout_s=30)
    assert "rank 0 waited in vain for RecvActivation of samples" in message
    assert "between stage 0 rank 1 and stage 1 rank 0, which rank 1 did not deliver" in message
    assert TIMEOUT_S * 0.9 < elapsed_s < TIMEOUT_S + 2


def absent_receiver(rank: int) -> str:
    transport = transport_of(rank, timeout_s=TIMEOUT_S)
    message = ""
    if rank == 0:
        transport.begin([])
        transport.send(0, 1, 4, message_of(numbers(4, 0)))
        try:
            transport.end()
        except TransportError as error:
            message = str(error)
    else:
        time.sleep(1.5 * TIMEOUT_S)
    transport.close()
    return message


def test_a_message_that_nobody_takes_is_told_in_time() -> None:
    message = run_ranks(2, absent_receiver, timeout_s=30)[0]
    assert "rank 0 could not deliver all its messages within 2 s" in message


def dying_peer(rank: int) -> None:
    transport = transport_of(rank, timeout_s=60)
    transport.begin([receive_of(4, 1)] if rank == 0 else [])
    dist.barrier()
    if rank == 1:
        os._exit(3)
    transport.reached()
    transport.take(4)


def test_a_dead_peer_is_named_at_once() -> None:
    start = time.monotonic()
    with pytest.raises(RanksError) as caught:
        run_ranks(2, dying_peer, timeout_s=30)
    assert time.monotonic() - start < 10
    assert "TransportError: rank 0 waited in vain for RecvActivation" in str(caught.value)
    assert "which rank 1 did not deliver" in str(caught.value)


class Deadly(Block):
    """Ends its process in the forward pass of the second step."""

    steps = 0

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.steps += 1
        if self.steps > 1:
            os._exit(3)
        result: Tensor = super().forward(x)
        return result


def engine_with_a_rank_that_dies(rank: int) -> None:
    plan = plan_of([[[3]], [[3]]], [0, 2, 3])
    case = Case(
        "dies", plan, batches_of(vectors(6), [3, 3]), layers=lambda: [Block(), Block(), Deadly()]
    )
    engine = make_engine(case)
    engine.set_dataiterator(iter(case.batches))
    engine.train_batch()
    engine.train_batch()


def test_a_rank_that_dies_in_training_ends_the_others_with_its_name() -> None:
    start = time.monotonic()
    with pytest.raises(RanksError) as caught:
        run_ranks(2, engine_with_a_rank_that_dies, timeout_s=40)
    message = str(caught.value)
    assert time.monotonic() - start < 20
    assert "rank 1 died" in message
    assert "PeerError: rank 1 " in message
    assert "last heard of at" in message
