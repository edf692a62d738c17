"""Parameters of a sharded stage: gathered once a stay, two stages at most, and checked for it."""

import random
from collections import Counter
from dataclasses import replace

import pytest

from tests.random_plans import random_ministage_plan, random_plan, uniform_ministage_plan
from zorse_ds.core.plan import Plan
from zorse_ds.errors import ScheduleError
from zorse_ds.schedule.checks import MOST_RESIDENT, check_residency, check_trace
from zorse_ds.schedule.compile import compile_forward, compile_trace
from zorse_ds.schedule.instructions import (
    BackwardPass,
    ForwardPass,
    Instruction,
    ReshardParams,
    UnshardParams,
)
from zorse_ds.schedule.residency import Residency, residencies_of
from zorse_ds.schedule.trace import Trace


def gathers(trace: Trace) -> Counter[tuple[int, int]]:
    """(rank, stage) → how often its parameters are gathered in a step."""
    found = (each for each in trace.instructions if isinstance(each, UnshardParams))
    return Counter((each.rank, each.index) for each in found)


def stays_of(plan: Plan, schedule: str) -> dict[tuple[int, int], int]:
    """The same by the group's stays."""
    expected: Counter[tuple[int, int]] = Counter()
    for group in plan.groups:
        if group.zero_level == 3:
            for stay in residencies_of(plan, group.name, schedule):  # type: ignore[arg-type]
                expected.update((rank, stay.stage) for rank in group.ranks)
    return expected


@pytest.mark.parametrize("seed", range(150))
def test_gathers_are_stays(seed: int) -> None:
    plan = random_ministage_plan(seed, zero_levels=(3, 3, 2))
    found = gathers(compile_trace(plan))
    assert found == stays_of(plan, "ministage")
    assert set(found.values()) <= {1, 2}
    assert set(gathers(compile_forward(plan)).values()) <= {1}


@pytest.mark.parametrize("turns", [False, True])
@pytest.mark.parametrize("stages", [1, 2, 4])
def test_gathers_do_not_grow_with_micro_batches(stages: int, turns: bool) -> None:
    few, many = (
        gathers(compile_trace(uniform_ministage_plan(2, 2, count, stages, turnaround=turns)))
        for count in (1, 12)
    )
    assert few == many
    # The last forward stage of a group is its first backward stage: one gather does for both.
    last = {rank: max(stage for own, stage in few if own == rank) for rank in range(4)}
    expected = {(rank, stage): 1 if stage == last[rank] else 2 for rank, stage in few}
    assert few == expected


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
@pytest.mark.parametrize("seed", range(20))
def test_one_stage_is_gathered_once_under_the_other_schedules(seed: int, schedule: str) -> None:
    plan = random_plan(seed, zero_levels=(3,), schedules=(schedule,))
    trace = compile_trace(plan)
    check_trace(trace)
    assert gathers(trace) == dict.fromkeys(gathers(trace), 1)
    assert {rank for rank, _ in gathers(trace)} == set(range(plan.world_size))


@pytest.mark.parametrize("seed", range(100))
def test_at_most_two_stages_are_whole_and_the_next_is_fetched_early(seed: int) -> None:
    plan = random_ministage_plan(seed, zero_levels=(3,))
    for program in compile_trace(plan).programs.values():
        whole: set[int] = set()
        most = 0
        for each in program:
            if isinstance(each, UnshardParams):
                assert each.index not in whole
                whole.add(each.index)
            elif isinstance(each, ReshardParams):
                whole.remove(each.stage)
            elif isinstance(each, ForwardPass | BackwardPass):
                assert each.stage in whole
            most = max(most, len(whole))
        assert not whole
        assert most <= MOST_RESIDENT


@pytest.mark.parametrize("stages", [2, 3, 4])
@pytest.mark.parametrize("width", [1, 2])
def test_the_next_stage_is_gathered_while_one_is_in_use(stages: int, width: int) -> None:
    for program in compile_trace(uniform_ministage_plan(2, width, 3, stages)).programs.values():
        own = [at for at, each in enumerate(program) if isinstance(each, UnshardParams)]
        assert len(own) == 2 * stages - 1
        for at in own[1:]:
            used = next(
                each for each in program[at:] if isinstance(each, ForwardPass | BackwardPass)
            )
            assert used.stage != program[at].index, "computation hides the gather"  # type: ignore[attr-defined]


def test_stays_join_visits_in_a_row() -> None:
    plan = uniform_ministage_plan(2, 1, 2, 2, turnaround=False)
    assert residencies_of(plan, "g0", "ministage") == [
        Residency(0, 0, 0),
        Residency(2, 1, 2),
        Residency(0, 3, 3),
    ]
    assert residencies_of(plan, "g1", "forward") == [Residency(1, 0, 0), Residency(3, 1, 1)]
    turned = uniform_ministage_plan(2, 1, 2, 2)
    assert residencies_of(turned, "g0", "ministage") == [
        Residency(0, 0, 0),
        Residency(2, 1, 1),
        Residency(0, 2, 2),
    ]
    one = random_plan(0, zero_levels=(3,), schedules=("gpipe",))
    assert residencies_of(one, "g0", "gpipe") == [Residency(0, 0, 1)]


SEEDS = range(25)


def broken(trace: Trace, instructions: list[Instruction], match: str) -> None:
    """`check_residency` refuses the trace in these words."""
    check_residency(trace)
    with pytest.raises(ScheduleError, match=match):
        check_residency(replace(trace, instructions=tuple(instructions)))


def sharded_trace(seed: int) -> Trace:
    """One whose groups all keep parameters as shards."""
    return compile_trace(random_ministage_plan(seed, zero_levels=(3,)))


def any_of(trace: Trace, seed: int, kind: type[Instruction]) -> int:
    places = [i for i, each in enumerate(trace.instructions) if type(each) is kind]
    return random.Random(seed).choice(places)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_missing_gather_is_found(seed: int) -> None:
    trace = sharded_trace(seed)
    instructions = list(trace.instructions)
    removed = instructions.pop(any_of(trace, seed, UnshardParams))
    broken(trace, instructions, f"^rank {removed.rank}: (Forward|Backward)Pass stage")


@pytest.mark.parametrize("seed", SEEDS)
def test_a_repeated_gather_is_found(seed: int) -> None:
    trace = sharded_trace(seed)
    instructions = list(trace.instructions)
    at = any_of(trace, seed, UnshardParams)
    instructions.insert(at, instructions[at])
    broken(trace, instructions, f"^rank {instructions[at].rank}: UnshardParams .* gathered once")


@pytest.mark.parametrize("seed", SEEDS)
def test_a_missing_drop_is_found(seed: int) -> None:
    trace = sharded_trace(seed)
    instructions = list(trace.instructions)
    instructions.pop(any_of(trace, seed, ReshardParams))
    broken(trace, instructions, "UnshardParams|left at the end of the step")


@pytest.mark.parametrize("seed", SEEDS)
def test_an_early_drop_is_found(seed: int) -> None:
    """Before the computation that it stands behind."""
    trace = sharded_trace(seed)
    instructions = list(trace.instructions)
    at = any_of(trace, seed, ReshardParams)
    drop = instructions.pop(at)
    last = max(
        i
        for i in range(at)
        if isinstance(instructions[i], ForwardPass | BackwardPass)
        and instructions[i].rank == drop.rank
    )
    instructions.insert(last, drop)
    broken(trace, instructions, f"^rank {drop.rank}: (Forward|Backward)Pass stage")


@pytest.mark.parametrize("seed", SEEDS)
def test_a_late_gather_is_found(seed: int) -> None:
    trace = sharded_trace(seed)
    instructions = list(trace.instructions)
    at = any_of(trace, seed, UnshardParams)
    gather = instructions.pop(at)
    first = next(
        i
        for i in range(at, len(instructions))
        if isinstance(instructions[i], ForwardPass | BackwardPass)
        and instructions[i].rank == gather.rank
        and instructions[i].stage == gather.index  # type: ignore[attr-defined]
    )
    instructions.insert(first + 1, gather)
    broken(trace, instructions, f"^rank {gather.rank}: (Forward|Backward)Pass stage")


def test_a_third_stage_is_found() -> None:
    trace = compile_trace(uniform_ministage_plan(2, 1, 2, 3))
    own = [each for each in trace.instructions if isinstance(each, UnshardParams)]
    early = [each for each in own if each.rank == 0][:3]
    rest = [each for each in trace.instructions if each not in early]
    broken(trace, [*early, *rest], "^rank 0: UnshardParams 4 .* at most 2")


@pytest.mark.parametrize("zero_level", [0, 1, 2])
def test_a_gather_of_what_is_always_whole_is_found(zero_level: int) -> None:
    trace = compile_trace(uniform_ministage_plan(2, 1, 2, 2, zero_level=zero_level))
    assert not gathers(trace)
    extra = [UnshardParams(0, 0), ReshardParams(0, 0)]
    broken(trace, [*extra, *trace.instructions], "^rank 0: UnshardParams 0")


def test_a_gather_of_another_groups_stage_is_found() -> None:
    trace = compile_trace(uniform_ministage_plan(2, 1, 2, 2))
    extra = [UnshardParams(0, 1), ReshardParams(0, 1)]
    broken(trace, [*extra, *trace.instructions], "^rank 0: UnshardParams 1")
