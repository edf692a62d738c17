"""Setting documents aside to measure on."""

from dataclasses import dataclass

import datasets
import numpy as np

from zorse_ds.errors import DataError


@dataclass(frozen=True, slots=True)
class Holdout:
    """One side of a data set that is cut in two by whole documents, or conversations.

    `share` (0–1) of the rows, drawn by `seed` alone, is held out; at least one row is on each side.
    """

    share: float
    seed: int
    is_held: bool
    """The side: the rows held out, or the others."""

    def side_of(self, dataset: datasets.Dataset) -> datasets.Dataset:
        """The rows of the side, in their order. Raises `DataError` for fewer than two rows."""
        return dataset.select(self.rows_of(len(dataset)))

    def rows_of(self, num_rows: int) -> np.ndarray:
        """Which of so many rows are on the side, in order. Raises `DataError` for fewer than 2."""
        if num_rows < 2:
            raise DataError(
                f"the data set has {num_rows} rows, of which a share of {self.share} cannot be "
                "held out; expected at least 2"
            )
        num_held = min(max(round(self.share * num_rows), 1), num_rows - 1)
        # Sorted raw draws do not change with numpy's version, see `SampleOrder`.
        draws = np.random.Philox(key=self.seed).random_raw(num_rows)
        order = np.argsort(draws, kind="stable")
        own = order[:num_held] if self.is_held else order[num_held:]
        return np.sort(own)
