"""Offload through the real engine: the same update, with a pool in host memory and a lower peak.

Every case runs without offload, with "params" and with "params+activations".
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import nn

from tests.ranks.engine_cases import (
    Case,
    Result,
    check,
    check_copies,
    make_engine,
    run_reference,
    train,
)
from tests.ranks.engine_models import WIDTH, Block, CountedError, Sample, batches_of
from tests.ranks.harness import run_ranks

OFFLOADS = ("none", "params", "params+activations")
HIDDEN, LENGTH, SIZE, STEPS = 32, 12, 14, 3
CUTS = {"1f1b": ("ab", [0, 4, 8]), "ministage": ("abab", [0, 1, 4, 6, 8])}
"""Schedule → which group hosts each stage, where layers are cut."""
ADAMW = {"type": "AdamW", "params": {"lr": 0.01, "eps": 1e-3, "torch_adam": True}}


def layers() -> list[nn.Module]:
    """Wide enough that parameters, their state and activations all weigh something."""
    torch.manual_seed(11)
    blocks = [Block(HIDDEN) for _ in range(6)]
    return [nn.Linear(WIDTH, HIDDEN), *blocks, nn.Linear(HIDDEN, WIDTH)]


def sequences(count: int) -> list[Sample]:
    """Samples of `LENGTH` vectors, so that activations outweigh gradients."""
    values = torch.randn(count, 2, LENGTH, WIDTH, generator=torch.Generator().manual_seed(3))
    return [(value[0], value[1]) for value in values]


def case_of(schedule: str, level: int, clip: float = 0.0, **dtypes: str) -> Case:
    """A group of two ranks with shards of 3 to 1, and a group of one."""
    sizes = {"a": [[3, 2, 3], [4, 2]], "b": [[5, 4, 5]]}
    groups: list[dict[str, Any]] = []
    for name, ranks, weights in (("a", (0, 1), (3, 1)), ("b", (2,), (1,))):
        gpus = [
            {"rank": rank, "micro_batches": own, "shard_weight": weight}
            for rank, own, weight in zip(ranks, sizes[name], weights, strict=True)
        ]
        own = {"dtype": dtypes[name]} if name in dtypes else {}
        groups.append({"name": name, "zero_level": level, "gpus": gpus, **own})
    hosts, cuts = CUTS[schedule]
    stages = [{"group": name, "layers": cuts[i : i + 2]} for i, name in enumerate(hosts)]
    told = "".join(f", {dtype} in {name}" for name, dtype in dtypes.items())
    return Case(
        f"{schedule}, level {level}{told}{', clipped' if clip else ''}",
        {"global_batch_size": SIZE, "schedule": schedule, "groups": groups, "stages": stages},
        batches_of(sequences(SIZE * STEPS), [SIZE] * STEPS),
        layers=layers,
        loss_fn=CountedError(),
        sample_loss=CountedError(),
        config={
            "optimizer": ADAMW,
            "gradient_clipping": clip,
            "zorse": {"count_memory": True},
        },
        optimizer=lambda params: torch.optim.AdamW(params, lr=0.01, eps=1e-3),
        clip=clip,
    )


EXACT = [case_of(schedule, level) for schedule in CUTS for level in range(4)]
EXACT += [case_of("ministage", 3, clip=0.5)]
MIXED = [
    case_of("ministage", 3, a="bfloat16"),
    case_of("ministage", 1, b="bfloat16"),
    case_of("1f1b", 2, a="bfloat16"),
]


@dataclass(frozen=True)
class Seen:
    """What one rank did and held."""

    result: Result
    peak_bytes: int
    """On the device."""
    host_peak_bytes: int
    host_held_bytes: int
    """After the last step."""


def run_all(rank: int) -> dict[tuple[str, str], Seen]:
    """Collective: every case with every kind of offload."""
    return {
        (case.name, offload): seen(case, offload) for case in EXACT + MIXED for offload in OFFLOADS
    }


def seen(case: Case, offload: str) -> Seen:
    groups = [group | {"offload": offload} for group in case.plan["groups"]]
    case = replace(case, name=f"{case.name}, {offload}", plan=case.plan | {"groups": groups})
    engine = make_engine(case)
    result = train(engine, STEPS, iter(case.batches))
    assert engine.report is not None and engine.report.memory is not None
    host = engine.parts.host
    engine.destroy()
    held = (0, 0) if host is None else (host.peak_bytes, host.held_bytes)
    return Seen(result, engine.report.memory.peak_bytes, *held)


@pytest.fixture(scope="module")
def ranks() -> list[dict[tuple[str, str], Seen]]:
    return run_ranks(3, run_all, timeout_s=150)


@pytest.mark.parametrize("offload", OFFLOADS)
@pytest.mark.parametrize("case", EXACT, ids=lambda case: case.name)
def test_the_update_is_that_of_one_process(
    case: Case, offload: str, ranks: list[dict[tuple[str, str], Seen]]
) -> None:
    check([own[case.name, offload].result for own in ranks], run_reference(case))


@pytest.mark.parametrize("offload", OFFLOADS[1:])
@pytest.mark.parametrize("case", EXACT + MIXED, ids=lambda case: case.name)
def test_offload_changes_no_bit(
    case: Case, offload: str, ranks: list[dict[tuple[str, str], Seen]]
) -> None:
    for own in ranks:
        plain, moved = own[case.name, "none"].result, own[case.name, offload].result
        assert (plain.losses, plain.norms) == (moved.losses, moved.norms)
        assert plain.weights.keys() == moved.weights.keys()
        for name, weight in plain.weights.items():
            assert torch.equal(weight, moved.weights[name]), name


@pytest.mark.parametrize("case", MIXED, ids=lambda case: case.name)
def test_groups_of_unlike_dtype_stay_near_one_process(
    case: Case, ranks: list[dict[tuple[str, str], Seen]]
) -> None:
    reference = run_reference(case)
    results = [own[case.name, OFFLOADS[-1]].result for own in ranks]
    for result in results:
        assert result.losses == pytest.approx(reference.losses, rel=0.02)
    for group in (results[:2], results[2:]):
        check_copies(group)


@pytest.mark.parametrize("case", EXACT + MIXED, ids=lambda case: case.name)
def test_the_host_holds_what_the_device_need_not(
    case: Case, ranks: list[dict[tuple[str, str], Seen]]
) -> None:
    for own in ranks:
        none, params, activations = (own[case.name, offload] for offload in OFFLOADS)
        assert none.host_peak_bytes == 0
        assert 0 < params.host_peak_bytes < activations.host_peak_bytes
        assert none.peak_bytes > params.peak_bytes >= activations.peak_bytes
        # In bfloat16 activations are small: the peak may be where gradients are summed.
        assert params.peak_bytes > activations.peak_bytes or case in MIXED
        # Activations are gone after the step, masters and optimizer state stay.
        assert params.host_held_bytes == activations.host_held_bytes > 0
