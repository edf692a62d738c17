"""Layer times that follow from measured ones: the fit, its predictions and its held-out errors."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np

from zorse_ds.core.gpus import gpu_types
from zorse_ds.core.model import llama_block
from zorse_ds.cost.calibration import MeasuredLayer, board_of, measured_layers
from zorse_ds.cost.estimate_kernel import (
    Array,
    Features,
    Point,
    Scales,
    baseline_s,
    covariance,
    features_of,
    row_covariance,
)

SIZES = (1, 2, 4, 8)
"""Micro-batch sizes at which rows are looked at."""
_OUTLYING = 2.5
"""Standard deviations by which a row may miss what all others say of it before it counts less."""
MOST_OF_PEAK = 0.95
"""A time that means more is what is left of a steep line's intercept, not a time."""
_STATED = ("H100-NVL", (512, 1024, 2048), 0.385)
"""The Zorse data's range for a 7B block in float16, 0.35–0.42 of the peak; no rows are at hand."""
_STATED_NOISE = 0.08


@dataclass(frozen=True, slots=True)
class Observation:
    """What a row says about one pass at one micro-batch size."""

    point: Point
    seconds: float
    is_clean: bool
    """Within the measured sizes, and not diminished by a negative intercept."""
    noise: float
    """Standard deviation of the logarithm, beside what is common to all."""


def observations(rows: Sequence[MeasuredLayer], scales: Scales) -> list[Observation]:
    """The times that rows stand for; what cannot be a time is left out."""
    found = [
        _observation(row, size, backward, scales)
        for row in rows
        for backward in (False, True)
        for size in SIZES
    ]
    return [each for each in found if each is not None]


def _observation(
    row: MeasuredLayer, size: int, backward: bool, scales: Scales
) -> Observation | None:
    line = row.fit(backward=backward)
    point = Point(row.board, row.precision, row.shape, row.seq_len, size, backward, row.key)
    seconds = line.at(size)
    missing = max(0.0, -line.fixed_s) / (line.per_sample_s * size)
    most = point.flops / row.board.peak_flops(row.precision) / MOST_OF_PEAK
    if seconds <= 0 or (seconds < most and missing > 0.02):
        return None
    doublings = max(0.0, math.log2(size / row.num_sizes)) if row.num_sizes else 0.0
    noise = scales.intercept * missing + scales.beyond * doublings
    return Observation(point, seconds, missing <= 0.1 and not doublings, noise)


def stated_observations() -> list[Observation]:
    """For the one type of which a range of fractions is known instead of rows."""
    name, lengths, fraction = _STATED
    board, shape = board_of(gpu_types()[name]), llama_block(4096, 11008, 32)
    points = [
        Point(board, "float16", shape, length, SIZES[-1], backward, f"stated {length}")
        for length in lengths
        for backward in (False, True)
    ]
    return [
        Observation(p, p.flops / board.tensor_flops / fraction, False, _STATED_NOISE)
        for p in points
    ]


class Fit:
    """Weights of observations, so that a time is a sum over those that are like it.

    `trusts_all`: rows that contradict the others count like any.
    """

    def __init__(
        self, observed: Sequence[Observation], scales: Scales, *, trusts_all: bool = False
    ) -> None:
        self.observed = list(observed)
        self.scales = scales
        self._features = features_of([each.point for each in self.observed])
        self._wanted = np.array(
            [math.log(each.seconds / baseline_s(each.point)) for each in self.observed]
        )
        own = np.array([scales.noise**2 + each.noise**2 for each in self.observed])
        matrix = covariance(self._features, self._features, scales)
        matrix += row_covariance(self._features, self._features, scales) + np.diag(own)
        self._inverse = _inverse(matrix)
        if not trusts_all:
            self._inverse = _inverse(matrix + self._outlying(self._inverse))
        self._weights = self._inverse @ self._wanted

    def seconds(self, points: Sequence[Point]) -> Array:
        """Of each point; one with the key of a known row follows that row."""
        asked = features_of(points)
        known = covariance(asked, self._features, self.scales)
        known += row_covariance(asked, self._features, self.scales)
        times: Array = np.array([baseline_s(point) for point in points])
        times *= np.exp(known @ self._weights)
        return times

    def held_out_errors(self, group_of: Callable[[Point], object]) -> Array:
        """Relative error of each observation when all of its group are left out.

        The errors a new fit without them would make (of all, weights of outliers included), from
        the one inverse: Rasmussen and Williams, Gaussian Processes, section 5.4.2, by blocks.
        """
        groups: dict[object, list[int]] = {}
        for i, each in enumerate(self.observed):
            groups.setdefault(group_of(each.point), []).append(i)
        errors: Array = np.zeros(len(self.observed))
        for members in groups.values():
            missed = _missed(self._inverse, self._weights, members)
            errors[members] = np.exp(-missed) - 1
        return errors

    def _outlying(self, inverse: Array) -> Array:
        """Further variance, common to a row, for rows that contradict the others."""
        weights = inverse @ self._wanted
        extra = np.zeros_like(inverse)
        for members in _rows_of(self._features):
            block = _inverse(inverse[np.ix_(members, members)])
            missed = block @ weights[members]
            if math.sqrt(float(np.mean(missed**2 / np.diag(block)))) > _OUTLYING:
                extra[np.ix_(members, members)] = np.mean(missed**2)
        return extra


def _missed(inverse: Array, weights: Array, members: Sequence[int]) -> Array:
    """Wanted less predicted, of members that the prediction does not know."""
    return _inverse(inverse[np.ix_(members, members)]) @ weights[members]


def _inverse(matrix: Array) -> Array:
    return np.asarray(np.linalg.inv(matrix), dtype=np.float64)


def _rows_of(features: Features) -> list[list[int]]:
    rows: dict[int, list[int]] = {}
    for i, code in enumerate(features.codes["row"]):
        rows.setdefault(int(code), []).append(i)
    return list(rows.values())


@cache
def default_fit() -> Fit:
    """The fit to all rows that ship with the package."""
    scales = Scales()
    return Fit([*observations(measured_layers(), scales), *stated_observations()], scales)
