"""`LayerListStages`: everything that a list of layers may consist of, under any plan."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from deepspeed.runtime.pipe.module import LayerSpec, TiedLayerSpec
from torch import Tensor, nn

from tests.inprocess.exact_cases import (
    BATCH,
    SHAPES,
    WIDTH,
    Block,
    assert_exact,
    assert_same,
    blocks,
    make_plan,
    ragged_lengths,
    sentences,
    squared_error,
    tied_language_model,
    token_sum,
    vectors,
)
from tests.inprocess.local_job import Job, Step, adamw, run
from tests.inprocess.plain_job import PlainModel, train_plainly
from zorse_ds.core.recompute import KEPT
from zorse_ds.errors import ModelError
from zorse_ds.integrations.deepspeed.layers import LayerListStages
from zorse_ds.ranges import Range

SEED = 77


class Double(nn.Module):
    """A module whose parameters lie two levels down."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.ModuleDict({"linear": nn.Linear(WIDTH, WIDTH, dtype=torch.float64)})

    def forward(self, value: Tensor) -> Tensor:
        return torch.tanh(self.inner["linear"](value))


class DoubleBlock(Block):
    """A `Block` in float64."""

    def __init__(self) -> None:
        super().__init__()
        self.double()


def backwards(module: Any, value: Tensor) -> Tensor:
    """Another way to use a shared module."""
    return value - 0.5 * module(value)


def from_seed(kind: type[nn.Module], index: int) -> nn.Module:
    """What a `LayerSpec` at `index` must build, whatever the plan."""
    torch.manual_seed(SEED + index)
    return kind()


def steps() -> list[Step]:
    """Two of them, for vectors."""
    return [Step(vectors(i), clip=0.05) for i in range(2)]


def scale(value: Tensor) -> Tensor:
    """A plain function as layer."""
    return 1.5 * value


@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize("shape", SHAPES)
def test_specs_modules_and_functions_mixed(shape: str, recompute: str) -> None:
    module = blocks(1)[0]
    specs = [LayerSpec(DoubleBlock), scale, module, LayerSpec(Double), torch.tanh, module]
    twin = [from_seed(DoubleBlock, 0), scale, module, from_seed(Double, 3), torch.tanh, module]
    job = Job(specs, squared_error, base_seed=SEED)
    outcome = run(job, make_plan(SHAPES[shape], 6, recompute=recompute), steps())
    plain = train_plainly(PlainModel(twin), squared_error, steps(), adamw)
    assert_same(outcome, plain, [0, 1])


@pytest.mark.parametrize("shape", SHAPES)
def test_tied_specs(shape: str) -> None:
    """Two keys, one of them used three times, with parameters two levels down."""
    specs = [
        TiedLayerSpec("a", DoubleBlock),
        TiedLayerSpec("b.c", Double),
        TiedLayerSpec("a", DoubleBlock, forward_fn=backwards),
        LayerSpec(DoubleBlock),
        TiedLayerSpec("a", DoubleBlock),
        TiedLayerSpec("b.c", Double, forward_fn=backwards),
    ]
    a, b, own = from_seed(DoubleBlock, 0), from_seed(Double, 1), from_seed(DoubleBlock, 3)
    model = PlainModel([a, b, a, own, a, b], [None, None, backwards, None, None, backwards])
    outcome = run(Job(specs, squared_error, base_seed=SEED), make_plan(SHAPES[shape], 6), steps())
    plain = train_plainly(model, squared_error, steps(), adamw)
    renamed = {"0.": "tied.a.", "1.": "tied.b.c."}
    plain.values = [
        {renamed.get(name[:2], name[:2]) + name[2:]: t for name, t in values.items()}
        for values in plain.values
    ]
    assert_same(outcome, plain, [0, 1])


class Other(DoubleBlock):
    """What a later spec of a key says is not built: the first one makes the module."""

    def forward(self, value: Tensor) -> Tensor:
        return 100.0 * super().forward(value)


@pytest.mark.parametrize("shape", SHAPES)
def test_the_first_spec_of_a_key_makes_the_module(shape: str) -> None:
    specs = [TiedLayerSpec("t", DoubleBlock), LayerSpec(Double), TiedLayerSpec("t", Other)]
    block = from_seed(DoubleBlock, 0)
    outcome = run(Job(specs, squared_error, base_seed=SEED), make_plan(SHAPES[shape], 3), steps())
    model = PlainModel([block, from_seed(Double, 1), block])
    plain = train_plainly(model, squared_error, steps(), adamw)
    plain.values = [
        {name.replace("0.", "tied.t.", 1) if name[0] == "0" else name: t for name, t in v.items()}
        for v in plain.values
    ]
    assert_same(outcome, plain, [0, 1])


@pytest.mark.parametrize("shape", SHAPES)
def test_a_parameter_shared_between_modules(shape: str) -> None:
    layers = tied_language_model(4)
    batches = [Step(sentences(i, ragged_lengths(i))) for i in range(2)]
    assert_exact(Job(layers, token_sum), make_plan(SHAPES[shape], 6), batches)


def initial_weights(source: LayerListStages, *cuts: Range) -> dict[str, Tensor]:
    """Weights by name; those that several stages hold must agree."""
    weights: dict[str, Tensor] = {}
    for cut in cuts:
        torch.manual_seed(cut.start + 5)
        stage = source.build(cut, recomputed=KEPT, owns=lambda tie, at=cut.start: at == 0)
        for name, parameter in stage.global_parameters():
            assert weights.setdefault(name, parameter.detach()).equal(parameter)
    return weights


def test_initial_weights_do_not_depend_on_the_plan() -> None:
    specs = [
        TiedLayerSpec("e", Double),
        LayerSpec(DoubleBlock),
        LayerSpec(DoubleBlock),
        TiedLayerSpec("e", Double, forward_fn=backwards),
    ]
    source = LayerListStages(specs, SEED)
    whole = initial_weights(source, Range(0, 4))
    for cuts in ([(0, 1), (1, 4)], [(0, 2), (2, 3), (3, 4)], [(0, 1), (1, 2), (2, 3), (3, 4)]):
        cut = initial_weights(source, *(Range(*bounds) for bounds in cuts))
        assert cut.keys() == whole.keys()
        assert all(tensor.equal(whole[name]) for name, tensor in cut.items())
    assert not whole["1.first.weight"].equal(whole["2.first.weight"])


def test_building_leaves_the_generator_alone() -> None:
    torch.manual_seed(3)
    expected = torch.rand(2)
    torch.manual_seed(3)
    LayerListStages([LayerSpec(Double)], SEED).build(
        Range(0, 1), recomputed=KEPT, owns=lambda tie: True
    )
    assert torch.rand(2).equal(expected)


def test_names_of_layers() -> None:
    layers = [LayerSpec(Double), nn.Tanh(), scale, TiedLayerSpec("x", nn.Linear, 2, 2)]
    assert LayerListStages(layers, 0).layer_names == ("Double", "Tanh", "scale", "Linear")


def test_an_empty_list_is_refused() -> None:
    with pytest.raises(ModelError, match="layers is empty; expected"):
        LayerListStages([], 0)


def test_what_is_no_layer_is_refused() -> None:
    source = LayerListStages([Double(), 3], 0)  # type: ignore[list-item]
    with pytest.raises(ModelError, match="a layer is a int; expected a LayerSpec"):
        source.build(Range(0, 2), recomputed=KEPT, owns=lambda tie: True)


def test_ranks_that_start_from_other_weights_start_alike(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Weights come from their owners however they were made (here: each rank drew its own)."""
    monkeypatch.setattr(LayerListStages, "_built", lambda self, spec, seed_index: spec.build())
    specs = [LayerSpec(DoubleBlock), TiedLayerSpec("t", Double), TiedLayerSpec("t", Double)]
    for dtype in (None, torch.bfloat16):
        for zero_level in (0, 1, 2, 3):
            job = Job(specs, lambda o, y: squared_error(o.double(), y), dtype=dtype)
            plan = make_plan(SHAPES["2-1-2"], 3, zero_levels=[zero_level], weights=[1])
            batch = [(x.to(dtype or x.dtype), y) for x, y in vectors(0, BATCH)]
            run(job, plan, [Step(batch)] * 3)
