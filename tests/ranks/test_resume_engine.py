"""The engine's save_checkpoint and load_checkpoint: everything goes on, under any plan."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from deepspeed.runtime.lr_schedules import WarmupDecayLR
from torch import nn

from tests.ranks.checkpoint_jobs import (
    CONFIG,
    NUM_SAMPLES,
    PLANS,
    SIZE,
    Trail,
    client_state,
    ids_of,
    next_part,
    next_parts,
    same,
    whole_run,
    world_size,
)
from tests.ranks.engine_models import WIDTH, Block, vectors
from tests.ranks.harness import run_ranks
from zorse_ds.core.order import DataPosition, SampleOrder

SAVED_AT, STEPS = 5, 11
"""The save is in the second epoch, the end in the third."""
SEED = 1234


Whole = dict[str, list[Trail]]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("checkpoints")


@pytest.fixture(scope="module")
def ran(root: Path) -> dict[str, list[tuple[Trail, tuple[float, ...]]]]:
    """Every plan, with a checkpoint on its way."""
    return {
        name: run_ranks(
            world_size(name), whole_run, name, root / name, SAVED_AT, STEPS, timeout_s=90
        )
        for name in PLANS
    }


@pytest.fixture(scope="module")
def whole(ran: dict[str, list[tuple[Trail, tuple[float, ...]]]]) -> Whole:
    return {name: [trail for trail, _ in ranks] for name, ranks in ran.items()}


def reference() -> list[float]:
    """Losses of plain PyTorch with DeepSpeed's schedule: the same samples in one process."""
    layers = []
    for index in range(6):
        torch.manual_seed(SEED + index)
        layers.append(Block() if index else nn.Linear(WIDTH, WIDTH))
    model, data = nn.Sequential(*layers), vectors(NUM_SAMPLES)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, eps=1e-3, weight_decay=0.01)
    schedule = WarmupDecayLR(optimizer, **CONFIG["scheduler"]["params"])
    losses, position = [], DataPosition()
    order = SampleOrder(NUM_SAMPLES, SIZE, shuffle=True, seed=SEED, drop_last=False)
    for _ in range(STEPS):
        batch, position = order.next_batch(position)
        optimizer.zero_grad()
        loss = torch.stack(
            [nn.functional.mse_loss(model(data[i][0]), data[i][1]) for i in batch.ids]
        ).mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        schedule.step()
        losses.append(float(loss.detach()))
    return losses


PAIRS = [
    ("3 ranks", "3 ranks"),
    ("3 ranks", "3 other ranks"),
    ("3 ranks", "ministages"),
    ("3 ranks", "1 rank"),
    ("ministages", "ministages"),
    ("ministages", "2 ranks"),
    ("3 other ranks", "2 ranks"),
    ("1 rank", "3 ranks"),
    ("2 ranks", "ministages"),
]


@pytest.fixture(scope="module")
def resumed(root: Path, whole: Whole) -> dict[tuple[str, str], list[Trail]]:
    trails: dict[tuple[str, str], list[Trail]] = {}
    for then in {then for _, then in PAIRS}:
        firsts = [first for first, second in PAIRS if second == then]
        roots = [root / first for first in firsts]
        by_rank = run_ranks(
            world_size(then), next_parts, then, roots, STEPS - SAVED_AT, timeout_s=120
        )
        for index, first in enumerate(firsts):
            trails[first, then] = [own[index] for own in by_rank]
    return trails


Resumed = dict[tuple[str, str], list[Trail]]


@pytest.mark.parametrize("pair", PAIRS, ids=" then ".join)
def test_losses_and_rates_are_the_uninterrupted_ones(
    pair: tuple[str, str], resumed: Resumed, whole: Whole
) -> None:
    expected = whole["1 rank"][0]
    for trail in resumed[pair]:
        assert trail.losses == pytest.approx(expected.losses[SAVED_AT:], abs=1e-6)
        assert trail.rates == pytest.approx(expected.rates[SAVED_AT:], rel=1e-12)
        if pair[0] == pair[1]:
            assert trail.losses == whole[pair[0]][0].losses[SAVED_AT:]


@pytest.mark.parametrize("pair", PAIRS, ids=" then ".join)
def test_the_sequence_of_samples_is_the_uninterrupted_one(
    pair: tuple[str, str], resumed: Resumed, whole: Whole
) -> None:
    expected = ids_of(whole["1 rank"], "1 rank")
    assert ids_of(resumed[pair], pair[1]) == expected[SAVED_AT:]
    assert [len(ids) for ids in expected[:4]] == [7, 7, 7, 3]
    assert sorted(i for ids in expected[:4] for i in ids) == list(range(NUM_SAMPLES))


@pytest.mark.parametrize("pair", PAIRS, ids=" then ".join)
def test_counters_client_state_and_random_numbers_come_back(
    pair: tuple[str, str],
    resumed: Resumed,
    root: Path,
    ran: dict[str, list[tuple[Trail, tuple[float, ...]]]],
) -> None:
    expected = ran["1 rank"][0][0].counters
    for rank, trail in enumerate(resumed[pair]):
        assert trail.path == str(root / pair[0] / f"global_step{SAVED_AT}")
        assert trail.counters == expected
        assert same(trail.client, client_state())
        if rank < len(ran[pair[0]]):
            assert trail.random == ran[pair[0]][rank][1]


def test_the_uninterrupted_run_is_plain_pytorch(whole: Whole) -> None:
    losses = reference()
    assert whole["1 rank"][0].losses == pytest.approx(losses, abs=1e-5)
    assert abs(losses[-1] - losses[SAVED_AT]) > 1e-3


def test_another_batch_size_continues_the_same_sequence(root: Path, whole: Whole) -> None:
    """14 samples a batch: the rest of the epoch, then the next, as ever."""
    trails = run_ranks(1, wider, root / "3 ranks", timeout_s=60)
    expected = ids_of(whole["1 rank"], "1 rank")
    assert sorted(trails[0].read[0]) == sorted(expected[5] + expected[6])
    assert sorted(trails[0].read[1]) == expected[7]
    assert sorted(trails[0].read[2]) == sorted(expected[8] + expected[9])


def wider(rank: int, root: Path) -> Trail:
    PLANS["wide"] = {
        **PLANS["1 rank"],
        "global_batch_size": 14,
        "groups": [{"name": "g0", "gpus": [{"rank": 0, "micro_batches": [8, 6]}]}],
    }
    return next_part(rank, "wide", root, 3)
