"""A timeline as a picture: a row a rank, time to the right."""

from importlib.util import find_spec
from pathlib import Path
from typing import Any

from zorse_ds.errors import ConfigError
from zorse_ds.simulator.timeline import Span, Timeline

FORMATS = (".png", ".svg")
COLOURS = {
    "forward": "#4c78a8",
    "backward": "#f2a33c",
    "collective": "#b279a2",
    "message": "#54a24b",
    "gather or copy": "#9d755d",
}
KINDS = {
    "ForwardPass": "forward",
    "BackwardPass": "backward",
    "SendActivation": "message",
    "SendGrad": "message",
    "UnshardParams": "gather or copy",
    "PrefetchParams": "gather or copy",
}
"""What is in none of these holds all ranks of a group: a collective."""
_HEIGHT, _BESIDE = 0.62, 0.2
"""Of a row: what the rank does itself, and below it what runs beside."""


def draw_timeline(timeline: Timeline, background: Timeline, labels: list[str], path: Path) -> None:
    """Write a picture of a step; see `check_picture`."""
    check_picture(path)
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    rows = len(labels)
    figure, axes = pyplot.subplots(figsize=(14, 1.2 + 0.26 * rows), layout="constrained")
    _bars(axes, timeline, 0.0, _HEIGHT)
    _bars(axes, background, _HEIGHT, _BESIDE)
    axes.set_yticks([row + _HEIGHT / 2 for row in range(rows)], labels, fontsize=7)
    axes.set_ylim(rows, -0.15)
    axes.set_xlim(0, timeline.step_s)
    axes.set_xlabel("seconds")
    patches = [pyplot.Rectangle((0, 0), 1, 1, color=colour) for colour in COLOURS.values()]
    figure.legend(patches, COLOURS, loc="outside upper center", ncols=len(COLOURS), fontsize=8)
    figure.savefig(path, dpi=130)
    pyplot.close(figure)


def check_picture(path: Path) -> None:
    """Raises `ConfigError` for an unknown format or where matplotlib is missing."""
    if path.suffix.lower() not in FORMATS:
        raise ConfigError(f"--picture is {path.name}; expected a name that ends in .png or .svg")
    if find_spec("matplotlib") is None:
        raise ConfigError(
            "--picture needs matplotlib, which is not installed; expected `pip install matplotlib`"
        )


def _bars(axes: Any, timeline: Timeline, offset: float, height: float) -> None:
    lots: dict[tuple[int, str], list[Span]] = {}
    for span in timeline.spans:
        kind = KINDS.get(span.name, "collective")
        lots.setdefault((span.rank, kind), []).append(span)
    for (rank, kind), spans in lots.items():
        bars = [(span.start_s, span.stop_s - span.start_s) for span in spans]
        # A thin edge tells one micro-batch from the next; with many there is no room for it.
        width = 0.3 if kind in ("forward", "backward") and len(bars) < 200 else 0.0
        axes.broken_barh(
            bars, (rank + offset, height), facecolors=COLOURS[kind], edgecolor="white",
            linewidth=width,
        )  # fmt: skip
