"""How far off are estimated layer times? Cross-validated on the rows they are made from.

    python -m benchmarks.estimates [--tune SECONDS]

Prints one line for each way of leaving rows out, and one for each GPU type, and writes JSON. With
`--tune` it searches scales of the fit that are better on the same errors, one by one, and prints
them to be put into `zorse_ds/cost/estimate_kernel.py`.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, fields, replace
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

from zorse_ds.cost.calibration import measured_layers
from zorse_ds.cost.estimate_errors import LEFT_OUT, Errors, cross_validated, is_steady
from zorse_ds.cost.estimate_fit import Fit, Observation, observations, stated_observations
from zorse_ds.cost.estimate_kernel import Scales

Counts = Callable[[Observation], bool]


def is_llama(observation: Observation) -> bool:
    """A gated block, at a size that was measured and on a line that is plausible."""
    return is_steady(observation) and observation.point.shape.num_ffn_matrices == 3


COUNTED: dict[str, Counts] = {
    "all times": lambda _: True,
    "plausible lines": is_steady,
    "of these Llama": is_llama,
    "of these 16 bits": lambda each: is_llama(each) and each.point.precision == "float16",
    "of these cards that keep their clock": lambda each: (
        is_llama(each) and each.point.precision == "float16" and not each.point.slows
    ),
}

WEIGHTS = {
    "row": 1.0,
    "model": 1.0,
    "length": 0.5,
    "model and length": 1.0,
    "model on a type": 1.0,
    "GPU type": 0.3,
    "GPU family": 0.7,
}
"""Of each way of leaving out in what `--tune` makes small."""
GPT_WEIGHT = 0.4
MOST_COUNTED = {"GPU type": 0.7, "GPU family": 0.7}
"""Errors beyond (0.25 elsewhere) count as this much, so that a few bad rows decide nothing."""


def fit_with(scales: Scales) -> Fit:
    """The fit to all rows."""
    observed = [*observations(measured_layers(), scales), *stated_observations()]
    return Fit(observed, scales)


def loss(scales: Scales) -> float:
    """Weighted mean of capped errors over all ways of leaving out."""
    fit = fit_with(scales)
    counted = np.array([is_steady(each) for each in fit.observed])
    weights = np.array(
        [1.0 if each.point.shape.num_ffn_matrices == 3 else GPT_WEIGHT for each in fit.observed]
    )
    halves = np.array([each.point.precision == "float16" for each in fit.observed])
    total = 0.0
    for name, weight in WEIGHTS.items():
        # Without its one length float32 has no rows left to learn from.
        chosen = counted & halves if name == "length" else counted
        sizes = np.abs(np.log1p(fit.held_out_errors(LEFT_OUT[name])))
        capped = np.minimum(sizes, MOST_COUNTED.get(name, 0.25))
        total += weight * float(np.average(capped[chosen], weights=weights[chosen]))
    return total


def tuned(scales: Scales, seconds: float) -> Scales:
    """A coordinate search: each scale a step up or down, steps halved where neither helps."""
    best, steps = loss(scales), {field.name: 1.3 for field in fields(Scales)}
    end = time.monotonic() + seconds
    moved = True
    while moved and time.monotonic() < end:
        moved = False
        for name, step in steps.items():
            tried = [
                replace(scales, **{name: getattr(scales, name) * factor})
                for factor in (step, 1 / step)
            ]
            losses = [loss(each) for each in tried]
            if min(losses) < best - 1e-5:
                best, scales, moved = min(losses), tried[int(np.argmin(losses))], True
            else:
                steps[name] = 1 + (step - 1) / 2
        print(f"loss {best:.5f}", file=sys.stderr)
    return scales


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--output", type=Path, default=Path("build/benchmarks"))
    parser.add_argument("--tune", type=float, metavar="SECONDS", help="search better scales")
    options = parser.parse_args()
    if options.tune is not None:
        print(json.dumps(asdict(tuned(Scales(), options.tune)), indent=1))
        return
    fit = fit_with(Scales())
    by_way = {
        way: {name: cross_validated(fit, way, counts)["all"] for name, counts in COUNTED.items()}
        for way in LEFT_OUT
    }
    by_type = {
        way: cross_validated(fit, way, is_llama, lambda each: each.point.board.gpu_type)
        for way in ("model on a type", "GPU type")
    }
    console = Console(highlight=False)
    print_table(console, "median / 90th percentile error, left out together", by_way)
    print_table(console, "Llama blocks on plausible lines, by GPU type", turned(by_type))
    options.output.mkdir(parents=True, exist_ok=True)
    found = {"left_out": by_way, "by_type": by_type}
    (options.output / "estimates.json").write_text(json.dumps(found, default=asdict, indent=1))


def turned(table: dict[str, dict[str, Errors]]) -> dict[str, dict[str, Errors]]:
    """Rows as columns."""
    rows = next(iter(table.values()))
    return {row: {column: table[column][row] for column in table} for row in rows}


def print_table(console: Console, title: str, rows: dict[str, dict[str, Errors]]) -> None:
    table = Table(title=title, title_justify="left", box=None, pad_edge=False)
    table.add_column("")
    for name in next(iter(rows.values())):
        table.add_column(name)
    for row, cells in rows.items():
        texts = [
            f"{100 * each.median_share:.1f} / {100 * each.p90_share:.1f} % of {each.num_times}"
            for each in cells.values()
        ]
        table.add_row(row, *texts)
    console.print(table)


if __name__ == "__main__":
    main()
