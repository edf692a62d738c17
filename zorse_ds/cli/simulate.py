"""`zorse simulate`: how long a plan's step takes and what it holds, before anything is rented."""

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from zorse_ds.cli.options import (
    ClusterName,
    GroupDtype,
    ModelFolder,
    OptimizerStep,
    PlanFile,
    ProfileFile,
    SeqLen,
    ShapeFile,
)
from zorse_ds.cli.settings import load_setting
from zorse_ds.core.gpus import GIB
from zorse_ds.core.plan import Plan
from zorse_ds.cost.setting import Setting
from zorse_ds.files import write_text
from zorse_ds.schedule.compile import compile_trace
from zorse_ds.simulator.chrome import chrome_trace
from zorse_ds.simulator.durations import check_fits
from zorse_ds.simulator.facts import facts_of
from zorse_ds.simulator.simulate import Simulation
from zorse_ds.simulator.simulate import simulate as run

MOST_LANES = 3
"""The busiest links that are listed."""
PART_HEADS = {
    "parameters": "params",
    "gradients": "grads",
    "optimizer": "optim",
    "activations": "activ",
    "buffers": "buffers",
    "workspace": "work",
    "reserve": "reserve",
}
_PLAIN: dict[str, Any] = {
    "box": None,
    "pad_edge": False,
    "title_justify": "left",
    "title_style": "bold",
}


def simulate(
    plan: PlanFile,
    cluster: ClusterName,
    seq_len: SeqLen,
    model: ModelFolder = None,
    shape: ShapeFile = None,
    profile: ProfileFile = None,
    dtype: GroupDtype = "bfloat16",
    optimizer_step: OptimizerStep = "delayed",
    picture: Annotated[
        Path | None, typer.Option(help="Draw the timeline here (.png or .svg).")
    ] = None,
    trace: Annotated[
        Path | None, typer.Option(help="Write a trace for Perfetto or chrome://tracing here.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON for machines.")] = False,
    rows: Annotated[int, typer.Option(min=1, help="Most ranks in the table.")] = 64,
) -> None:
    """Simulate one training step of a plan on a cluster."""
    given = Plan.load(plan)
    setting = load_setting(cluster, seq_len, dtype, model=model, shape=shape, profile=profile)
    # Before the trace is compiled, which takes long for a large plan.
    check_fits(given, setting)
    compiled = compile_trace(
        given, setting.model.tied_layers, interleaved=optimizer_step == "interleaved"
    )
    simulation = run(compiled, setting, record=picture is not None or trace is not None)
    facts = facts_of(simulation, setting)
    _write_files(simulation, setting, picture, trace)
    if as_json:
        print(json.dumps(facts))
    else:
        _show(facts, rows)


def _write_files(
    simulation: Simulation, setting: Setting, picture: Path | None, trace: Path | None
) -> None:
    gpus = setting.cluster.gpus
    labels = [f"rank {rank} {gpus[rank].type.name}" for rank in simulation.memory]
    if trace is not None:
        events = chrome_trace(simulation.timeline, simulation.background, labels)
        write_text(trace, json.dumps(events))
    if picture is not None:
        from zorse_ds.integrations.picture import draw_timeline

        draw_timeline(simulation.timeline, simulation.background, labels, picture)


def _show(facts: dict[str, Any], most: int) -> None:
    console = Console(highlight=False)
    console.print(
        f"{facts['step_s']:.4g} s a step, {facts['tokens_per_s']:,.0f} tokens/s, "
        f"{facts['achieved_flops_per_s'] / 1e12:,.1f} TFLOP/s, "
        f"{_percent(facts['ceiling_share'])} of the compute-only ceiling, "
        f"bubble {_percent(facts['bubble_share'])}"
    )
    limit = facts["limit"]
    console.print(f"Limit: {limit['resource']}, busy {_percent(limit['busy_share'])} of the step")
    console.print()
    console.print(_ranks(facts["ranks"][:most]))
    console.print()
    console.print(_memory(facts["ranks"][:most]))
    if len(facts["ranks"]) > most:
        console.print(f"... and {len(facts['ranks']) - most} more ranks (--rows shows more)")
    lanes = facts["lanes"][:MOST_LANES]
    if lanes:
        busiest = ", ".join(f"{each['lane']} {_percent(each['busy_share'])}" for each in lanes)
        console.print(f"\nBusiest links: {busiest}")
    short = [rank for rank in facts["ranks"] if not rank["fits"]]
    if short:
        ranks = ", ".join(str(rank["rank"]) for rank in short[:8])
        more = f" and {len(short) - 8} more" if len(short) > 8 else ""
        console.print(f"Does not fit: memory is short on rank {ranks}{more}")


def _ranks(ranks: list[dict[str, Any]]) -> Table:
    table = Table("rank", "GPU", "group", "busy", "bubble", "peak GiB", "usable", **_PLAIN)
    for rank in ranks:
        cells = [
            str(rank["rank"]),
            rank["gpu_type"],
            rank["group"],
            _percent(rank["busy_share"]),
            _percent(rank["idle_share"]),
            _gib(rank["peak_bytes"]),
            _gib(rank["memory"]["usable_bytes"]),
        ]
        table.add_row(*(Text(cell, style=_style(rank)) for cell in cells))
    return table


def _memory(ranks: list[dict[str, Any]]) -> Table:
    table = Table("rank", *PART_HEADS.values(), "host", title="GiB at the peak", **_PLAIN)
    for rank in ranks:
        memory = rank["memory"]
        cells = [str(rank["rank"]), *(_gib(memory[part]) for part in PART_HEADS)]
        cells.append(_gib(memory["host_bytes"]))
        table.add_row(*(Text(cell, style=_style(rank)) for cell in cells))
    return table


def _style(rank: dict[str, Any]) -> str:
    return "" if rank["fits"] else "red"


def _gib(num_bytes: float) -> str:
    return f"{num_bytes / GIB:.2f}"


def _percent(share: float) -> str:
    return f"{100 * share:.1f}%"
