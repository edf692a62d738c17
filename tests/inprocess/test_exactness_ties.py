"""Parameters that layers of several stages share: one owner, equal copies, counted once.

`local_job` checks after every step that all copies of a parameter are equal to the bit.
"""

from __future__ import annotations

import pytest
import torch

from tests.inprocess.exact_cases import (
    BATCH,
    FOUR_GROUPS,
    SHAPES,
    assert_exact,
    make_plan,
    ragged_lengths,
    sentences,
    squared_error,
    tied_language_model,
    token_sum,
    vectors,
    with_ties,
)
from tests.inprocess.local_job import Job, Step, run
from zorse_ds.schedule.trace import ties_between_stages


def steps(clip: float = 0.0) -> list[Step]:
    """Three of them."""
    return [Step(vectors(i), clip) for i in range(3)]


@pytest.mark.parametrize("zero_level", [0, 1, 2, 3])
@pytest.mark.parametrize("shape", SHAPES)
def test_first_and_last_layer(shape: str, zero_level: int) -> None:
    plan = make_plan(SHAPES[shape], 5, zero_levels=[zero_level], weights=[0, 2, 1])
    assert_exact(Job(with_ties(5, (0, 4)), squared_error), plan, steps(0.05))


@pytest.mark.parametrize(
    "ties", [[(0, 3, 7)], [(0, 7), (1, 6)], [(0, 2, 5), (3, 7)], [(1, 3, 5, 7)]]
)
def test_several_uses_on_groups_of_different_width(ties: list[tuple[int, ...]]) -> None:
    for zero_levels in ([0, 1, 2], [2, 0, 1], [3, 2, 3]):
        plan = make_plan(FOUR_GROUPS, 8, zero_levels=zero_levels)
        assert_exact(Job(with_ties(8, *ties), squared_error), plan, steps())


def test_two_of_three_uses_in_one_stage() -> None:
    """The stage sums over both uses itself; owner or not."""
    for ties in ([(0, 1, 5)], [(0, 4, 5)], [(0, 1, 4, 5)]):
        for shape in ("1-3", "3-1"):
            plan = make_plan(SHAPES[shape], 6)
            assert_exact(Job(with_ties(6, *ties), squared_error), plan, steps())


def test_a_tie_inside_one_stage_needs_no_messages() -> None:
    layers = with_ties(6, (0, 2), (3, 5))
    for shape in ("1-3", "3-1"):
        plan = make_plan(SHAPES[shape], 6)
        assert ties_between_stages(plan, [(0, 2), (3, 5)]) == ()
        assert_exact(Job(layers, squared_error), plan, steps())


def test_a_frozen_tie() -> None:
    layers = with_ties(5, (0, 4))
    layers[0].requires_grad_(False)
    for shape in SHAPES.values():
        assert_exact(Job(layers, squared_error), make_plan(shape, 5), steps())


def test_a_tie_that_is_partly_frozen() -> None:
    layers = with_ties(5, (0, 4))
    layers[0].first.requires_grad_(False)
    for shape in SHAPES.values():
        assert_exact(Job(layers, squared_error), make_plan(shape, 5), steps(0.05))


def test_a_tie_whose_parts_are_in_different_param_groups() -> None:
    job = Job(
        with_ties(5, (0, 4)),
        squared_error,
        options=[{"lr": 0.1}, {"weight_decay": 0.0}],
        group_of=lambda name: int("bias" in name),
    )
    for shape in SHAPES.values():
        assert_exact(job, make_plan(shape, 5), steps(0.05))


def test_the_owner_of_the_only_shard_weight() -> None:
    """Two of the three owners hold nothing of the tie's state."""
    for zero_level in (0, 1, 2, 3):
        plan = make_plan(SHAPES["3-1"], 5, zero_levels=[zero_level], weights=[0, 0, 1])
        assert_exact(Job(with_ties(5, (0, 4)), squared_error), plan, steps())


@pytest.mark.parametrize("shape", SHAPES)
def test_head_and_embedding_share_a_weight(shape: str) -> None:
    samples = [Step(sentences(i, ragged_lengths(i)), clip=0.1) for i in range(3)]
    plan = make_plan(SHAPES[shape], 5)
    assert_exact(Job(tied_language_model(3), token_sum), plan, samples)


def test_without_targets_ties_stay_as_they_are() -> None:
    empty = [(ids, torch.full_like(labels, -100)) for ids, labels in sentences(0, [4] * BATCH)]
    job = Job(tied_language_model(3), token_sum)
    some = Step(sentences(1, [4] * BATCH))
    for shape in SHAPES.values():
        assert_exact(job, make_plan(shape, 5), [some, Step(empty), some])


def test_the_owner_alone_has_optimizer_state() -> None:
    plan = make_plan(SHAPES["1-3"], 2, zero_levels=[1])
    outcome = run(Job(with_ties(2, (0, 1)), squared_error), plan, steps())
    sizes = [sum(b.master.numel() for b in optimizer.buckets) for optimizer in outcome.optimizers]
    assert sizes == [24, 0, 0, 0]
