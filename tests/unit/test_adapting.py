"""Micro-batches move to where the time is: by how much, how far, and when not."""

from __future__ import annotations

import random
import time
from collections.abc import Mapping, Sequence
from itertools import product
from typing import Any

import pytest

from tests.random_plans import random_ministage_plan, random_plan, uniform_plan
from zorse_ds.core.lots import Lot, lot_between, moved_samples, usual_size, with_lot
from zorse_ds.core.plan import GpuShare, Plan
from zorse_ds.planner.adapting import RankFacts, ShareDecider, ShareRule
from zorse_ds.schedule.checks import check_trace
from zorse_ds.schedule.compile import compile_trace
from zorse_ds.schedule.paced import Pace, outlook_of

AT_ONCE = ShareRule(window=1, least_gain=0.01, most_moved=1.0)


def one_group(*sizes: Sequence[int], schedule: str = "1f1b") -> Plan:
    gpus = [{"rank": i, "micro_batches": list(own)} for i, own in enumerate(sizes)]
    return Plan.from_dict(
        {
            "global_batch_size": sum(map(sum, sizes)),
            "schedule": schedule,
            "groups": [{"name": "all", "gpus": gpus}],
            "stages": [{"group": "all", "layers": [0, 3]}],
        }
    )


def facts_of(plan: Plan, seconds: Mapping[int, float], **memory: Any) -> list[RankFacts]:
    """Each sample takes its rank so long, a third of it forward, over all its stages alike."""
    facts = []
    for rank in range(plan.world_size):
        stages = plan.stages_of_rank(rank)
        own = seconds[rank] / len(stages)
        paces = {stage: Pace(own / 3, own * 2 / 3) for stage in stages}
        facts.append(RankFacts(0.0, paces, **memory))
    step_s = outlook_of(plan, paces_of(facts)).step_s
    return [RankFacts(step_s, own.paces, **memory) for own in facts]


def paces_of(facts: Sequence[RankFacts]) -> dict[tuple[int, int], Pace]:
    return {(rank, at): pace for rank, own in enumerate(facts) for at, pace in own.paces.items()}


def counts(plan: Plan) -> list[int]:
    return [len(gpu.micro_batches) for group in plan.groups for gpu in group.gpus]


def test_a_lot_is_whole_micro_batches_on_both_sides() -> None:
    twos, threes = (
        GpuShare(rank=0, micro_batches=(2, 2, 2, 1)),
        GpuShare(rank=1, micro_batches=(3,)),
    )
    assert usual_size(twos) == 2 and usual_size(GpuShare(rank=0, micro_batches=(1, 2))) == 2
    assert lot_between(twos, threes) == Lot(0, 1, 6)
    assert lot_between(threes, twos) is None, "it would be left with nothing"
    assert lot_between(twos, GpuShare(rank=2, micro_batches=())) is None
    plan = one_group((2, 2, 2, 1), (3,))
    changed = with_lot(plan.groups[0], Lot(0, 1, 6))
    assert [gpu.micro_batches for gpu in changed.gpus] == [(1,), (3, 3, 3)]
    back = with_lot(changed, Lot(1, 0, 3 * 1))
    assert [gpu.micro_batches for gpu in back.gpus] == [(1, 1, 1, 1), (3, 3)]


def test_what_is_of_another_size_keeps_its_place() -> None:
    group = one_group((1, 2, 2, 3), (2, 2)).groups[0]
    taken = with_lot(group, Lot(1, 0, 2))
    assert [gpu.micro_batches for gpu in taken.gpus] == [(1, 2, 2, 2, 3), (2,)]


@pytest.mark.parametrize("seed", range(20))
def test_in_one_group_nothing_static_is_better(seed: int) -> None:
    """Without a pipeline the step is the busiest rank's: all splits are compared by hand."""
    rng = random.Random(seed)
    ranks, each = rng.randint(2, 3), rng.randint(4, 8)
    plan = one_group(*[(1,) * each] * ranks)
    seconds = {rank: rng.choice([1.0, 1.3, 2.0, 3.7]) for rank in range(ranks)}
    decider = ShareDecider(plan, AT_ONCE)
    decider.observe(facts_of(plan, seconds, grown_bytes=1, room_bytes=1e9))
    total = ranks * each
    best = min(
        max(n * seconds[rank] for rank, n in enumerate(split))
        for split in product(range(1, total), repeat=ranks)
        if sum(split) == total
    )
    found = max(n * seconds[rank] for rank, n in enumerate(counts(decider.current)))
    assert found <= best * 1.01


def test_the_paced_step_is_the_textbooks() -> None:
    plan = uniform_plan(num_stages=4, width=1, micro_batches_a_rank=8)
    facts = facts_of(plan, dict.fromkeys(range(4), 3.0))
    outlook = outlook_of(plan, paces_of(facts))
    assert outlook.step_s == pytest.approx((8 + 3) * 3.0)
    assert outlook.held == {rank: 4 - rank for rank in range(4)}
    gpipe = plan.model_copy(update={"schedule": "gpipe"})
    assert outlook_of(gpipe, paces_of(facts)).held == dict.fromkeys(range(4), 8)


def test_held_activations_shrink_with_recompute() -> None:
    plan = one_group((2, 2), schedule="gpipe").to_dict()
    plan["groups"][0] |= {"recompute": "full", "recompute_every": 2}
    paces = {(0, 0): Pace(1.0, 2.0)}
    assert outlook_of(Plan.from_dict(plan), paces).held == {0: 4 * 2}
    assert outlook_of(one_group((2, 2), schedule="gpipe"), paces).held == {0: 4 * 3}


@pytest.mark.parametrize("seed", range(60))
def test_random_changes_keep_what_must_stay(seed: int) -> None:
    rng = random.Random(seed)
    make = random_plan if seed % 2 else random_ministage_plan
    plan = make(seed, max_groups=3, max_batch=17)
    rule = ShareRule(1, 0.001, rng.choice([0.1, 0.5, 1.0]))
    memory: dict[str, Any] = {"grown_bytes": 1.0, "room_bytes": 100.0} if seed % 3 else {}
    decider, promised = ShareDecider(plan, rule), None
    for _ in range(4):
        seconds = {rank: rng.choice([1.0, 2.0, 5.0]) for rank in range(plan.world_size)}
        before, facts = decider.current, facts_of(decider.current, seconds, **memory)
        promised = promised or outlook_of(plan, paces_of(facts)).held
        change = decider.observe(facts)
        assert (change is None) == (decider.current == before)
        if change is None:
            continue
        after = outlook_of(change.plan, paces_of(facts))
        assert after.step_s == pytest.approx(change.predicted_s)
        assert change.gain_share >= rule.least_gain
        assert moved_samples(before, change.plan) > 0
        check_changed(plan, change.plan)
        if not memory:
            assert all(held <= promised[rank] for rank, held in after.held.items())


def check_changed(given: Plan, changed: Plan) -> None:
    """The same samples, sizes, layers and shards; the trace runs through."""
    assert Plan.from_dict(changed.to_dict()) == changed
    assert changed.stages == given.stages and changed.schedule == given.schedule
    for old, new in zip(given.groups, changed.groups, strict=True):
        assert old.model_copy(update={"gpus": new.gpus}) == new
        for before, after in zip(old.gpus, new.gpus, strict=True):
            assert after.model_copy(update={"micro_batches": before.micro_batches}) == before
            assert after.micro_batches and set(after.micro_batches) <= set(before.micro_batches)
    check_trace(compile_trace(changed))


def test_one_change_moves_no_more_than_it_may() -> None:
    plan = one_group((1,) * 16, (1,) * 16)
    decider = ShareDecider(plan, ShareRule(window=1, most_moved=0.125))
    seconds = {0: 1.0, 1: 3.0}
    found = [counts(plan)]
    for _ in range(3):
        decider.observe(facts_of(decider.current, seconds, grown_bytes=1, room_bytes=1e9))
        found.append(counts(decider.current))
    assert found == [[16, 16], [20, 12], [24, 8], [24, 8]]


def test_a_passing_stall_moves_nothing_and_a_lasting_one_does() -> None:
    plan = one_group((1,) * 8, (1,) * 8)
    decider = ShareDecider(plan)
    usual, slow = facts_of(plan, {0: 1.0, 1: 1.0}), facts_of(plan, {0: 1.0, 1: 2.0})
    steps = [usual] * 6 + [slow] * 2 + [usual] * 5 + [slow] * 3
    changes = [decider.observe(facts) for facts in steps]
    assert [i for i, change in enumerate(changes) if change is not None] == [len(steps) - 1]
    assert str(changes[-1]) == (
        "group 'all': rank 0 (1 s a sample) 8 → 11 micro-batches, rank 1 (2 s a sample) 8 → 5 "
        "micro-batches; predicted step 16 → 11 s (-31.2 %)"
    )
    again = [decider.observe(facts_of(decider.current, {0: 1.0, 1: 2.0})) for _ in range(9)]
    assert again == [None] * 9, "what is level stays"


def test_a_gain_that_is_too_small_moves_nothing() -> None:
    plan = one_group((1,) * 8, (1,) * 8)
    facts = facts_of(plan, {0: 1.0, 1: 1.25})
    assert ShareDecider(plan, ShareRule(1, least_gain=0.11)).observe(facts) is None
    change = ShareDecider(plan, ShareRule(1, least_gain=0.09)).observe(facts)
    assert change is not None and counts(change.plan) == [9, 7]
    assert change.gain_share == pytest.approx(0.1)


def test_a_group_that_holds_nobody_up_stays() -> None:
    """The second group is slow as a whole: levelling the first would save nothing."""
    sizes = {"fast": [(1,) * 8, (1,) * 8], "slow": [(2,) * 8]}
    groups, rank = [], 0
    for name, own in sizes.items():
        gpus = [{"rank": rank + i, "micro_batches": list(mine)} for i, mine in enumerate(own)]
        groups.append({"name": name, "gpus": gpus})
        rank += len(own)
    stages = [{"group": "fast", "layers": [0, 2]}, {"group": "slow", "layers": [2, 4]}]
    plan = Plan.from_dict({"global_batch_size": 16, "groups": groups, "stages": stages})
    facts = facts_of(plan, {0: 0.1, 1: 0.15, 2: 10.0})
    assert ShareDecider(plan, ShareRule(1)).observe(facts) is None


def test_ranks_that_go_in_step_keep_their_shares() -> None:
    """Summed after every micro-batch, each round takes the slowest rank's time."""
    data = one_group((1,) * 8, (1,) * 8).to_dict()
    data["groups"][0] |= {"zero_level": 2, "reduce_after": "micro_batch"}
    plan = Plan.from_dict(data)
    assert ShareDecider(plan, AT_ONCE).observe(facts_of(plan, {0: 1.0, 1: 2.0})) is None


@pytest.mark.parametrize("room, moves", [(None, False), (10.0, False), (200.0, True)])
def test_memory_that_is_not_there_is_not_taken(room: float | None, moves: bool) -> None:
    """Under gpipe every micro-batch is held: 3 of 8 more are 3/8 of what has grown."""
    plan = one_group((1,) * 8, (1,) * 8, schedule="gpipe")
    facts = facts_of(plan, {0: 1.0, 1: 2.0}, grown_bytes=400.0, room_bytes=room)
    decider = ShareDecider(plan, ShareRule(1))
    change = decider.observe(facts)
    assert (change is not None) == moves == (not decider.is_held_back)
    if change is not None:
        assert counts(change.plan) == [11, 5]


def test_a_large_plan_is_decided_in_seconds() -> None:
    """128 ranks, 16,384 micro-batches: jitter costs nothing, a decision looks at few plans."""
    plan = uniform_plan(num_stages=8, width=16, micro_batches_a_rank=128)
    rng = random.Random(0)
    jitter = {rank: rng.uniform(0.99, 1.01) for rank in range(128)}
    decider = ShareDecider(plan, ShareRule(1))
    start = time.process_time()
    assert decider.observe(facts_of(plan, jitter)) is None
    quick_s = time.process_time() - start
    slow = jitter | dict.fromkeys(range(0, 128, 7), 2.0)
    start = time.process_time()
    change = decider.observe(facts_of(plan, slow, grown_bytes=1.0, room_bytes=100.0))
    assert change is not None and change.gain_share > 0.1
    assert time.process_time() - start < 60 and quick_s < 10
