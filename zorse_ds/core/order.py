"""The one global order of samples: which ids make up the global batch of each step.

Every rank computes it alone and alike, so no sampler state is sent: epoch, samples consumed in it
and seed are the whole position in the data, whatever the plan and the size of a batch.
"""

from dataclasses import dataclass, field

import numpy as np

from zorse_ds.errors import DataError

_SEED_LIMIT = 2**64


@dataclass(frozen=True, eq=False)
class Batch:
    """The global batch of one step: sample `ids` (int64, 1-D, read-only) of `epoch` (from 0)."""

    epoch: int
    ids: np.ndarray


@dataclass(frozen=True, slots=True)
class DataPosition:
    """How far the order has been followed: `num_consumed` samples of `epoch` (from 0)."""

    epoch: int = 0
    num_consumed: int = 0


@dataclass(frozen=True)
class SampleOrder:
    """The order in which `num_samples` samples are visited, as a pure function of seed and epoch.

    Each epoch visits every sample once, in a permutation of its own when `shuffle`, else by
    number. The last batch of an epoch is short when `batch_size` does not divide `num_samples`;
    `drop_last` leaves it out, so that all batches are full.

    Raises DataError when a number is out of range or not one batch would remain.
    """

    num_samples: int
    batch_size: int
    shuffle: bool
    seed: int
    drop_last: bool
    _permutations: dict[int, np.ndarray] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    def __post_init__(self) -> None:
        if self.num_samples < 1:
            raise DataError(
                f"the data set has {self.num_samples} samples; expected at least one to train on"
            )
        if self.batch_size < 1:
            raise DataError(f"the global batch size is {self.batch_size}; expected at least 1")
        if not 0 <= self.seed < _SEED_LIMIT:
            raise DataError(f"the data seed is {self.seed}; expected 0 to 2**64 - 1")
        if self.drop_last and self.num_samples < self.batch_size:
            raise DataError(
                f"the data set has {self.num_samples} samples, fewer than the global batch of "
                f"{self.batch_size}, and drop_last leaves out short batches, so nothing remains; "
                f"expected at least {self.batch_size} samples or drop_last false"
            )

    @property
    def steps_per_epoch(self) -> int:
        """Number of global batches in one epoch, counting a short last one if it is kept."""
        full, rest = divmod(self.num_samples, self.batch_size)
        return full + (1 if rest and not self.drop_last else 0)

    def next_batch(self, position: DataPosition) -> tuple[Batch, DataPosition]:
        """Return the batch that begins at `position`, and the position behind it.

        Batches of any size follow one another without a gap: an epoch's ids are the same however
        it is cut. One that would be short ends the epoch, see the class.
        """
        epoch, start = position.epoch, position.num_consumed
        rest = self.num_samples - start
        if rest <= 0 or (self.drop_last and rest < self.batch_size):
            epoch, start = epoch + 1, 0
        ids = self._permutation(epoch)[start : start + self.batch_size]
        return Batch(epoch, ids), DataPosition(epoch, start + len(ids))

    def _permutation(self, epoch: int) -> np.ndarray:
        """Return the ids of one epoch in order; the last epoch asked for is kept."""
        if epoch not in self._permutations:
            ids = self._permute(epoch)
            ids.setflags(write=False)
            self._permutations.clear()
            self._permutations[epoch] = ids
        return self._permutations[epoch]

    def _permute(self, epoch: int) -> np.ndarray:
        if not self.shuffle:
            return np.arange(self.num_samples)
        # numpy fixes the raw stream of Philox for good, but not what Generator.permutation makes
        # of it; sorting raw draws stays alike on ranks whose numpy versions differ.
        key = np.array([self.seed, epoch], dtype=np.uint64)
        draws = np.random.Philox(key=key).random_raw(self.num_samples)
        return np.argsort(draws, kind="stable")
