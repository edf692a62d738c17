"""The sequence of sample ids is one, however it is cut into batches and however often it is broken.

The reference is the epoch's permutation itself, taken in one batch of the whole data set.
"""

from __future__ import annotations

import random
from itertools import chain

import pytest

from zorse_ds.core.order import DataPosition, SampleOrder


def straight(num_samples: int, seed: int, epochs: int) -> list[int]:
    """All ids of the first epochs in one go."""
    order = SampleOrder(num_samples, num_samples, shuffle=True, seed=seed, drop_last=False)
    made = (order.next_batch(DataPosition(epoch))[0].ids.tolist() for epoch in range(epochs))
    return list(chain.from_iterable(made))


@pytest.mark.parametrize("seed", range(60))
def test_batches_of_any_sizes_and_restarts_give_one_sequence(seed: int) -> None:
    """Each restart knows only epoch, samples consumed and seed, and may have another batch size."""
    rng = random.Random(seed)
    num_samples = rng.randint(1, 40)
    expected = straight(num_samples, seed, 8)
    position = DataPosition()
    found: list[int] = []
    while len(found) < 4 * num_samples:
        size = rng.randint(1, num_samples + 3)
        order = SampleOrder(num_samples, size, shuffle=True, seed=seed, drop_last=False)
        saved = position
        for _ in range(rng.randint(0, 3)):
            batch, position = order.next_batch(position)
            assert batch.ids.tolist() == expected[len(found) : len(found) + len(batch.ids)]
            found += batch.ids.tolist()
            if rng.random() < 0.3:
                # Killed: what was done since the last save is done again.
                lost = (position.epoch - saved.epoch) * num_samples
                lost += position.num_consumed - saved.num_consumed
                found = found[: len(found) - lost]
                position = saved
                break
            saved = position
    assert found == expected[: len(found)]


@pytest.mark.parametrize("size", [1, 3, 4, 7, 10, 11])
def test_an_epoch_that_ends_with_a_save_goes_on_with_the_next(size: int) -> None:
    order = SampleOrder(10, size, shuffle=True, seed=5, drop_last=False)
    position = DataPosition()
    for _ in range(order.steps_per_epoch):
        _, position = order.next_batch(position)
    assert position == DataPosition(0, 10)
    fresh = SampleOrder(10, size, shuffle=True, seed=5, drop_last=False)
    batch, behind = fresh.next_batch(position)
    assert batch.epoch == behind.epoch == 1
    assert batch.ids.tolist() == straight(10, 5, 2)[10 : 10 + size]


def test_what_drop_last_leaves_out_depends_on_what_is_left() -> None:
    order = SampleOrder(10, 4, shuffle=True, seed=5, drop_last=True)
    batch, behind = order.next_batch(DataPosition(0, 7))
    assert behind == DataPosition(1, 4) and batch.epoch == 1
    batch, behind = order.next_batch(DataPosition(0, 6))
    assert behind == DataPosition(0, 10) and len(batch.ids) == 4
