"""Parts of the planner against plain enumeration."""

import itertools
import random

import numpy as np
import pytest

from zorse_ds.core.cluster_files import cluster_from
from zorse_ds.planner.fit import level_shares
from zorse_ds.planner.graph import cut_tree
from zorse_ds.planner.groupings import groupings
from zorse_ds.planner.layers import by_count, by_range, cut_layers, spread
from zorse_ds.planner.offers import Offers, Option
from zorse_ds.planner.parallel import fork_map
from zorse_ds.planner.shares import balanced, micro_batches
from zorse_ds.planner.units import units_of


@pytest.mark.parametrize("seed", range(20))
def test_samples_are_balanced_as_well_as_can_be(seed: int) -> None:
    draw = random.Random(seed)
    seconds = [draw.uniform(0.1, 3) for _ in range(draw.randint(1, 3))]
    total = draw.randint(1, 12)
    parts = balanced(total, seconds)
    assert sum(parts) == total
    every = itertools.product(range(total + 1), repeat=len(seconds))
    best = min(
        max(part * cost for part, cost in zip(own, seconds, strict=True))
        for own in every
        if sum(own) == total
    )
    found = max(part * cost for part, cost in zip(parts, seconds, strict=True))
    assert found == pytest.approx(best)


@pytest.mark.parametrize(("samples", "size"), [(0, 4), (1, 4), (7, 3), (8, 4), (9, 4), (5, 8)])
def test_micro_batches_are_few_and_even(samples: int, size: int) -> None:
    sizes = micro_batches(samples, size)
    assert sum(sizes) == samples
    assert len(sizes) == -(-samples // size)
    assert all(0 < each <= size for each in sizes)
    assert not sizes or max(sizes) - min(sizes) <= 1


@pytest.mark.parametrize("seed", range(20))
def test_layers_are_cut_at_the_least_bottleneck(seed: int) -> None:
    draw = random.Random(seed)
    groups, layers = draw.randint(1, 4), draw.randint(4, 8)
    costs = [[draw.uniform(0.5, 2) for _ in range(layers)] for _ in range(groups)]
    most = [draw.randint(1, layers) for _ in range(groups)]
    seconds = [np.concatenate([[0.0], np.cumsum(own)]) for own in costs]
    number = np.arange(layers + 1)
    too_many = [number[None, :] - number[:, None] > cap for cap in most]
    found = cut_layers(
        [np.where(bad, np.inf, by_range(own)) for bad, own in zip(too_many, seconds, strict=True)]
    )
    bounds = [(0, *cuts, layers) for cuts in itertools.combinations(range(1, layers), groups - 1)]
    legal = [own for own in bounds if all(own[i + 1] - own[i] <= most[i] for i in range(groups))]
    if not legal:
        assert found is None
        return
    best = min(max(sum(costs[i][own[i] : own[i + 1]]) for i in range(groups)) for own in legal)
    assert found is not None
    assert sum(found) == layers
    assert all(count <= cap for count, cap in zip(found, most, strict=True))
    stops = list(itertools.accumulate(found, initial=0))
    worst = max(sum(costs[i][stops[i] : stops[i + 1]]) for i in range(groups))
    assert worst == pytest.approx(best)


@pytest.mark.parametrize("seed", range(10))
def test_layers_are_cut_by_what_any_number_of_them_costs(seed: int) -> None:
    draw = random.Random(seed)
    groups, layers = draw.randint(2, 4), draw.randint(4, 9)
    costs = [
        sorted(draw.choice((draw.random(), np.inf)) for _ in range(layers + 1))
        for _ in range(groups)
    ]
    found = cut_layers([by_count(np.array(own), layers) for own in costs])
    cuts = itertools.product(range(1, layers), repeat=groups)
    best = min(
        max(own[n] for own, n in zip(costs, cut, strict=True)) for cut in cuts if sum(cut) == layers
    )
    if np.isinf(best):
        assert found is None
        return
    assert found is not None
    assert sum(found) == layers
    assert max(own[n] for own, n in zip(costs, found, strict=True)) == best


def test_nothing_is_offered_beyond_the_layers_that_were_looked_at() -> None:
    """Rounded up to whole visits, a group may be asked for more."""
    options = [Option(size, (False,), 0, "none") for size in (1, 2)]
    merit = np.array([[np.inf, 2.0, np.inf], [np.inf, 1.0, 3.0]])
    offers = Offers(options, merit, merit)
    found = [offers.best(count) for count in range(5)]
    assert found == [None, options[1], options[1], None, None]


def test_layers_are_spread_over_visits() -> None:
    assert spread((5, 4), 2) == ((3, 2), (2, 2))


def test_shares_are_level_below_their_caps() -> None:
    assert level_shares([0.1, 1.0, 1.0]) == pytest.approx((0.1, 0.45, 0.45))
    assert level_shares([0.3, 0.3]) is None


def test_two_regions_are_the_first_cut() -> None:
    cluster = cluster_from("desk")
    parts = list(cut_tree(cluster, units_of(cluster), 2))[1]
    assert [{unit.node for unit in part} for part in parts] == [{0}, {1}]


@pytest.mark.parametrize("name", ["mini_b", "zorse_a", "zorse_b", "zorse_c"])
def test_groupings_divide_all_gpus_and_come_pure_and_mixed(name: str) -> None:
    cluster = cluster_from(name)
    units = units_of(cluster)
    found = groupings(cluster, units, lambda _: 1.0, 6)
    for grouping in found:
        ranks = [rank for group in grouping.groups for unit in group for rank in unit.ranks]
        assert sorted(ranks) == list(range(len(cluster.gpus)))
    types = [[{unit.gpu_type for unit in group} for group in grouping.groups] for grouping in found]
    assert any(len(own) > 1 and all(len(kinds) == 1 for kinds in own) for own in types)
    assert any(len(own) > 1 and all(len(kinds) > 1 for kinds in own) for own in types)


def test_work_is_dealt_out_and_failures_come_back() -> None:
    assert fork_map(lambda x: x * x, list(range(7)), 3) == [0, 1, 4, 9, 16, 25, 36]
    with pytest.raises(ZeroDivisionError):
        fork_map(lambda x: 1 // x, [1, 0, 2], 2)
