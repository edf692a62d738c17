"""What layers may be and hand to each other: tuples, functions, ties, frozen parts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from deepspeed.pipe import LayerSpec, TiedLayerSpec
from torch import Tensor, nn

from tests.ranks.engine_cases import Case, Result, check, run_cases, run_reference
from tests.ranks.engine_models import (
    VOCABULARY,
    WIDTH,
    Block,
    CausalBlock,
    FrozenBlock,
    TokenLoss,
    batches_of,
    lengths_of,
    mlp,
    pad_batch,
    plan_of,
    sentences,
    sum_and_count,
    vectors,
)

SIZE = 7
STEPS = 4
TWO_ONE = plan_of([[[3, 1], [2, 1]], [[2, 5]]], [0, 3, 6], zero=[2, 1], weights=[1, 2, 1])
ONE_TWO = plan_of([[[2, 5]], [[3, 1], [2, 1]]], [0, 4, 6], zero=[1, 2], weights=[1, 0, 1])
ONE_TWO_TWO = plan_of(
    [[[4, 3]], [[3, 1], [2, 1]], [[1, 1, 1], [4]]],
    [0, 2, 4, 6],
    zero=[2, 1, 2],
    weights=[1, 1, 3, 0, 1],
)


class Spread(nn.Module):
    """One tensor → all that may travel: used, unused, ignored, constant, without gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> tuple[Any, ...]:
        positive = (x > 0).detach()
        return x, torch.sigmoid(self.gate(x)), positive, None, 3, True, {"ignored": x * 2}


class Pass(nn.Module):
    """Changes one leaf and hands the others on."""

    def __init__(self) -> None:
        super().__init__()
        self.block = Block()

    def forward(self, value: tuple[Any, ...]) -> tuple[Any, ...]:
        x, *others = value
        return self.block(x), *others


class Gather(nn.Module):
    """Everything → one tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, value: tuple[Any, ...]) -> Tensor:
        x, gate, positive, nothing, three, true, _ = value
        assert nothing is None and three == 3 and true is True and positive.dtype == torch.bool
        result: Tensor = self.out(x * gate * three + positive)
        return result


def tuple_layers() -> list[Any]:
    torch.manual_seed(11)
    return [nn.Linear(WIDTH, WIDTH), Spread(), Pass(), Pass(), Gather(), torch.tanh]


def unembed(embedding: nn.Embedding, x: Tensor) -> Tensor:
    return x @ embedding.weight.T


def tied_layers() -> list[Any]:
    embed = (VOCABULARY, WIDTH)
    return [
        TiedLayerSpec("embed", nn.Embedding, *embed),
        *(LayerSpec(CausalBlock, WIDTH) for _ in range(4)),
        TiedLayerSpec("embed", nn.Embedding, *embed, forward_fn=unembed),
    ]


def shared_layers() -> list[Any]:
    """One module object at three places: used thrice with one set of weights."""
    torch.manual_seed(12)
    block = Block()
    return [nn.Linear(WIDTH, WIDTH), block, Block(), block, Block(), block]


def frozen_in_between() -> list[Any]:
    torch.manual_seed(13)
    return [Block(), FrozenBlock(), Block(), FrozenBlock(), FrozenBlock(), Block()]


def frozen_first() -> list[Any]:
    torch.manual_seed(14)
    return [FrozenBlock(), FrozenBlock(), FrozenBlock(), Block(), FrozenBlock(), Block()]


def frozen_last() -> list[Any]:
    torch.manual_seed(15)
    return [Block(), Block(), Block(), Block(), FrozenBlock(), FrozenBlock()]


def vector_case(name: str, layers: Any, plan: dict[str, Any], **options: Any) -> Case:
    batches = batches_of(vectors(STEPS * SIZE), [SIZE] * STEPS)
    return Case(name, plan, batches, layers=layers, **options)


def tied_case(name: str, plan: dict[str, Any]) -> Case:
    return Case(
        name,
        plan,
        batches_of(sentences(lengths_of(STEPS * SIZE)), [SIZE] * STEPS),
        layers=tied_layers,
        loss_fn=TokenLoss(),
        sample_loss=sum_and_count,
        collate_fn=pad_batch,
        config={"gradient_clipping": 0.5},
        clip=0.5,
    )


def recomputed(plan: dict[str, Any]) -> dict[str, Any]:
    return plan | {"groups": [group | {"recompute": "full"} for group in plan["groups"]]}


CASES = [
    vector_case("tuples, 2-1", tuple_layers, TWO_ONE),
    vector_case("tuples, 1-2", tuple_layers, ONE_TWO),
    vector_case("tuples recomputed, 1-2-2", tuple_layers, recomputed(ONE_TWO_TWO)),
    tied_case("tied 2-1", TWO_ONE),
    tied_case("tied 1-2", ONE_TWO),
    tied_case("tied 1-2-2", ONE_TWO_TWO),
    vector_case("shared module 1-2-2", shared_layers, ONE_TWO_TWO),
    vector_case("frozen in between", frozen_in_between, ONE_TWO_TWO),
    vector_case("frozen first", frozen_first, TWO_ONE),
    vector_case("frozen first, recomputed", frozen_first, recomputed(TWO_ONE)),
    vector_case("frozen last group", frozen_last, ONE_TWO),
    vector_case("frozen first group, recomputed", frozen_first, recomputed(ONE_TWO_TWO)),
    vector_case("specs", lambda: [LayerSpec(Block, WIDTH) for _ in range(6)], TWO_ONE),
    vector_case("functions", lambda: [*mlp(4), torch.tanh, lambda x: x + 1], ONE_TWO),
]


@pytest.fixture(scope="module")
def results() -> dict[str, list[Result]]:
    return run_cases(CASES)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_layers_equal_one_process(case: Case, results: dict[str, list[Result]]) -> None:
    check(results[case.name], run_reference(case))


def test_a_tied_weight_is_held_by_both_ends(results: dict[str, list[Result]]) -> None:
    holders = ["tied.embed.weight" in result.weights for result in results["tied 1-2-2"]]
    assert holders == [True, False, False, True, True]


def test_frozen_weights_stay(results: dict[str, list[Result]]) -> None:
    before = dict(frozen_first()[0].named_parameters())
    for result in results["frozen first"][:2]:
        for name, weight in before.items():
            assert torch.equal(result.weights[f"0.{name}"], weight)
