"""The compute order as text: one row a rank, time to the right, on the integer clock."""

from collections.abc import Sequence
from dataclasses import dataclass

from zorse_ds.schedule.orders import Compute
from zorse_ds.schedule.trace import Trace

IDLE = "."
LETTERS = {"forward": "F", "backward": "B"}
FILLERS = {"forward": "-", "backward": "="}


@dataclass(frozen=True, slots=True)
class GridRow:
    """What one rank computes in a step, by time."""

    rank: int
    spans: tuple[Compute, ...]

    @property
    def busy_ticks(self) -> int:
        """Ticks in which the rank computes."""
        return sum(span.stop - span.start for span in self.spans)


@dataclass(frozen=True, slots=True)
class Grid:
    """Rank × time: a row for every rank of the plan, also for one without work."""

    ticks: int
    """From the start of the step to the end of the last computation."""
    rows: tuple[GridRow, ...]

    @property
    def bubble_share(self) -> float:
        """Share of all ranks' time in which they wait, without messages and update (0–1)."""
        busy = sum(row.busy_ticks for row in self.rows)
        return 1 - busy / (self.ticks * len(self.rows))

    def idle_share(self, rank: int) -> float:
        """Share of the time in which one rank waits (0–1)."""
        return 1 - self.rows[rank].busy_ticks / self.ticks


def grid_of(trace: Trace) -> Grid:
    """The grid of a trace's compute order."""
    spans: dict[int, list[Compute]] = {rank: [] for rank in range(trace.plan.world_size)}
    for compute in trace.order:
        spans[compute.rank].append(compute)
    ticks = max(compute.stop for compute in trace.order)
    return Grid(ticks, tuple(GridRow(rank, tuple(own)) for rank, own in spans.items()))


def row_text(row: GridRow, ticks: int, width: int) -> str:
    """One row in `width` characters, each for an equal part of `ticks`.

    A computation that has room is its letter and micro-batch (`F3--`, `B3====`), and one that has
    not is its letter alone. A column that holds several shows what most of it is; `.` is idle.
    """
    owners = _owners(row.spans, ticks, width)
    text = ""
    at = 0
    while at < width:
        owner = owners[at]
        stop = at
        while stop < width and owners[stop] is owner:
            stop += 1
        text += _span_text(owner, stop - at)
        at = stop
    return text


def _span_text(span: Compute | None, width: int) -> str:
    if span is None:
        return IDLE * width
    label = f"{LETTERS[span.phase]}{span.micro_batch}"
    if len(label) > width:
        return LETTERS[span.phase] * width
    return label.ljust(width, FILLERS[span.phase])


def _owners(spans: Sequence[Compute], ticks: int, width: int) -> list[Compute | None]:
    """For each column the first computation of the phase that fills most of it, None for idle."""
    columns: list[list[tuple[int, Compute]]] = [[] for _ in range(width)]
    for span in spans:
        # In units of a tick's `width`-th part, a column is exactly `ticks` wide.
        start, stop = span.start * width, span.stop * width
        for column in range(start // ticks, -(-stop // ticks)):
            common = min(stop, (column + 1) * ticks) - max(start, column * ticks)
            columns[column].append((common, span))
    return [_owner(parts, ticks) for parts in columns]


def _owner(parts: Sequence[tuple[int, Compute]], ticks: int) -> Compute | None:
    forward = sum(part for part, span in parts if span.phase == "forward")
    backward = sum(part for part, span in parts if span.phase == "backward")
    if ticks - forward - backward > max(forward, backward):
        return None
    phase = "forward" if forward > backward else "backward"
    # Ties go to the earlier one, as `max` keeps the first.
    return max((each for each in parts if each[1].phase == phase), key=lambda each: each[0])[1]
