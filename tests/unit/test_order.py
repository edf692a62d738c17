"""The global order of samples: every sample once an epoch, the same on every rank."""

import random
import subprocess
import sys

import numpy as np
import pytest

from zorse_ds.core.order import Batch, DataPosition, SampleOrder
from zorse_ds.errors import DataError


def batches(order: SampleOrder, num_steps: int) -> list[Batch]:
    """The first batches, one behind the other."""
    position, made = DataPosition(), []
    for _ in range(num_steps):
        batch, position = order.next_batch(position)
        made.append(batch)
    return made


def epoch_ids(order: SampleOrder, epoch: int) -> list[int]:
    position = DataPosition(epoch)
    ids: list[int] = []
    for _ in range(order.steps_per_epoch):
        batch, position = order.next_batch(position)
        assert batch.epoch == epoch
        ids += batch.ids.tolist()
    assert order.next_batch(position)[0].epoch == epoch + 1
    return ids


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("shuffle", [True, False])
def test_every_epoch_visits_every_sample_once(seed: int, shuffle: bool) -> None:
    draw = random.Random(seed)
    num_samples, batch_size = draw.randint(1, 60), draw.randint(1, 25)
    order = SampleOrder(num_samples, batch_size, shuffle, seed, drop_last=False)
    for epoch in (0, 1, 5):
        assert sorted(epoch_ids(order, epoch)) == list(range(num_samples))


def test_order_without_shuffle_is_by_number() -> None:
    order = SampleOrder(5, 2, shuffle=False, seed=7, drop_last=False)
    made = batches(order, 4)
    assert [batch.ids.tolist() for batch in made] == [[0, 1], [2, 3], [4], [0, 1]]
    assert [batch.epoch for batch in made] == [0, 0, 0, 1]


def test_drop_last_keeps_full_batches_only() -> None:
    order = SampleOrder(11, 4, shuffle=True, seed=3, drop_last=True)
    assert order.steps_per_epoch == 2
    assert all(len(batch.ids) == 4 for batch in batches(order, 10))
    assert len(set(epoch_ids(order, 0))) == 8
    assert epoch_ids(order, 0) == epoch_ids(SampleOrder(11, 4, True, 3, False), 0)[:8]


def test_short_last_batch_is_counted() -> None:
    order = SampleOrder(11, 4, shuffle=True, seed=3, drop_last=False)
    assert order.steps_per_epoch == 3
    assert [len(batch.ids) for batch in batches(order, 6)] == [4, 4, 3, 4, 4, 3]


def test_batch_does_not_depend_on_what_was_asked_before() -> None:
    walked = SampleOrder(50, 7, shuffle=True, seed=9, drop_last=False)
    positions = [DataPosition()]
    straight = []
    for _ in range(30):
        batch, behind = walked.next_batch(positions[-1])
        positions.append(behind)
        straight.append(batch.ids.tolist())
    for step in (29, 0, 17, 8, 16):
        jumped = SampleOrder(50, 7, shuffle=True, seed=9, drop_last=False)
        assert jumped.next_batch(positions[step])[0].ids.tolist() == straight[step]
        assert walked.next_batch(positions[step])[0].ids.tolist() == straight[step]


def test_seed_and_epoch_each_change_the_order() -> None:
    order = SampleOrder(100, 10, shuffle=True, seed=1, drop_last=False)
    other = SampleOrder(100, 10, shuffle=True, seed=2, drop_last=False)
    orders = [epoch_ids(order, 0), epoch_ids(order, 1), epoch_ids(other, 0), epoch_ids(other, 1)]
    assert len({tuple(ids) for ids in orders}) == 4
    assert list(range(100)) not in orders


def test_order_is_fixed_for_good() -> None:
    """A resumed run must see the order its checkpoint was written under: pin the numbers."""
    order = SampleOrder(10, 10, shuffle=True, seed=1234, drop_last=False)
    assert epoch_ids(order, 0) == [8, 9, 7, 3, 0, 1, 4, 2, 5, 6]
    assert epoch_ids(order, 1) == [0, 9, 5, 6, 4, 2, 8, 1, 7, 3]


def test_ids_are_int64_and_cannot_be_changed() -> None:
    ids = batches(SampleOrder(6, 3, shuffle=True, seed=0, drop_last=False), 1)[0].ids
    assert ids.dtype == np.int64
    with pytest.raises(ValueError):
        ids[0] = 1


def test_permutation_is_computed_once_an_epoch() -> None:
    order = SampleOrder(1000, 10, shuffle=True, seed=0, drop_last=False)
    made = batches(order, 100)
    assert made[0].ids.base is made[99].ids.base


def test_equal_orders_are_equal() -> None:
    first, second = (SampleOrder(6, 3, True, 0, False) for _ in range(2))
    batches(first, 1)
    assert first == second and hash(first) == hash(second)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ((0, 4, True, 0, False), "has 0 samples"),
        ((3, 4, True, 0, True), "fewer than the global batch of 4"),
        ((3, 0, True, 0, False), "global batch size is 0"),
        ((3, 1, True, -1, False), "data seed is -1"),
        ((3, 1, True, 2**64, False), "data seed is 18446744073709551616"),
    ],
)
def test_impossible_orders_are_refused(arguments: tuple, sentence: str) -> None:
    with pytest.raises(DataError, match=sentence):
        SampleOrder(*arguments)


def test_largest_seed_works() -> None:
    order = SampleOrder(4, 4, shuffle=True, seed=2**64 - 1, drop_last=False)
    assert sorted(epoch_ids(order, 0)) == [0, 1, 2, 3]


def test_import_needs_no_torch() -> None:
    code = "import sys, zorse_ds.core.order; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
