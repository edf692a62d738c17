"""`zorse show`: what a plan means, before anything runs."""

import json
from itertools import groupby
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from zorse_ds.core.plan import Plan
from zorse_ds.schedule.compile import compile_trace
from zorse_ds.schedule.grid import Grid, grid_of, row_text
from zorse_ds.schedule.summary import CONFIGS_DTYPE, summary_of

MAX_LISTED = 40
"""Characters that a list of numbers may take in a table."""


def show(
    plan: Annotated[Path, typer.Argument(help="The plan, a JSON file.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON for machines.")] = False,
    width: Annotated[
        int | None, typer.Option(min=40, help="Columns to use; default: the terminal's.")
    ] = None,
    rows: Annotated[int, typer.Option(min=1, help="Most rows of a table or grid.")] = 32,
) -> None:
    """Show stages, ranks, transfers and the order in which a plan's step computes."""
    trace = compile_trace(Plan.load(plan))
    facts = summary_of(trace)
    if as_json:
        print(json.dumps(facts))
        return
    console = Console(width=width, highlight=False)
    console.print(
        f"{facts['world_size']} ranks, {facts['num_layers']} layers in {len(facts['stages'])} "
        f"stages, {facts['global_batch_size']} samples a step, schedule {facts['schedule']}, "
        f"{facts['num_instructions']} instructions"
    )
    for table in (_stages(facts), _ranks(facts), _boundaries(facts)):
        _print_table(console, *table, rows)
    _print_grid(console, grid_of(trace), rows)


TableData = tuple[str, list[str], list[list[str]]]
"""Title, heads and rows."""


def _stages(facts: dict[str, Any]) -> TableData:
    heads = ["stage", "layers", "group", "ranks", "micro-batches", "zero level", "recompute"]
    cells = [
        [
            str(stage["stage"]),
            _span(*stage["layers"]),
            _printable(stage["group"]),
            _spans(stage["ranks"]),
            str(stage["num_micro_batches"]),
            str(stage["zero_level"]),
            _recompute(stage),
        ]
        for stage in facts["stages"]
    ]
    return _with_set(facts["stages"], ("Stages", heads, cells))


def _recompute(stage: dict[str, Any]) -> str:
    number, size = stage["recompute_layers"], stage["layers"][1] - stage["layers"][0]
    return f"{number} of {size} layers" if 0 < number < size else str(stage["recompute"])


def _with_set(stages: list[dict[str, Any]], table: TableData) -> TableData:
    """The table of stages with a column for each further setting that some group has."""
    title, heads, cells = table
    settings = (
        ("reduce after", "reduce_after", ("step",)),
        ("recompute every", "recompute_every", (0, 1)),
        ("offload", "offload", ("none",)),
        ("dtype", "dtype", (CONFIGS_DTYPE,)),
    )
    for head, key, usual in settings:
        if any(stage[key] not in usual for stage in stages):
            heads = [*heads, head]
            columns = zip(cells, stages, strict=True)
            cells = [[*row, str(stage[key] or "")] for row, stage in columns]
    return title, heads, cells


def _ranks(facts: dict[str, Any]) -> TableData:
    heads = ["rank", "group", "samples", "micro-batches", "in flight", "weight"]
    heads += ["optimizer", "gradients", "parameters", "idle"]
    cells = [
        [
            str(rank["rank"]),
            _printable(rank["group"]),
            str(rank["num_samples"]),
            _repeats(rank["micro_batches"]),
            ", ".join(map(str, rank["in_flight_limits"])),
            f"{rank['shard_weight']:g}",
            *(_percent(share) for share in rank["held_shares"].values()),
            _percent(rank["idle_share"]),
        ]
        for rank in facts["ranks"]
    ]
    return "Ranks", heads, cells


def _boundaries(facts: dict[str, Any]) -> TableData:
    heads = ["stages", "transfers", "within a rank", "kind"]
    cells = [
        [
            f"{boundary['from_stage']} to {boundary['to_stage']}",
            str(boundary["num_transfers"]),
            str(boundary["num_local"]),
            _kind(boundary["most_sources"], boundary["most_targets"]),
        ]
        for boundary in facts["boundaries"]
    ]
    boundaries = facts["boundaries"]
    if any(each["activations_dtype"] != each["gradients_dtype"] for each in boundaries):
        heads += ["activations in", "gradients in"]
        for row, boundary in zip(cells, boundaries, strict=True):
            row += [boundary["activations_dtype"], boundary["gradients_dtype"]]
    return "Transfers", heads, cells


def _kind(most_sources: int, most_targets: int) -> str:
    if most_sources == most_targets == 1:
        return "one to one"
    sources = "one" if most_sources == 1 else f"many ({most_sources})"
    targets = "one" if most_targets == 1 else f"many ({most_targets})"
    return f"{sources} to {targets}"


def _print_table(
    console: Console, title: str, heads: list[str], cells: list[list[str]], most: int
) -> None:
    if not cells:
        return
    table = Table(title=title, title_justify="left", title_style="bold", box=None, pad_edge=False)
    for head in heads:
        table.add_column(head)
    for row in cells[:most]:
        table.add_row(*map(Text, row))
    console.print()
    console.print(table)
    _print_rest(console, len(cells) - most)


def _print_grid(console: Console, grid: Grid, most: int) -> None:
    label_width = len(f"rank {len(grid.rows) - 1} ")
    console.print()
    console.print(
        f"Order of computation, idle {_percent(grid.bubble_share)} "
        "(without messages and update; F forward, B backward, . idle)"
    )
    for row in grid.rows[:most]:
        label = f"rank {row.rank}".ljust(label_width)
        text = row_text(row, grid.ticks, console.width - label_width)
        console.print(Text(label + text))
    _print_rest(console, len(grid.rows) - most)


def _print_rest(console: Console, rest: int) -> None:
    if rest > 0:
        rows = "row" if rest == 1 else "rows"
        console.print(f"... and {rest} more {rows} (--rows shows more)")


def _percent(share: float) -> str:
    return f"{100 * share:.1f}".removesuffix(".0") + "%"


def _span(first: int, stop: int) -> str:
    """`0-3` for 0 up to, without, 4."""
    return f"{first}-{stop - 1}" if stop - first > 1 else str(first)


def _spans(numbers: list[int]) -> str:
    """`0-3, 5` for `[0, 1, 2, 3, 5]`."""
    runs = [[n for _, n in run] for _, run in groupby(enumerate(numbers), lambda e: e[1] - e[0])]
    spans = (f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)
    return _shortened(", ".join(spans))


def _repeats(sizes: list[int]) -> str:
    """`3 x 4, 2` for `[4, 4, 4, 2]`."""
    runs = ((size, len(list(same))) for size, same in groupby(sizes))
    return _shortened(", ".join(f"{n} x {size}" if n > 1 else str(size) for size, n in runs))


def _shortened(text: str) -> str:
    return text if len(text) <= MAX_LISTED else f"{text[: MAX_LISTED - 4]} ..."


def _printable(name: str) -> str:
    """A name that cannot steer the terminal."""
    return name if name.isprintable() else repr(name)
