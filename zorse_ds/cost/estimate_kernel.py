"""How alike two layer times are: the covariance behind the estimates.

A time is a plain baseline (0.6 of the peak, and weights read once or gradients added once from
memory) times a factor. Logarithms of factors are a Gaussian process: what two times share (the
die, the precision, the pass, nearly the same width, length, micro-batch or power per FLOP/s) makes
their factors alike, by as much as the scales below say.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from zlib import crc32

import numpy as np
from numpy.typing import NDArray

from zorse_ds.core.model import LayerShape
from zorse_ds.cost.calibration import Board, Precision

Array = NDArray[np.float64]

_USUAL_FRACTION = 0.6
_FIXED_BYTES = {
    ("float16", False): 3.0,
    ("float32", False): 10.0,
    ("float16", True): 26.0,
    ("float32", True): 25.0,
}
"""Bytes a parameter that move whatever the micro-batch size, by precision and whether backward."""
_AUTOCAST_FACTOR = 2.5
"""Forward of the rows without a gate casts their weights anew each time."""
_SLOWING_WATTS = 75.0
_SLOWING = frozenset({"P40"})
"""Cards that slow down under load, so that time outgrows the work: small ones, and this."""
_SAME_WIDTH = 0.15
"""Doublings within which widths count as the same."""


@dataclass(frozen=True, slots=True)
class Point:
    """One pass of one block for one micro-batch."""

    board: Board
    precision: Precision
    shape: LayerShape
    seq_len: int
    size: int
    backward: bool
    row: str = ""
    """The measured row it belongs to."""

    @property
    def flops(self) -> float:
        """Of the whole micro-batch."""
        return self.shape.forward_flops(self.seq_len) * self.size * (2 if self.backward else 1)

    @property
    def slows(self) -> bool:
        """Whether the card's clock falls under load."""
        return self.board.watts < _SLOWING_WATTS or self.board.gpu_type in _SLOWING


def baseline_s(point: Point) -> float:
    """Seconds at the usual fraction of the peak, with the usual fixed part."""
    fixed = _FIXED_BYTES[point.precision, point.backward] * point.shape.num_params
    if not _is_gated(point) and point.precision == "float16" and not point.backward:
        fixed *= _AUTOCAST_FACTOR
    peak = _USUAL_FRACTION * point.board.peak_flops(point.precision)
    return point.flops / peak + fixed / point.board.bytes_per_s


@dataclass(frozen=True)
class Scales:
    """Standard deviations of what is shared, as fractions, and lengths in doublings.

    Chosen by `python -m benchmarks.estimates --tune` for the least cross-validated error.
    """

    all: float = 0.588
    power: float = 0.0658
    """Alike peak per watt: a card whose peak is beyond its power reaches less of it."""
    power_length: float = 0.244
    power_slope: float = 2.24
    die: float = 0.634
    trend: float = 0.484
    """With width and micro-batch, alike on all cards; half of it differs by pass."""
    gate: float = 0.565
    """The same, alike in both precisions and passes, with or without a gate."""
    trend_hidden: float = 2.93
    trend_size: float = 33.5
    own_trend: float = 0.123
    """With width, length and micro-batch, of one family of cards."""
    own_hidden: float = 2.24
    own_seq_len: float = 1.58
    own_size: float = 2.34
    same_hidden: float = 0.0655
    """Matrices of one width suit all cards alike."""
    row: float = 0.0098
    """What one row differs by, unexplained."""
    slowing_row: float = 4.69
    """How many times more on cards that slow down under load."""
    noise: float = 0.0334
    intercept: float = 0.617
    """Noise for each part of a time that a negative intercept takes away."""
    beyond: float = 0.488
    """Noise for each doubling beyond the sizes that were measured."""


@dataclass(frozen=True)
class Features:
    """Points as columns."""

    codes: dict[str, NDArray[np.int64]]
    hidden: Array
    seq_len: Array
    size: Array
    power: Array
    slows: Array


def features_of(points: Sequence[Point]) -> Features:
    """The columns of points; sizes as powers of two."""

    def column(values: Sequence[float]) -> Array:
        return np.array(values, dtype=np.float64)

    def code(texts: Sequence[str]) -> NDArray[np.int64]:
        return np.array([crc32(text.encode()) for text in texts], dtype=np.int64)

    boards = [point.board for point in points]
    peaks = [point.board.peak_flops(point.precision) / 1e12 for point in points]
    codes = {
        "family": code([board.family for board in boards]),
        "die": code([board.chip for board in boards]),
        "precision": code([point.precision for point in points]),
        "pass": code([str(point.backward) for point in points]),
        "gate": code([str(_is_gated(point)) for point in points]),
        "row": code([point.row or f"none {i}" for i, point in enumerate(points)]),
    }
    return Features(
        codes=codes,
        hidden=column([math.log2(point.shape.hidden) for point in points]),
        seq_len=column([math.log2(point.seq_len) for point in points]),
        size=column([math.log2(point.size) for point in points]),
        power=column([math.log2(p / b.watts) for p, b in zip(peaks, boards, strict=True)]),
        slows=column([float(point.slows) for point in points]),
    )


def covariance(a: Features, b: Features, scales: Scales) -> Array:
    """Between all points of `a` (rows) and of `b` (columns), as far as it is not of one row."""
    s = scales
    precision, gate, die = (_same(a, b, key) for key in ("precision", "gate", "die"))
    half_pass, half_precision = (1 + _same(a, b, "pass")) / 2, (1 + precision) / 2
    trend = _near(a.hidden, b.hidden, s.trend_hidden) * _near(a.size, b.size, s.trend_size)
    own = (
        _near(a.hidden, b.hidden, s.own_hidden)
        * _near(a.seq_len, b.seq_len, s.own_seq_len)
        * _near(a.size, b.size, s.own_size)
        * _same(a, b, "family")
    )
    width = _near(a.hidden, b.hidden, _SAME_WIDTH)
    alike = s.trend**2 * trend + s.own_trend**2 * own + s.same_hidden**2 * width
    shared: Array = (
        s.all**2
        + s.power**2 * _near(a.power, b.power, s.power_length)
        + s.power_slope**2 * np.outer(a.power + 1, b.power + 1)
        + s.die**2 * die * half_precision
        + s.gate**2 * gate * trend
        + precision * gate * half_pass * alike
    )
    return shared


def row_covariance(a: Features, b: Features, scales: Scales) -> Array:
    """Between points of the same measured row."""
    times: Array = scales.row**2 * np.outer(_row_scale(a, scales), _row_scale(b, scales))
    alike: Array = _same(a, b, "row") * (1 + _same(a, b, "pass")) / 2
    return times * alike


def _row_scale(features: Features, scales: Scales) -> Array:
    times: Array = 1 + (scales.slowing_row - 1) * features.slows
    return times


def _is_gated(point: Point) -> bool:
    return point.shape.num_ffn_matrices == 3


def _same(a: Features, b: Features, key: str) -> Array:
    equal: Array = np.equal(a.codes[key][:, None], b.codes[key][None, :]).astype(np.float64)
    return equal


def _near(a: Array, b: Array, length: float) -> Array:
    nearness: Array = np.exp(-0.5 * ((a[:, None] - b[None, :]) / length) ** 2)
    return nearness
