"""Layers, parts of layers, groups and whole models that are not trained."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
from torch import nn

from tests.inprocess.exact_cases import (
    BATCH,
    SHAPES,
    assert_exact,
    blocks,
    language_model,
    make_plan,
    ragged_lengths,
    sentences,
    squared_error,
    token_sum,
    vectors,
)
from tests.inprocess.local_job import Job, Step

RECOMPUTE = ["none", "full"]


def frozen(which: Sequence[int], count: int = 6) -> list[nn.Module]:
    """Blocks, some of which are frozen."""
    layers = blocks(count)
    for index in which:
        layers[index].requires_grad_(False)
    return layers


def steps() -> list[Step]:
    """Two of them."""
    return [Step(vectors(i), clip=0.05) for i in range(2)]


@pytest.mark.parametrize("recompute", RECOMPUTE)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(
    "which", [(0,), (0, 1), (0, 1, 2), (3, 4, 5), (2, 3), (5,), (1, 4), (1, 2, 3, 4, 5)], ids=str
)
def test_frozen_layers(which: tuple[int, ...], shape: str, recompute: str) -> None:
    """Among them: nothing to train in the first group, in the last one, in the one between."""
    plan = make_plan(SHAPES[shape], 6, recompute=recompute)
    assert_exact(Job(frozen(which), squared_error), plan, steps())


@pytest.mark.parametrize("recompute", RECOMPUTE)
@pytest.mark.parametrize("shape", SHAPES)
def test_nothing_to_train(shape: str, recompute: str) -> None:
    plan = make_plan(SHAPES[shape], 6, recompute=recompute)
    outcome = assert_exact(Job(frozen(range(6)), squared_error), plan, steps())
    assert outcome.norms == [0.0, 0.0]


@pytest.mark.parametrize("recompute", RECOMPUTE)
@pytest.mark.parametrize("shape", SHAPES)
def test_frozen_embedding(shape: str, recompute: str) -> None:
    """The first stage's inputs are integers, which recomputation must cope with."""
    layers = language_model(4)
    layers[0].requires_grad_(False)
    plan = make_plan(SHAPES[shape], 6, recompute=recompute)
    batches = [Step(sentences(i, ragged_lengths(i))) for i in range(2)]
    assert_exact(Job(layers, token_sum), plan, batches)


@pytest.mark.parametrize("shape", SHAPES)
def test_biases_alone(shape: str) -> None:
    layers = blocks(6)
    for layer in layers:
        layer.first.requires_grad_(False)
        layer.second.weight.requires_grad_(False)
    assert_exact(Job(layers, squared_error), make_plan(SHAPES[shape], 6), steps())


NOT_TRAINED: dict[str, Callable[[str], bool]] = {
    "a layer": lambda name: name.startswith("3."),
    "a group": lambda name: name[0] in "012",
    "biases": lambda name: name.endswith("bias"),
}


@pytest.mark.parametrize("left_out", NOT_TRAINED)
@pytest.mark.parametrize("shape", SHAPES)
def test_parameters_in_no_param_group(shape: str, left_out: str) -> None:
    """They neither move nor count in the norm."""
    leave_out = NOT_TRAINED[left_out]
    job = Job(blocks(6), squared_error, group_of=lambda name: None if leave_out(name) else 0)
    outcome = assert_exact(job, make_plan(SHAPES[shape], 6), steps())
    moved = {name for name, t in outcome.values[1].items() if not t.equal(outcome.values[0][name])}
    assert moved == {name for name in outcome.values[0] if not leave_out(name)}


def test_a_rank_without_samples_and_a_group_without_parameters() -> None:
    layers: list[nn.Module] = [blocks(1)[0], nn.Tanh(), nn.Tanh()]
    plan = make_plan(SHAPES["2-1-2"], 3)
    assert_exact(Job(layers, squared_error), plan, [Step(vectors(0, size)) for size in (BATCH, 1)])
