"""Where only a part of a layer is trained, only that part has gradients and optimizer state."""

from __future__ import annotations

import pytest

from zorse_ds.core.model import ModelShape
from zorse_ds.cost.frozen import FrozenTimes
from zorse_ds.cost.setting import PassTimes
from zorse_ds.cost.state import StageParams, params_of, state_bytes
from zorse_ds.ranges import Range


def adapted(tied: bool, head: int = 0) -> ModelShape:
    """Two blocks with adapters of 100 parameters, everything else frozen."""
    plain = ModelShape.llama("m", 2, 16, 32, 4, vocab=64, tied=tied)
    trained = {"embedding": 0, "block": 100, "head": head}
    kinds = {
        name: shape.model_copy(
            update={
                "num_params": shape.num_params + trained[name],
                "trainable_params": trained[name],
            }
        )
        for name, shape in plain.kinds.items()
    }
    return plain.model_copy(update={"kinds": kinds, "tied_params": 64 * 16})


def block_params() -> int:
    return ModelShape.llama("m", 2, 16, 32, 4, vocab=64).shapes[1].num_params


def test_parameters_by_what_becomes_of_them() -> None:
    model, block, table = adapted(tied=False), block_params(), 64 * 16
    assert params_of(model, Range(0, 2)) == StageParams(100, 0, table + block)
    assert params_of(model, Range(2, 4)) == StageParams(100, 0, block + table + 16)
    assert params_of(model, Range(0, 1)) == StageParams(0, 0, table)


def test_a_frozen_tie_is_held_twice_and_trained_nowhere() -> None:
    model, block, table = adapted(tied=True), block_params(), 64 * 16
    assert params_of(model, Range(0, 4)) == StageParams(200, 0, 2 * block + table + 16)
    assert params_of(model, Range(0, 2)) == StageParams(100, 0, block + table)
    assert params_of(model, Range(2, 4)) == StageParams(100, 0, block + table + 16)
    plain = ModelShape.llama("m", 2, 16, 32, 4, vocab=64, tied=True)
    assert params_of(plain, Range(2, 4)) == StageParams(block + 16, table)


@pytest.mark.parametrize("level", range(4))
def test_bytes_are_those_of_frozen_values_and_of_trained_state(level: int) -> None:
    both = state_bytes(StageParams(100, 20, 1000), level, 0.25, "bfloat16")
    trained = state_bytes(StageParams(100, 20), level, 0.25, "bfloat16")
    values = 2 * 1000 * (0.25 if level == 3 else 1)
    assert both.parameters == pytest.approx(trained.parameters + values)
    assert both.gathered - trained.gathered == (2000 if level == 3 else 0)
    assert both.optimizer == trained.optimizer
    assert both.open_gradients == trained.open_gradients
    assert both.reduced_gradients == trained.reduced_gradients


def test_frozen_weights_take_half_of_the_backward_pass() -> None:
    def timer(*_: object) -> PassTimes:
        return PassTimes(1.0, 2.0, "measured")

    model = adapted(tied=False)
    frozen, block = model.shapes[0], model.shapes[1]
    plain = ModelShape.llama("m", 2, 16, 32, 4).shapes[1]
    times = FrozenTimes(timer)
    assert times("x", "block", plain, "float32", 8, 1) == PassTimes(1.0, 2.0, "measured")
    assert times("x", "embedding", frozen, "float32", 8, 1) == PassTimes(1.0, 1.0, "estimated")
    share = 100 / (block_params() + 100)
    assert times("x", "block", block, "float32", 8, 1).backward_s == pytest.approx(1 + share)
