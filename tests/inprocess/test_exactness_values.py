"""What layers may hand to each other, through stages of unlike width."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.inprocess.exact_cases import (
    BATCH,
    FOUR_GROUPS,
    SHAPES,
    WIDTH,
    Block,
    assert_exact,
    blocks,
    make_plan,
    squared_error,
    vectors,
)
from tests.inprocess.local_job import Job, Step, run
from zorse_ds.errors import ModelError

CUTS = {**SHAPES, "four": FOUR_GROUPS}
Value = Any


class Open(nn.Module):
    """A vector to everything that can travel."""

    def __init__(self) -> None:
        super().__init__()
        self.block = Block()

    def forward(self, value: Tensor) -> Value:
        hidden = self.block(value)
        size = len(value)
        ids = (value[:, :1] * 10).long().expand(size, 40).contiguous()
        return {
            "hidden": hidden,
            "residual": (hidden, hidden),
            "ids": ids,
            "mask": ids.remainder(2) == 0,
            "input": value,
            "nested": [({"deep": torch.sin(hidden)}, [None, 2]), (), {}],
            "ignored": torch.exp(hidden),
            "row": torch.arange(WIDTH, dtype=value.dtype)[None],
            "table": torch.ones(50, 2, dtype=value.dtype),
            "number": torch.tensor(0.25, dtype=value.dtype),
            "constants": [1, 0.5, "plus", True, None],
        }


class Middle(Block):
    """Uses all but what it hands on untouched."""

    def forward(self, value: Value) -> Value:
        one, half, sign, yes, nothing = value["constants"]
        assert (one, half, sign, yes, nothing) == (1, 0.5, "plus", True, None)
        assert value["nested"][0][1] == [None, 2] and value["nested"][1:] == [(), {}]
        assert value["ids"].dtype == torch.int64 and value["mask"].dtype == torch.bool
        assert not value["ids"].requires_grad and not value["input"].requires_grad
        assert value["table"].shape == (50, 2)
        hidden = super().forward(value["hidden"]) * value["table"].mean()
        odd = value["ids"][:, 7:8].remainder(3).to(hidden.dtype)
        hidden = torch.where(value["mask"][:, :1], hidden, hidden * 0.9) + half * odd
        hidden = hidden + value["row"] * value["number"] + value["input"]
        first, second = value["residual"]
        return {**value, "hidden": hidden, "residual": (second, 0.5 * first + 0.1 * hidden)}


class Drop(Middle):
    """Leaves out what nobody used."""

    def forward(self, value: Value) -> Value:
        changed = super().forward(value)
        changed.pop("ignored")
        return changed


class Close(nn.Module):
    """Everything to a vector again."""

    def __init__(self) -> None:
        super().__init__()
        self.block = Block()

    def forward(self, value: Value) -> Tensor:
        first, second = value["residual"]
        return self.block(value["hidden"] + first * second + value["nested"][0][0]["deep"])


@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize("shape", CUTS)
def test_all_that_can_travel(shape: str, recompute: str) -> None:
    torch.manual_seed(0)
    layers = [Open(), Middle(), Middle(), Drop(), Middle(), Close()]
    job = Job([layer.double() for layer in layers], squared_error)
    plan = make_plan(CUTS[shape], 6, recompute=recompute)
    steps = [Step(vectors(i, size), clip=0.5) for i, size in enumerate((BATCH, BATCH, 5))]
    assert_exact(job, plan, steps)


@pytest.mark.parametrize("shape", CUTS)
def test_tuples_with_tensors_that_need_no_gradient(shape: str) -> None:
    first, *others = blocks(6)
    pair = [lambda value: (value, value.detach() ** 2, (value > 0))]
    layers: list[Any] = [pair[0], OnFirst(first), *(OnFirst(other) for other in others[:-1])]
    layers += [lambda value: value[0] + value[1] * value[2], others[-1]]
    plan = make_plan(CUTS[shape], 8)
    assert_exact(Job(layers, squared_error), plan, [Step(vectors(i)) for i in range(2)])


class OnFirst(nn.Module):
    """Changes the first of a tuple."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, value: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return (self.layer(value[0]) + value[1], *value[1:])


@pytest.mark.parametrize("shape", CUTS)
def test_inputs_and_labels_of_many_parts(shape: str) -> None:
    """Structures in the data, an output with several tensors, of which one is not used."""
    samples = [
        ({"x": x, "pair": (x * 2, torch.tensor(i))}, (y, torch.tensor(i)))
        for i, (x, y) in enumerate(vectors(0))
    ]
    block, *others = blocks(4)
    layers = [
        lambda value: (value["x"] + value["pair"][0], value["pair"][1]),
        PassNumber(block),
        *(PassNumber(other) for other in others),
    ]

    def loss_fn(outputs: Any, labels: Any) -> Tensor:
        (hidden, numbers), (wanted, labelled) = outputs, labels
        assert numbers.equal(labelled)
        return ((hidden - wanted) ** 2).mean()

    assert_exact(Job(layers, loss_fn), make_plan(CUTS[shape], 5), [Step(samples)] * 2)


class PassNumber(OnFirst):
    """Each sample's number travels along: samples must not change places."""

    def forward(self, value: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        hidden, numbers = value
        return self.layer(hidden) + numbers[:, None] / 100, numbers


class Returns(nn.Module):
    """A layer with a parameter that returns something else than it should."""

    def __init__(self, make: Callable[[nn.Parameter, Tensor], Any]) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.ones(50, WIDTH, dtype=torch.float64))
        self.make = make

    def forward(self, value: Tensor) -> Any:
        return self.make(self.table, value)


class Custom:
    """An object that no wire carries."""


REFUSED: dict[str, tuple[Callable[[nn.Parameter, Tensor], Any], str]] = {
    "gradient without sample axis": (
        lambda table, value: (value, table * 2),
        r"a tensor of shape \[50, 3\] that needs a gradient leaves a stage with \d+ samples; "
        r"expected its dim 0 to be the sample axis",
    ),
    "scalar with a gradient": (
        lambda table, value: (value, table.sum()),
        r"a tensor of shape \[\] that needs a gradient",
    ),
    "custom object": (
        lambda table, value: (value, Custom()),
        "a layer returned a Custom; expected",
    ),
    "set": (lambda table, value: {1, 2}, "a layer returned a set; expected"),
    "torch.Size": (lambda table, value: (value, value.shape), "a layer returned a Size; expected"),
    "keys that are no words": (
        lambda table, value: {1: value},
        "a layer returned a dict; expected",
    ),
    "structures that differ": (
        lambda table, value: (value,) if len(value) % 2 else [value],
        "values of different structure",
    ),
    "tensor beside None": (
        lambda table, value: (value, value if len(value) % 2 else None),
        "beside something else at the same place",
    ),
    "constants that differ": (
        lambda table, value: (value, len(value)),
        "beside something else at the same place",
    ),
    "shared tensors that differ": (
        lambda table, value: (value, torch.full((50,), len(value))),
        r"a tensor of shape \[50\] beside something else at the same place",
    ),
    "sample axis by chance": (
        lambda table, value: (value, torch.ones(2, 2)),
        r"a tensor of shape \[2, 2\] beside something else at the same place",
    ),
    "as many dims in each": (
        lambda table, value: (value, torch.ones(len(value), *[1] * len(value))),
        "expected as many dims in each",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_travel_is_refused(case: str) -> None:
    make, message = REFUSED[case]
    plan = make_plan([[[2, 3, 2, 4]], [[5], [6]]], 2)
    job = Job([Returns(make), lambda value: value[0]], squared_error)
    with pytest.raises(ModelError, match=message):
        run(job, plan, [Step(vectors(0))])


def test_a_row_for_all_samples_meets_a_row_for_each() -> None:
    """Of [1, …] nobody can tell which it is when a micro-batch has one sample; both are right."""
    layers = [
        Returns(lambda table, value: (value * table[0], torch.ones(1, WIDTH))),
        Block().double(),
    ]
    layers.insert(1, Sum())
    for sizes in ([1, 2, 3, 5], [2, 1, 3, 5], [1] * 11, [5, 1, 1, 4]):
        plan = make_plan([[sizes], [[4], [4, 3]]], 3)
        assert_exact(Job(layers, squared_error), plan, [Step(vectors(0))])


class Sum(nn.Module):
    """Adds up a pair."""

    def forward(self, value: tuple[Tensor, Tensor]) -> Tensor:
        return value[0] + value[1]
