"""Ministages in low precision, a dtype for each group: near float32, and one loss scale for all."""

from __future__ import annotations

import logging
import math
from typing import Any

import pytest
import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.utils import logger
from torch import Tensor, nn

from tests.ranks.engine_cases import Case, Result, check_copies, make_engine, run_reference, train
from tests.ranks.engine_models import (
    CausalBlock,
    TokenLoss,
    batches_of,
    lengths_of,
    pad_batch,
    plan_of,
    sentences,
    sum_and_count,
    token_model,
)
from tests.ranks.harness import run_ranks
from zorse_ds.errors import ConfigError

SIZE = 7
STEPS = 5
BATCHES = batches_of(sentences(lengths_of(SIZE * STEPS)), [SIZE] * STEPS)
FP16 = {"initial_scale_power": 8, "hysteresis": 1}
SETTINGS: dict[str, tuple[dict[str, Any], dict[str, str]]] = {
    "bf16": ({"bf16": {"enabled": True}}, {}),
    "bf16, float32 group": ({"bf16": {"enabled": True}}, {"b": "float32"}),
    "bf16 group": ({}, {"a": "bfloat16"}),
    "fp16, float32 group": ({"fp16": {"enabled": True, **FP16}}, {"a": "float32"}),
    "fp16 group": ({"fp16": {"enabled": False, **FP16}}, {"b": "float16"}),
    "fp16 group, bf16": ({"bf16": {"enabled": True}, "fp16": FP16}, {"b": "float16"}),
}
"""Name → sections of the config, dtypes that groups have of their own."""


class FloatTokenLoss(TokenLoss):
    """In float32, whatever the logits are."""

    def __call__(self, logits: Tensor, labels: Tensor) -> tuple[Tensor, int]:
        return sum_and_count(logits.float(), labels)


class PoisonedBlock(CausalBlock):
    """Its gradients are not finite in a backward, where `armed`; what it hands back is."""

    armed = False

    def forward(self, x: Tensor) -> Tensor:
        weight = self.outer.weight
        if self.armed and weight.requires_grad and torch.is_grad_enabled():
            weight = weight * 1.0
            weight.register_hook(lambda grad: grad * float("inf"))
        return x + nn.functional.linear(torch.tanh(self.inner(x)), weight)


def poisoned_model() -> list[nn.Module]:
    """A token model whose third layer can be armed, and whose ends share a weight."""
    layers = token_model()
    block = PoisonedBlock()
    block.load_state_dict(layers[3].state_dict())
    layers[3] = block
    layers[-1].weight = layers[0].weight
    return layers


def plan_dict(dtypes: dict[str, str]) -> dict[str, Any]:
    """Two groups of two stages each; "a" keeps shards of its parameters, "b" has one rank."""
    plan = plan_of([[[2, 2], [1, 2]], [[3, 4]]], [0, 3, 6], zero=[3, 3], weights=[2, 1, 1])
    for group, name in zip(plan["groups"], "ab", strict=True):
        group["name"] = name
        group.update({"dtype": dtypes[name]} if name in dtypes else {})
    stages = [
        {"group": name, "layers": layers}
        for name, layers in zip("abab", [[0, 1], [1, 3], [3, 4], [4, 6]], strict=True)
    ]
    return {**plan, "schedule": "ministage", "stages": stages}


def case_of(name: str, **options: Any) -> Case:
    """Plain SGD, which does not blow up the rounding of small gradients."""
    config, dtypes = SETTINGS[name]
    optimizer = {"type": "SGD", "params": {"lr": 0.2}}
    return Case(
        name,
        plan_dict(dtypes),
        BATCHES,
        layers=poisoned_model,
        loss_fn=FloatTokenLoss(),
        sample_loss=sum_and_count,
        collate_fn=pad_batch,
        config={"optimizer": optimizer, **config, **options},
        optimizer=lambda params: torch.optim.SGD(params, lr=0.2),
    )


def arm(engine: Any, armed: bool) -> None:
    for module in engine.module.modules():
        if isinstance(module, PoisonedBlock):
            module.armed = armed


def run_all(rank: int) -> dict[str, Any]:
    """Every setting: five good steps; again, the second with an infinite gradient on one rank."""
    found: dict[str, Any] = {"refused": refused()}
    # DeepSpeed asks for fast fp16; torch computes it on any CPU, and this process ends soon.
    type(get_accelerator()).is_fp16_supported = lambda self: True
    for name in SETTINGS:
        engine = make_engine(case_of(name))
        good = train(engine, STEPS, iter(BATCHES))
        dtypes = {str(weight.dtype).removeprefix("torch.") for weight in good.weights.values()}
        engine.destroy()
        engine = make_engine(case_of(name, zorse={"optimizer_step": "delayed"}))
        engine.set_dataiterator(iter(BATCHES))
        steps, scales = [], []
        for step in range(3):
            arm(engine, step == 1 and rank == 0)
            steps.append(train(engine, 1))
            scales.append(engine.optimizer.cur_scale)
        skipped = engine.skipped_steps
        engine.destroy()
        found[name] = {
            "good": good,
            "dtypes": dtypes,
            "steps": steps,
            "scales": scales,
            "skipped": skipped,
        }
    found["left out"] = left_out(rank)
    return found


def refused() -> str:
    """What is said where a group's devices lack its dtype."""
    type(get_accelerator()).is_fp16_supported = lambda self: False
    with pytest.raises(ConfigError) as caught:
        make_engine(case_of("fp16 group"))
    return str(caught.value)


def left_out(rank: int) -> dict[str, Any]:
    """An infinite gradient where stages step as soon as their backward ends."""
    heard: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: heard.append(record.getMessage())  # type: ignore[method-assign]
    logger.addHandler(handler)
    engine = make_engine(case_of("bf16", zorse={"optimizer_step": "interleaved"}))
    engine.set_dataiterator(iter(BATCHES))
    first = train(engine, 1)
    arm(engine, rank == 0)
    second = train(engine, 1)
    assert engine.report is not None
    told = (engine.report.skipped, engine.report.not_finite, engine.skipped_steps)
    engine.destroy()
    logger.removeHandler(handler)
    return {"first": first, "second": second, "told": told, "heard": heard}


@pytest.fixture(scope="module")
def ranks() -> list[dict[str, Any]]:
    return run_ranks(3, run_all, timeout_s=120)


@pytest.mark.parametrize("name", SETTINGS)
def test_losses_are_near_float32(name: str, ranks: list[dict[str, Any]]) -> None:
    reference = run_reference(case_of(name))
    for rank in ranks:
        good: Result = rank[name]["good"]
        assert good.losses == pytest.approx(reference.losses, rel=0.01)
        assert good.norms == pytest.approx(reference.norms, rel=0.05)
        assert good.skipped_steps == 0


@pytest.mark.parametrize("name", SETTINGS)
def test_each_group_computes_in_its_dtype(name: str, ranks: list[dict[str, Any]]) -> None:
    config, dtypes = SETTINGS[name]
    default = next((k for k in ("bf16", "fp16") if config.get(k, {}).get("enabled")), "")
    default = {"bf16": "bfloat16", "fp16": "float16", "": "float32"}[default]
    for rank, group in enumerate("aab"):
        assert ranks[rank][name]["dtypes"] == {dtypes.get(group, default)}
    for group_ranks in (ranks[:2], ranks[2:]):
        check_copies([rank[name]["good"] for rank in group_ranks])


@pytest.mark.parametrize("name", SETTINGS)
def test_an_overflow_skips_everywhere_and_halves_the_scale_once(
    name: str, ranks: list[dict[str, Any]]
) -> None:
    scales = [256.0, 128.0, 128.0] if "fp16" in name else [1.0] * 3
    for rank in ranks:
        first, second, third = rank[name]["steps"]
        assert rank[name]["skipped"] == 1
        assert rank[name]["scales"] == scales
        assert not math.isfinite(second.norms[0]) and math.isfinite(third.norms[0])
        for key, weight in first.weights.items():
            assert torch.equal(weight, second.weights[key]), key
            assert weight.isfinite().all()
        assert any(not torch.equal(w, third.weights[key]) for key, w in first.weights.items())


def test_a_dtype_that_a_device_lacks_is_refused_on_every_rank(ranks: list[dict[str, Any]]) -> None:
    for found in ranks:
        assert found["refused"] == (
            "rank 2 (cpu) would compute in float16, which this device lacks; expected another "
            "dtype for the group, 'float32' or 'bfloat16'"
        )


def test_interleaved_the_stage_alone_is_left_out_and_one_rank_says_so(
    ranks: list[dict[str, Any]],
) -> None:
    """Rank 0 hosts layers 0 and 3: armed is the third stage's."""
    for rank, found in enumerate(ranks):
        first, second = (found["left out"][key].weights for key in ("first", "second"))
        stays = {key for key, weight in first.items() if torch.equal(weight, second[key])}
        assert stays == {key for key in first if key.startswith("3.")}, rank
        assert found["left out"]["told"] == (None, (2,), 0)
        heard = ["step 2 left out stages 2: overflow"] if rank == 0 else []
        assert found["left out"]["heard"] == heard
