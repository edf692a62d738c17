"""How far estimates are off: cross-validated on the rows they are made from.

Each observation is estimated by a fit that has seen nothing of its group. Scales of the fit were
chosen on these same errors, so figures for other rows may be somewhat larger.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np

from zorse_ds.cost.estimate_fit import Fit, Observation
from zorse_ds.cost.estimate_kernel import Point


def _model(point: Point) -> object:
    return point.shape.hidden, point.shape.num_ffn_matrices


LEFT_OUT: Mapping[str, Callable[[Point], object]] = MappingProxyType(
    {
        "row": lambda point: point.row,
        "model": _model,
        "length": lambda point: point.seq_len,
        "model and length": lambda point: (_model(point), point.seq_len),
        "model on a type": lambda point: (_model(point), point.board.gpu_type),
        "GPU type": lambda point: point.board.gpu_type,
        "GPU family": lambda point: point.board.family,
    }
)
"""What is left out together, by name."""


@dataclass(frozen=True, slots=True)
class Errors:
    """Relative errors of held-out times."""

    num_times: int
    median_share: float
    p90_share: float

    @classmethod
    def of(cls, errors: list[float]) -> "Errors":
        """Of the absolute values of at least one error."""
        sizes = np.abs(errors)
        return cls(len(errors), float(np.median(sizes)), float(np.percentile(sizes, 90)))


def is_steady(observation: Observation) -> bool:
    """Within the measured sizes, of a line whose intercept is plausible."""
    return observation.is_clean


def cross_validated(
    fit: Fit,
    left_out: str,
    counts: Callable[[Observation], bool] = is_steady,
    by: Callable[[Observation], str] = lambda _: "all",
) -> dict[str, Errors]:
    """Errors of the observations that count, in the classes that `by` names.

    What is no row (a stated range) is never counted.
    """
    errors = fit.held_out_errors(LEFT_OUT[left_out])
    classes: dict[str, list[float]] = {}
    for observation, error in zip(fit.observed, errors, strict=True):
        if counts(observation) and not observation.point.row.startswith("stated"):
            classes.setdefault(by(observation), []).append(float(error))
    return {name: Errors.of(found) for name, found in sorted(classes.items())}
