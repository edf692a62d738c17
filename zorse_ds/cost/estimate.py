"""Layer times of GPU types that are not at hand, estimated from the rows that ship with it all."""

from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from zorse_ds.core.gpus import GpuType, gpu_types, type_suggestion
from zorse_ds.core.model import LayerShape, llama_block
from zorse_ds.core.plan import Dtype
from zorse_ds.cost.calibration import (
    Board,
    MeasuredLayer,
    Precision,
    board_of,
    measured_layers,
    precision_of,
)
from zorse_ds.cost.dtypes import usable_dtype
from zorse_ds.cost.estimate_errors import Errors, cross_validated
from zorse_ds.cost.estimate_fit import MOST_OF_PEAK, SIZES, Fit, Observation, default_fit
from zorse_ds.cost.estimate_kernel import Point, baseline_s
from zorse_ds.cost.setting import PassTimes, Source
from zorse_ds.errors import ProfileError

_LEAST_FORWARD_S = 1e-4
"""A block starts some fifteen kernels; backward twice as many."""
_LEAST_LOOKUP_S = 2e-5
_LOGIT_BYTES = 20
"""Read and written per logit in one pass: conversions and the softmax in float32."""
_TABLE_PASSES = 3
"""Backward of an embedding clears a gradient of the whole table and adds it to the sum."""
_LEAST_SLOPE = 0.5
"""Of the mean: what a further sample costs at least, when a line is carried on."""


@dataclass(frozen=True, slots=True)
class _Curve:
    """Seconds of both passes at `SIZES`."""

    forward_s: tuple[float, ...]
    backward_s: tuple[float, ...]
    source: Source

    def at(self, size: int) -> PassTimes:
        return PassTimes(_along(self.forward_s, size), _along(self.backward_s, size), self.source)


class EstimatedTimes:
    """A `LayerTimer` without measurements of one's own.

    Blocks follow the calibration (`estimate_kernel`); where it has the very row, that row. The head
    is one more matrix at the fraction that a block of its width reaches, and passes over its
    logits; the embedding is passes over memory. Blocks with two feed-forward matrices follow the
    rows of GPT models, which were measured without fused attention. `types` (default: the
    catalogue) has the types that can be asked for. bfloat16 is as fast as float16; a type that
    lacks it is taken in what replaces it there (`usable_dtype`).
    """

    def __init__(self, types: Mapping[str, GpuType] | None = None, fit: Fit | None = None) -> None:
        self._types = gpu_types() if types is None else types
        self._given_fit = fit
        self._boards: dict[str, Board] = {}
        self._curves: dict[tuple[str, LayerShape, Precision, int], _Curve] = {}

    def __call__(
        self, gpu_type: str, kind: str, shape: LayerShape, dtype: Dtype, seq_len: int, size: int
    ) -> PassTimes:
        """See `LayerTimer`. Raises `ProfileError` for a type that is not known."""
        key = (gpu_type, shape, self._precision(gpu_type, dtype), seq_len)
        curve = self._curves.get(key)
        if curve is None:
            curve = self._curves[key] = self._curve(*key)
        return curve.at(size)

    def dtype_for(self, gpu_type: str, wanted: Dtype) -> Dtype:
        """What a type computes in when `wanted` is asked for. Raises `ProfileError`."""
        return usable_dtype(wanted, self._type(gpu_type))

    def error_of(self, gpu_type: str) -> Errors:
        """Cross-validated: of other models and lengths on a type that has rows, else of types.

        Of Llama-like blocks in all precisions, within the sizes that rows were measured at.
        """
        if not self._has_rows(gpu_type):
            return cross_validated(self._fit, "GPU type", _counts)["all"]
        by_type = cross_validated(
            self._fit, "model on a type", _counts, lambda each: each.point.board.gpu_type
        )
        return by_type[gpu_type]

    def error_source(self, gpu_type: str) -> str:
        """What `error_of` left out to measure it, in words."""
        if self._has_rows(gpu_type):
            return f"cross-validated on {gpu_type}, a model left out at a time"
        return "cross-validated, a GPU type left out at a time"

    @staticmethod
    def _has_rows(gpu_type: str) -> bool:
        return any(row.board.gpu_type == gpu_type for row in measured_layers())

    @cached_property
    def _fit(self) -> Fit:
        return default_fit() if self._given_fit is None else self._given_fit

    def _type(self, gpu_type: str) -> GpuType:
        found = self._types.get(gpu_type)
        if found is None:
            near = type_suggestion(gpu_type, self._types)
            raise ProfileError(
                f"GPU type {gpu_type!r} has no measured times and is none of the "
                f"{len(self._types)} known types{near}"
            )
        return found

    def _board(self, gpu_type: str) -> Board:
        found = self._boards.get(gpu_type)
        if found is None:
            found = self._boards[gpu_type] = board_of(self._type(gpu_type))
        return found

    def _precision(self, gpu_type: str, dtype: Dtype) -> Precision:
        if dtype == "bfloat16":
            dtype = usable_dtype(dtype, self._type(gpu_type))
        return precision_of(dtype)

    def _curve(
        self, gpu_type: str, shape: LayerShape, precision: Precision, seq_len: int
    ) -> _Curve:
        board = self._board(gpu_type)
        if shape.role == "embedding":
            return _embedding_curve(board, shape, precision, seq_len)
        if shape.role == "head":
            return self._head_curve(board, shape, precision, seq_len)
        row = _row_of(gpu_type, shape, precision, seq_len)
        if row is not None and row.forward.is_plausible and row.backward.is_plausible:
            forward, backward = (
                tuple(row.fit(backward=back).at(size) for size in SIZES) for back in (False, True)
            )
            return _Curve(forward, backward, "interpolated")
        return self._estimated(board, shape, precision, seq_len, "" if row is None else row.key)

    def _estimated(
        self, board: Board, shape: LayerShape, precision: Precision, seq_len: int, row: str
    ) -> _Curve:
        points = [
            Point(board, precision, shape, seq_len, size, backward, row)
            for backward in (False, True)
            for size in SIZES
        ]
        most = MOST_OF_PEAK * board.peak_flops(precision)
        fitted = self._fit.seconds(points)
        seconds = [max(float(s), p.flops / most) for s, p in zip(fitted, points, strict=True)]
        forward, backward = seconds[: len(SIZES)], seconds[len(SIZES) :]
        return _Curve(
            _ascending(forward, _LEAST_FORWARD_S),
            _ascending(backward, 2 * _LEAST_FORWARD_S),
            "interpolated" if row else "estimated",
        )

    def _head_curve(
        self, board: Board, shape: LayerShape, precision: Precision, seq_len: int
    ) -> _Curve:
        block = _block_as_wide(shape.hidden)
        curve = self._curve(board.gpu_type, block, precision, seq_len)
        logits = _LOGIT_BYTES * shape.vocab * seq_len / board.bytes_per_s

        def seconds(times: tuple[float, ...], backward: bool) -> tuple[float, ...]:
            return tuple(
                time
                * baseline_s(Point(board, precision, shape, seq_len, size, backward))
                / baseline_s(Point(board, precision, block, seq_len, size, backward))
                + logits * size
                for time, size in zip(times, SIZES, strict=True)
            )

        forward, backward = seconds(curve.forward_s, False), seconds(curve.backward_s, True)
        return _Curve(forward, backward, "estimated")


def _counts(observation: Observation) -> bool:
    return observation.is_clean and observation.point.shape.num_ffn_matrices == 3


def _row_of(
    gpu_type: str, shape: LayerShape, precision: Precision, seq_len: int
) -> MeasuredLayer | None:
    """The first row of this very block, if there is one."""
    wanted = (gpu_type, shape, precision, seq_len)
    return next(
        (
            row
            for row in measured_layers()
            if (row.board.gpu_type, row.shape, row.precision, row.seq_len) == wanted
        ),
        None,
    )


def _block_as_wide(hidden: int) -> LayerShape:
    """A Llama block of the usual proportions."""
    return llama_block(hidden, max(1, round(hidden * 8 / 3)), max(1, hidden // 128))


def _embedding_curve(board: Board, shape: LayerShape, precision: Precision, seq_len: int) -> _Curve:
    element = 4 if precision == "float32" else 2
    moved = 2 * element * shape.hidden * seq_len / board.bytes_per_s
    table = _TABLE_PASSES * element * shape.num_params / board.bytes_per_s
    forward = tuple(_LEAST_LOOKUP_S + moved * size for size in SIZES)
    backward = tuple(_LEAST_LOOKUP_S + table + moved * size for size in SIZES)
    return _Curve(forward, backward, "estimated")


def _ascending(seconds: list[float], least: float) -> tuple[float, ...]:
    """More samples never take less time, and the first some."""
    found: list[float] = []
    for each in seconds:
        found.append(max(each, found[-1] if found else least))
    return tuple(found)


def _along(seconds: tuple[float, ...], size: int) -> float:
    """Between the sizes straight, beyond them on with the last slope."""
    if size >= SIZES[-1]:
        slope = (seconds[-1] - seconds[-2]) / (SIZES[-1] - SIZES[-2])
        slope = max(slope, _LEAST_SLOPE * seconds[-1] / SIZES[-1])
        return seconds[-1] + slope * (size - SIZES[-1])
    right = max(1, bisect_right(SIZES, size))
    low, high = SIZES[right - 1], SIZES[right]
    part = (size - low) / (high - low)
    return seconds[right - 1] + part * (seconds[right] - seconds[right - 1])
