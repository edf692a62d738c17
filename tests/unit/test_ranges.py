"""Ranges, apportioning and overlaps against plain counting."""

import random
from fractions import Fraction

import pytest

from zorse_ds.ranges import Range, apportion, consecutive, overlaps


def random_cut(rng: random.Random, total: int) -> tuple[Range, ...]:
    """Consecutive ranges over `[0, total)`, some of them empty."""
    cuts = sorted(rng.choices(range(total + 1), k=rng.randint(0, 6)))
    return consecutive([b - a for a, b in zip([0, *cuts], [*cuts, total], strict=True)])


def test_range_is_half_open() -> None:
    assert Range(2, 5).size == 3
    assert list(range(10))[Range(2, 5).as_slice()] == [2, 3, 4]
    assert Range(2, 5).relative_to(2) == (0, 3)
    assert str(Range(2, 5)) == "[2, 5)"


@pytest.mark.parametrize(
    ("one", "other", "common"),
    [((0, 5), (3, 9), (3, 5)), ((3, 9), (0, 5), (3, 5)), ((0, 9), (4, 5), (4, 5))],
)
def test_intersection(
    one: tuple[int, int], other: tuple[int, int], common: tuple[int, int]
) -> None:
    assert Range(*one).intersect(Range(*other)) == common


@pytest.mark.parametrize("other", [(5, 9), (7, 9)])
def test_intersection_of_disjoint_ranges_is_empty(other: tuple[int, int]) -> None:
    assert Range(0, 5).intersect(Range(*other)).size == 0


def test_apportion_ties_go_to_the_lower_index() -> None:
    assert apportion(5, [1, 1, 1]) == (2, 2, 1)
    assert apportion(1, [1, 1]) == (1, 0)


def test_apportion_gives_nothing_to_weight_zero() -> None:
    assert apportion(7, [0, 1, 0]) == (0, 7, 0)


def test_apportion_is_exact_where_floats_are_not() -> None:
    # The float quota of the second is 0.6 * 5 = 3.0000000000000004 or less, by the order of terms.
    assert apportion(10**18 + 1, [Fraction(1, 3)] * 3) == (
        333333333333333334,
        333333333333333334,
        333333333333333333,
    )


@pytest.mark.parametrize("seed", range(100))
def test_apportion_is_within_one_of_the_quota(seed: int) -> None:
    rng = random.Random(seed)
    weights = [rng.choice([0, 0.1, 1, 2.5, 7]) for _ in range(rng.randint(1, 9))]
    weights[rng.randrange(len(weights))] = 3
    total = rng.randint(0, 1000)
    parts = apportion(total, weights)
    assert sum(parts) == total
    whole = sum(map(Fraction, weights))
    for part, weight in zip(parts, weights, strict=True):
        assert abs(part - total * Fraction(weight) / whole) < 1


@pytest.mark.parametrize(("total", "weights"), [(-1, [1]), (3, [0, 0]), (3, [2, -1])])
def test_apportion_refuses(total: int, weights: list[int]) -> None:
    with pytest.raises(ValueError, match="cannot apportion"):
        apportion(total, weights)


def test_consecutive() -> None:
    assert consecutive([2, 0, 3], start=1) == ((1, 3), (3, 3), (3, 6))


@pytest.mark.parametrize("seed", range(100))
def test_overlaps_equal_those_of_all_pairs(seed: int) -> None:
    rng = random.Random(seed)
    total = rng.randint(1, 30)
    old, new = random_cut(rng, total), random_cut(rng, total)
    expected = [
        (i, j, a.intersect(b))
        for i, a in enumerate(old)
        for j, b in enumerate(new)
        if a.intersect(b).size
    ]
    assert list(overlaps(old, new)) == expected


def test_overlaps_of_windows_with_gaps() -> None:
    found = list(overlaps([Range(0, 2), Range(5, 9)], [Range(1, 6), Range(8, 12)]))
    assert found == [(0, 0, (1, 2)), (1, 0, (5, 6)), (1, 1, (8, 9))]
