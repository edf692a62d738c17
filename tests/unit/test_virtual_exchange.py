"""The exchange of virtual GPUs: lanes are shared, and no process's real pace decides anything."""

from __future__ import annotations

import random
from collections.abc import Generator
from typing import Any

import pytest

from zorse_ds.core.cluster import Cluster
from zorse_ds.cost.collectives import Collective
from zorse_ds.cost.network import Network
from zorse_ds.rehearsal.exchange import Exchange
from zorse_ds.rehearsal.lanes import Lanes, Passage

CLUSTER = Cluster.from_dict(
    {
        "nodes": [
            {"gpu_type": "T4", "num_gpus": 2, "intra_gb_per_s": 10, "nic_gb_per_s": 1},
            {"gpu_type": "A10G", "num_gpus": 2, "intra_gb_per_s": 10, "nic_gb_per_s": 1},
        ]
    }
)
Program = Generator[tuple[Any, ...], Any, None]
"""What a rank tells the exchange, one by one; it gets the answer to a `wait`."""


def latency_s(source: int, target: int) -> float:
    return CLUSTER.path(source, target).latency_s


def run(programs: list[Program], random_: random.Random) -> None:
    """All programs to their ends, their processes taking turns as chance wants."""
    answers: dict[int, Any] = {}
    exchange = Exchange(Lanes(Network(CLUSTER)), len(programs), answers.__setitem__)
    waiting: set[int] = set()
    left = dict(enumerate(programs))
    while left:
        rank = random_.choice([rank for rank in left if rank not in waiting or rank in answers])
        try:
            name, *arguments = left[rank].send(answers.pop(rank, None))
        except StopIteration:
            del left[rank]
            continue
        waiting.discard(rank)
        getattr(exchange, name)(rank, *arguments)
        if name == "wait":
            waiting.add(rank)


def test_messages_on_one_lane_share_it_and_others_do_not() -> None:
    lanes = Lanes(Network(CLUSTER))
    assert lanes.message(0, 2, 1e9, 0.0).stop_s == pytest.approx(1 + latency_s(0, 2))
    assert lanes.message(1, 2, 1e9, 0.5).stop_s == pytest.approx(2 + latency_s(1, 2))
    assert lanes.message(1, 0, 1e9, 0.0).stop_s == pytest.approx(0.1 + latency_s(1, 0))
    # Back, the NIC is free: it has a lane each way.
    assert lanes.message(2, 1, 1e9, 0.0).stop_s == pytest.approx(1 + latency_s(2, 1))


def test_who_is_ready_first_goes_first_though_its_process_is_late() -> None:
    arrivals: dict[int, float] = {}

    def sender(rank: int, moment: float) -> Program:
        yield "advance", moment
        yield "send", moment, 2, (rank, 2, 0), 1e9, False
        yield "finish", moment

    def receiver() -> Program:
        for rank in (1, 0):
            passage = yield "wait", 0.0, (rank, 2, 0), "stop"
            arrivals[rank] = passage.stop_s
        yield "finish", 9.0

    for seed in range(20):
        run([sender(0, 5.0), sender(1, 5.5), receiver()], random.Random(seed))
        assert arrivals[0] == pytest.approx(6.0 + latency_s(0, 2))
        assert arrivals[1] == pytest.approx(7.0 + latency_s(1, 2))


def test_expected_messages_leave_in_order_and_no_more_ahead_than_allowed() -> None:
    arrivals = []
    keys = [(0, 2, tag) for tag in range(3)]

    def sender() -> Program:
        for tag in (1, 0, 2):
            yield "send", float(3 - tag), 2, keys[tag], 1e8, True
        yield "finish", 3.0

    def receiver() -> Program:
        yield "expect", 0.0, keys, 2
        yield "advance", 10.0
        yield "allow", 10.0
        for key in keys:
            passage = yield "wait", 10.0, key, "stop"
            arrivals.append(passage.stop_s - latency_s(0, 2))
        yield "finish", 11.0

    run([sender(), finished(), receiver()], random.Random(0))
    # The first was sent at 3, and the second waits for it; the third waits for leave to come.
    assert arrivals == pytest.approx([3.1, 3.2, 10.1])


def finished() -> Program:
    yield "finish", 0.0


@pytest.mark.parametrize("seed", range(8))
def test_the_pace_of_processes_does_not_decide(seed: int) -> None:
    def outcome(pace: int) -> list[list[tuple[str, float]]]:
        logs: list[list[tuple[str, float]]] = [[] for _ in range(4)]
        programs = [random_program(seed, rank, logs[rank]) for rank in range(4)]
        run(programs, random.Random(pace))
        return logs

    first = outcome(0)
    assert all(outcome(pace) == first for pace in range(1, 12))
    assert len({moment for log in first for _, moment in log}) > 20


def random_program(seed: int, rank: int, log: list[tuple[str, float]]) -> Program:
    """Work, a message to each other rank, their messages, a collective: some rounds of it."""
    random_ = random.Random(100 * seed + rank)
    price = Collective(0.01, (), ())
    now = 0.0
    for number in range(4):
        for target in random_.sample([r for r in range(4) if r != rank], 3):
            now += random_.choice([0.0, 0.1, 0.25])
            yield "advance", now
            yield "send", now, target, (rank, target, number), random_.choice([1e7, 2e8]), False
        for source in random_.sample([r for r in range(4) if r != rank], 3):
            passage: Passage = yield "wait", now, (source, rank, number), "stop"
            now = max(now, passage.stop_s)
            log.append((f"message {source} {number}", now))
        key = ((0, 1, 2, 3), number)
        yield "arrive", now, key, price
        passage = yield "wait", now, key, "stop"
        now = max(now, passage.stop_s)
        log.append((f"meeting {number}", now))
    yield "finish", now


def test_who_waits_for_the_dead_is_told() -> None:
    heard = []

    def waiter() -> Program:
        answer = yield "wait", 0.0, (1, 0, 0), "stop"
        heard.append(answer)

    run([waiter(), finished()], random.Random(0))
    assert heard == [None]
