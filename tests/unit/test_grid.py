"""The grid of a compute order, on a step small enough to draw by hand and on large ones."""

import pytest

from tests.random_plans import random_plan, uniform_plan
from zorse_ds.schedule.compile import compile_trace
from zorse_ds.schedule.grid import GridRow, grid_of, row_text
from zorse_ds.schedule.orders import Compute
from zorse_ds.schedule.summary import held_shares, summary_of


def drawn(width: int, *spans: tuple[str, int, int, int]) -> str:
    """Row of ten ticks with (`F` or `B`, micro-batch, start, stop)."""
    phases = {"F": "forward", "B": "backward"}
    computes = tuple(
        Compute(start, 0, 0, index, phases[letter], stop, 0)  # type: ignore[arg-type]
        for letter, index, start, stop in spans
    )
    return row_text(GridRow(0, computes), 10, width)


def test_textbook_pipeline_is_drawn() -> None:
    # Two stages, two micro-batches: forward 1 unit, backward 2, so the step has 9 units.
    grid = grid_of(compile_trace(uniform_plan(2, 1, 2)))
    assert [row_text(row, grid.ticks, 27) for row in grid.rows] == [
        "F0-F1-......B0====...B1====",
        "...F0-B0====F1-B1====......",
    ]


def test_what_has_no_room_is_its_letter() -> None:
    assert drawn(10, ("F", 7, 0, 2), ("B", 7, 2, 3), ("F", 12, 4, 6)) == "F7B.FF...."


def test_a_column_shows_what_most_of_it_is() -> None:
    assert drawn(1, ("F", 0, 0, 4), ("B", 0, 4, 10)) == "B"
    assert drawn(1, ("F", 0, 0, 2), ("B", 0, 2, 4)) == "."
    assert drawn(1, ("F", 0, 0, 4)) == "."
    assert drawn(2, ("F", 0, 0, 2), ("F", 1, 2, 4), ("B", 0, 5, 8)) == "FB"


@pytest.mark.parametrize("seed", range(40))
@pytest.mark.parametrize("width", [7, 80, 333])
def test_rows_fill_their_width_and_time_is_accounted_for(seed: int, width: int) -> None:
    trace = compile_trace(random_plan(seed))
    grid = grid_of(trace)
    assert len(grid.rows) == trace.plan.world_size
    for row in grid.rows:
        text = row_text(row, grid.ticks, width)
        assert len(text) == width
        assert set(text) <= set("FB-=.0123456789")
        # Each end of a run of one kind may be half a column off.
        idle = grid.idle_share(row.rank)
        assert abs(text.count(".") / width - idle) <= (2 * len(row.spans) + 1) / width
        assert all(a.stop <= b.start for a, b in zip(row.spans, row.spans[1:], strict=False))
    shares = [grid.idle_share(row.rank) for row in grid.rows]
    assert grid.bubble_share == pytest.approx(sum(shares) / len(shares))


def test_bubble_share_is_the_textbook_one() -> None:
    # Of 8 micro-batches and 3 stages to fill and drain, 3 elevenths are waiting.
    assert grid_of(compile_trace(uniform_plan(4, 1, 8))).bubble_share == pytest.approx(3 / 11)
    assert grid_of(compile_trace(uniform_plan(1, 2, 3))).bubble_share == pytest.approx(0, abs=1e-5)


def test_a_rank_without_work_is_idle() -> None:
    grid = grid_of(compile_trace(uniform_plan(2, 2, 2).resized(1)))
    assert [grid.idle_share(rank) == 1 for rank in range(4)] == [False, True, False, True]
    assert row_text(grid.rows[1], grid.ticks, 5) == "....."


@pytest.mark.parametrize("zero_level", range(4))
def test_shares_held_follow_the_zero_level(zero_level: int) -> None:
    group = uniform_plan(1, 2, 1).groups[0].model_copy(update={"zero_level": zero_level})
    light, heavy = group.gpus[0], group.gpus[1].model_copy(update={"shard_weight": 3.0})
    group = group.model_copy(update={"gpus": (light, heavy)})
    assert list(held_shares(group, heavy).values()) == [0.75] * zero_level + [1] * (3 - zero_level)


@pytest.mark.parametrize("seed", range(20))
def test_summary_counts(seed: int) -> None:
    plan = random_plan(seed)
    facts = summary_of(compile_trace(plan))
    assert [rank["rank"] for rank in facts["ranks"]] == list(range(plan.world_size))
    assert len(facts["stages"]) == len(facts["boundaries"]) + 1 == len(plan.stages)
    for boundary, above, below in zip(
        facts["boundaries"], facts["stages"], facts["stages"][1:], strict=False
    ):
        least = max(above["num_micro_batches"], below["num_micro_batches"])
        most = above["num_micro_batches"] + below["num_micro_batches"] - 1
        assert least <= boundary["num_transfers"] <= most
    assert len(facts["order"]) == 2 * sum(each["num_micro_batches"] for each in facts["stages"])
