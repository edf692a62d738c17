"""Optimizers, schedules, clipping and overflow: one update on every rank, however it is given."""

from __future__ import annotations

import math
from collections.abc import Iterable
from functools import partial
from typing import Any

import pytest
import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.lr_schedules import WarmupDecayLR, WarmupLR
from torch import Tensor
from torch.optim import lr_scheduler

import zorse_ds
from tests.ranks.engine_cases import (
    SGD,
    Case,
    Result,
    check,
    check_copies,
    make_engine,
    run_cases,
    run_reference,
    sgd,
    train,
)
from tests.ranks.engine_models import Block, batches_of, mlp, plan_of, vectors
from tests.ranks.harness import run_ranks

SIZE = 7
STEPS = 4
PLAN = plan_of([[[3, 1], [2, 1]], [[2, 5]]], [0, 3, 6], zero=[2, 1], weights=[1, 0, 1])
BATCHES = batches_of(vectors(STEPS * SIZE), [SIZE] * STEPS)


def adam(name: str, **params: Any) -> dict[str, Any]:
    return {"optimizer": {"type": name, "params": {"torch_adam": True, "eps": 1e-3} | params}}


def case_of(name: str, **options: Any) -> Case:
    return Case(name, PLAN, BATCHES, **options)


def scheduled(name: str, make: Any, **params: Any) -> Case:
    return case_of(
        name,
        config={"scheduler": {"type": name, "params": params}},
        scheduler=lambda optimizer: make(optimizer, **params),
    )


def two_groups(named: Iterable[tuple[str, Tensor]]) -> list[dict[str, Any]]:
    """Biases without weight decay, at a rate of their own."""
    params = list(named)
    return [
        {"params": [p for n, p in params if not n.endswith("bias")], "weight_decay": 0.1},
        {"params": [p for n, p in params if n.endswith("bias")], "lr": 0.02},
    ]


def two_groups_of(model: Any, optimizer: Any) -> Any:
    return optimizer(two_groups(model.named_parameters()))


def reference_groups(params: Iterable[Tensor]) -> torch.optim.Optimizer:
    """The same groups told by shape: only biases have one dim."""
    params = list(params)
    groups = [
        {"params": [p for p in params if p.dim() > 1], "weight_decay": 0.1},
        {"params": [p for p in params if p.dim() == 1], "lr": 0.02},
    ]
    return torch.optim.SGD(groups, lr=0.1, momentum=0.9)


def client(model: Any) -> dict[str, Any]:
    """An optimizer and a schedule that know each other."""
    optimizer = sgd(model.parameters())
    return {"optimizer": optimizer, "lr_scheduler": lr_scheduler.StepLR(optimizer, 2, 0.1)}


def client_with_callable_schedule(model: Any) -> dict[str, Any]:
    make = partial(lr_scheduler.StepLR, step_size=2, gamma=0.1)
    return {"optimizer": sgd, "lr_scheduler": make}


def step_lr(optimizer: torch.optim.Optimizer) -> Any:
    return lr_scheduler.StepLR(optimizer, 2, 0.1)


momentum_sgd = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
CASES = [
    case_of("default clipping", config={"gradient_clipping": 1.0}, clip=1.0),
    case_of("no clipping"),
    case_of("hard clipping", config={"gradient_clipping": 0.01}, clip=0.01),
    case_of(
        "Adam",
        config=adam("Adam", lr=0.01, weight_decay=0.1, adam_w_mode=False),
        optimizer=lambda p: torch.optim.Adam(p, lr=0.01, eps=1e-3, weight_decay=0.1),
    ),
    case_of(
        "AdamW",
        config=adam("AdamW", lr=0.01, weight_decay=0.1),
        optimizer=lambda p: torch.optim.AdamW(p, lr=0.01, eps=1e-3, weight_decay=0.1),
    ),
    case_of(
        "RMSprop",
        config={"optimizer": {"type": "RMSprop", "params": {"lr": 0.01, "eps": 1e-2}}},
        optimizer=lambda p: torch.optim.RMSprop(p, lr=0.01, eps=1e-2),
    ),
    scheduled("WarmupLR", WarmupLR, warmup_num_steps=3, warmup_max_lr=0.2),
    scheduled(
        "WarmupDecayLR", WarmupDecayLR, total_num_steps=6, warmup_num_steps=2, warmup_max_lr=0.2
    ),
    scheduled("StepLR", lr_scheduler.StepLR, step_size=2, gamma=0.1),
    scheduled("CosineAnnealingLR", lr_scheduler.CosineAnnealingLR, T_max=5),
    case_of("client instances", arguments=client, scheduler=step_lr),
    case_of("client callables", arguments=client_with_callable_schedule, scheduler=step_lr),
    case_of(
        "param groups, optimizer in JSON",
        arguments=lambda model: {"model_parameters": two_groups(model.named_parameters())},
        optimizer=reference_groups,
    ),
    case_of(
        "param groups, client instance",
        arguments=lambda model: {"optimizer": two_groups_of(model, momentum_sgd)},
        optimizer=reference_groups,
    ),
    case_of(
        "schedule in JSON, client instance",
        arguments=lambda model: {"optimizer": sgd(model.parameters())},
        config={"scheduler": {"type": "StepLR", "params": {"step_size": 2, "gamma": 0.1}}},
        scheduler=step_lr,
    ),
]


@pytest.fixture(scope="module")
def results() -> dict[str, list[Result]]:
    return run_cases(CASES)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_an_update_equals_one_process(case: Case, results: dict[str, list[Result]]) -> None:
    check(results[case.name], run_reference(case))


def test_clipping_was_at_work(results: dict[str, list[Result]]) -> None:
    assert min(results["default clipping"][0].norms) > 1.0


def without_clipping_key(rank: int) -> Result:
    """`gradient_clipping` left out means DeepSpeed's default."""
    model = zorse_ds.ZorsePipelineModule(
        mlp(), zorse_ds.Plan.from_dict(PLAN), loss_fn=torch.nn.MSELoss()
    )
    engine, *_ = zorse_ds.initialize(model=model, config={"optimizer": SGD})
    result = train(engine, STEPS, iter(BATCHES))
    engine.destroy()
    return result


def test_clipping_left_out_is_one() -> None:
    check(run_ranks(3, without_clipping_key, timeout_s=60), run_reference(CASES[0]))


class Poisoned(Block):
    """Its gradient is not finite in one backward, where `armed`."""

    armed = False

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = super().forward(x)
        if self.armed and result.requires_grad:
            result.register_hook(lambda grad: grad * float("nan"))
        return result


def poisoned_layers() -> list[Any]:
    torch.manual_seed(21)
    return [Poisoned() for _ in range(6)]


PRECISIONS: dict[str, dict[str, Any]] = {
    "fp32": {},
    "bf16": {"bf16": {"enabled": True}},
    "fp16": {"fp16": {"enabled": True, "initial_scale_power": 8, "hysteresis": 1}},
}


def in_precision(samples: Any, dtype: torch.dtype) -> Any:
    return [[(x.to(dtype), y.to(dtype)) for x, y in batch] for batch in samples]


def overflowed(rank: int, precision: str) -> dict[str, Any]:
    """Five steps; in the second, one gradient on rank 1 is not finite."""
    if precision == "fp16":
        # DeepSpeed asks for fast fp16; torch computes it on any CPU, and this process ends soon.
        type(get_accelerator()).is_fp16_supported = lambda self: True
    schedule = {"scheduler": {"type": "StepLR", "params": {"step_size": 1, "gamma": 0.5}}}
    case = case_of(precision, layers=poisoned_layers, config=PRECISIONS[precision] | schedule)
    engine = make_engine(case)
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[precision]
    batches = [*in_precision(BATCHES, dtype), *in_precision(BATCHES[:1], dtype)]
    engine.set_dataiterator(iter(batches))
    steps, scales = [], []
    for step in range(5):
        for module in engine.module.modules():
            if isinstance(module, Poisoned):
                module.armed = step == 1 and rank == 1
        steps.append(train(engine, 1))
        scales.append(engine.optimizer.cur_scale)
    engine.destroy()
    return {"steps": steps, "scales": scales, "skipped": engine.skipped_steps}


@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_gradient_that_is_not_finite_skips_the_step_everywhere(precision: str) -> None:
    results = run_ranks(3, overflowed, precision, timeout_s=60)
    for result in results:
        first, second, third, *_ = steps = result["steps"]
        assert result["skipped"] == 1
        assert [step.rates for step in steps] == [[0.05], [0.05], [0.025], [0.0125], [0.00625]]
        assert not math.isfinite(second.norms[0])
        for name, weight in first.weights.items():
            assert torch.equal(weight, second.weights[name])
            assert weight.isfinite().all()
            assert not torch.equal(weight, third.weights[name])
    check_copies([result["steps"][-1] for result in results])
    before, after = (256.0, 128.0) if precision == "fp16" else (1.0, 1.0)
    assert all(result["scales"] == [before, *[after] * 4] for result in results)


def low_precision_loss(rank: int, precision: str) -> list[float]:
    """Loss of an engine that only evaluates, of one that trains, and after three steps."""
    if precision == "fp16":
        type(get_accelerator()).is_fp16_supported = lambda self: True
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}[precision]
    batch = in_precision(BATCHES[:1], dtype)[0]
    losses = []
    for optimizer in ({"optimizer": None}, {}):
        engine = make_engine(case_of(precision, config=PRECISIONS[precision] | optimizer))
        losses.append(float(engine.eval_batch(iter([batch]))))
    engine.set_dataiterator(iter([batch] * 3))
    for _ in range(3):
        engine.train_batch()
    losses.append(float(engine.eval_batch(iter([batch]))))
    return losses


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_low_precision_is_near_full_precision(precision: str) -> None:
    same = [BATCHES[0]] * 3
    reference = run_reference(Case("", PLAN, same))
    for before, trained_before, after in run_ranks(3, low_precision_loss, precision, timeout_s=60):
        assert before == trained_before == pytest.approx(reference.losses[0], rel=0.03)
        assert after < 0.95 * reference.losses[0]
