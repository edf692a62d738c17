"""What is measured in which order, and the fit of latency and bandwidth."""

from __future__ import annotations

import random

import pytest

from zorse_ds.profiler.probe_links import SIZES, latency_and_rate, pairings


def test_each_node_and_each_pair_of_nodes_is_measured_once() -> None:
    hosts = ("a", "a", "a", "b", "c", "c")
    assert [each.pairs for each in pairings(hosts)] == [
        ((0, 1),), ((0, 2),), ((4, 5),),
        ((0, 3),), ((0, 4), (1, 5)), ((3, 4),),
    ]  # fmt: skip


def test_a_lone_rank_has_nothing_to_measure() -> None:
    assert pairings(("a",)) == ()


@pytest.mark.parametrize("seed", range(20))
def test_the_fit_finds_what_made_the_times(seed: int) -> None:
    chance = random.Random(seed)
    latency_s, rate = 10 ** chance.uniform(-5.5, -2), 10 ** chance.uniform(7, 11)
    times = [latency_s + size / rate for size in SIZES]
    assert latency_and_rate(SIZES, times) == pytest.approx((latency_s, rate), rel=1e-6)
    noisy = [time * chance.uniform(0.95, 1.05) for time in times]
    found = latency_and_rate(SIZES, noisy)
    # A part that is small in every message cannot be found; what they take together can.
    for size, time in zip(SIZES, times, strict=True):
        assert found[0] + size / found[1] == pytest.approx(time, rel=0.15)


def test_times_without_a_slope_give_no_nonsense() -> None:
    latency_s, rate = latency_and_rate(SIZES, [1e-3, 1e-3, 9e-4, 8e-4])
    assert latency_s == 8e-4
    assert rate == SIZES[-1] / 8e-4
