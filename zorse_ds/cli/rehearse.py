"""`zorse rehearse`: the real engine runs a plan on virtual GPUs, beside its simulation."""

import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

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
from zorse_ds.cli.rehearse_drift import AdaptShares, Drift, SlowGpus, show_steps, steps_of
from zorse_ds.cli.settings import load_setting
from zorse_ds.core.gpus import GIB
from zorse_ds.core.plan import Plan
from zorse_ds.cost.setting import Setting
from zorse_ds.files import write_text
from zorse_ds.integrations.picture import check_picture, draw_timeline
from zorse_ds.schedule.compile import compile_trace
from zorse_ds.simulator.chrome import chrome_trace
from zorse_ds.simulator.durations import check_fits
from zorse_ds.simulator.simulate import Simulation, simulate
from zorse_ds.simulator.timeline import Timeline

DIFFERS = 1
"""Exit code when measured and simulated differ by more than the tolerance."""
PASS_CPU_S = 0.016
"""What a layer of the miniature takes of a core, forward and backward, with all around it."""
SPARE = 3.0
"""How much more of the cores there should be than that."""
LEAST_REAL_S = 2.0
"""A step should take so long at least: then what a process is late by is small beside it."""


def rehearse(
    plan: PlanFile,
    cluster: ClusterName,
    seq_len: SeqLen,
    model: ModelFolder = None,
    shape: ShapeFile = None,
    profile: ProfileFile = None,
    dtype: GroupDtype = "bfloat16",
    optimizer_step: OptimizerStep = "delayed",
    steps: Annotated[int, typer.Option(min=2, help="Steps; the first one warms up.")] = 3,
    time_scale: Annotated[
        float | None,
        typer.Option(
            min=0,
            help="Real seconds of a virtual one; 0: nobody sleeps [default: what cores allow].",
        ),
    ] = None,
    slow: SlowGpus = None,
    adapt_shares: AdaptShares = False,
    tolerance: Annotated[
        float, typer.Option(min=0, help="Most by which measured and simulated may differ, in %.")
    ] = 5.0,
    picture: Annotated[
        Path | None, typer.Option(help="Draw the measured timeline here (.png or .svg).")
    ] = None,
    trace: Annotated[
        Path | None, typer.Option(help="Write it for Perfetto or chrome://tracing here.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON for machines.")] = False,
) -> None:
    """Train a miniature of the model by a plan, on processes that behave like the planned GPUs."""
    given = Plan.load(plan)
    setting = load_setting(cluster, seq_len, dtype, model=model, shape=shape, profile=profile)
    _check(given, setting, picture)
    simulation = _simulated(given, setting, optimizer_step == "interleaved")
    drift = Drift.parsed(slow or [], given.world_size, steps, adapt_shares)
    facts, timeline = _rehearsed(setting, simulation, time_scale, steps, optimizer_step, drift)
    _write_files(facts, timeline, picture, trace)
    if as_json:
        print(json.dumps(facts))
    elif drift:
        show_steps(facts, _pace(facts))
    else:
        _show(facts, tolerance)
    # The simulation knows nothing of GPUs that change, nor of shares that move.
    if not drift and 100 * facts["worst_share"] > tolerance:
        raise typer.Exit(DIFFERS)


def _check(plan: Plan, setting: Setting, picture: Path | None) -> None:
    check_fits(plan, setting)
    if picture is not None:
        check_picture(picture)
    # Loading the engine takes seconds, which no other command and no mistake should cost.
    from zorse_ds.integrations.deepspeed.rehearsal_plan import check_rehearsable

    check_rehearsable(plan, setting)


def _simulated(plan: Plan, setting: Setting, interleaved: bool) -> Simulation:
    compiled = compile_trace(plan, setting.model.tied_layers, interleaved=interleaved)
    return simulate(compiled, setting, record=False)


def _write_files(
    facts: dict[str, Any], timeline: Timeline, picture: Path | None, trace: Path | None
) -> None:
    labels = [f"rank {own['rank']} {own['gpu_type']}" for own in facts["ranks"]]
    if trace is not None:
        write_text(trace, json.dumps(chrome_trace(timeline, Timeline(()), labels)))
    if picture is not None:
        draw_timeline(timeline, Timeline(()), labels, picture)


def default_scale(plan: Plan, simulation: Simulation) -> float:
    """Real seconds of a virtual one that this machine's cores can keep up with, at least 1."""
    passes = sum(
        len(gpu.micro_batches) * plan.stages[stage].layers.size
        for group in plan.groups
        for gpu in group.gpus
        for stage in plan.stages_of_rank(gpu.rank)
    )
    cores = len(os.sched_getaffinity(0))
    wanted_s = max(LEAST_REAL_S, SPARE * passes * PASS_CPU_S / cores)
    return max(1.0, round(wanted_s / simulation.step_s, 1))


def _rehearsed(
    setting: Setting,
    simulation: Simulation,
    time_scale: float | None,
    steps: int,
    optimizer_step: str,
    drift: Drift,
) -> tuple[dict[str, Any], Timeline]:
    """What is told, and the timeline of the last step."""
    from zorse_ds.integrations.deepspeed.rehearsal_plan import PlanRun, rehearse_rank
    from zorse_ds.rehearsal.clock import Pace
    from zorse_ds.rehearsal.figures import check_kept_up, compared, quickest
    from zorse_ds.rehearsal.processes import run_processes

    plan = simulation.plan
    scale = default_scale(plan, simulation) if time_scale is None else time_scale
    run = PlanRun(plan, setting, Pace(scale), steps, optimizer_step, drift.slowdowns, drift.adapts)
    with _progress(steps) as report:
        runs = run_processes(plan.world_size, partial(rehearse_rank, run), report)
    # The first step warms up: memory is the optimizer's first, and processes are late.
    figures = quickest([[own.steps[i] for own in runs] for i in range(1, steps)])
    check_kept_up(figures, scale, len(os.sched_getaffinity(0)))
    comparison = compared(figures, simulation)
    gpus = setting.cluster.gpus
    facts = {
        "time_scale": scale,
        "step_s": asdict(comparison.step_s),
        "wall_s": max(own.wall_s for own in figures),
        "losses": list(runs[0].losses),
        "steps": steps_of(runs),
        "worst_share": comparison.worst_share,
        "ranks": [
            {"gpu_type": gpus[own.rank].type.name, **asdict(own)} for own in comparison.ranks
        ],
    }
    return facts, Timeline.joined(own.timeline for own in figures)


def _show(facts: dict[str, Any], tolerance: float) -> None:
    console = Console(highlight=False)
    step = facts["step_s"]
    console.print(
        f"{step['measured']:.4g} s a step, simulated {step['simulated']:.4g} s "
        f"({_error(step)}); {_pace(facts)}"
    )
    table = Table("rank", box=None, pad_edge=False)
    table.add_column("GPU", no_wrap=True)
    for name in ("busy s", "simulated", "waiting s", "simulated", "peak GiB", "simulated"):
        table.add_column(name, justify="right", no_wrap=True)
    for rank in facts["ranks"]:
        busy, waiting, peak = rank["busy_s"], rank["waiting_s"], rank["peak_bytes"]
        table.add_row(
            str(rank["rank"]),
            rank["gpu_type"],
            *(f"{seconds:.4g}" for part in (busy, waiting) for seconds in part.values()),
            *(f"{num_bytes / GIB:.2f}" for num_bytes in peak.values()),
        )
    console.print(table)
    worst = 100 * facts["worst_share"]
    verdict = "within" if worst <= tolerance else "beyond"
    console.print(f"Largest difference {worst:.1f} %, {verdict} the tolerance of {tolerance:g} %")


def _pace(facts: dict[str, Any]) -> str:
    if not facts["time_scale"]:
        return "by virtual clocks alone"
    return f"by the wall clock {facts['wall_s']:.4g} s at time scale {facts['time_scale']:g}"


def _error(part: dict[str, float]) -> str:
    share = part["measured"] / part["simulated"] - 1 if part["simulated"] else 0.0
    return f"{100 * share:+.1f} %"


@contextmanager
def _progress(steps: int) -> Iterator[Callable[[int, Any], None]]:
    """A bar on the terminal, nothing where there is none."""
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(
        *columns, console=console, transient=True, disable=not console.is_terminal
    ) as bar:
        task = bar.add_task("starting", total=steps)

        def report(rank: int, step: Any) -> None:
            if rank == 0:
                bar.update(task, description=f"step {step} of {steps}", completed=step)

        yield report
