"""`zorse plan`: how to split a model over a cluster's GPUs, and what would change it."""

import json
import os
import shlex
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from zorse_ds.cli.plan_tables import show_answer, show_options
from zorse_ds.cli.settings import DtypeName, load_setting
from zorse_ds.core.megatron import MegatronFlags, megatron_flags
from zorse_ds.core.plan import Plan
from zorse_ds.cost.setting import Setting
from zorse_ds.planner.answer import answer_of
from zorse_ds.planner.effort import Effort
from zorse_ds.planner.effort import Progress as Report
from zorse_ds.planner.objective import Objective, choose

Form = Literal["table", "megatron"]


def plan(
    cluster: Annotated[
        str, typer.Option(help="A cluster's JSON file, a hostfile, or an example's name.")
    ],
    global_batch: Annotated[int, typer.Option(min=1, help="Samples of a step.")],
    seq_len: Annotated[int, typer.Option(min=1, help="Tokens of a sample.")],
    model: Annotated[Path | None, typer.Option(help="A Hugging Face model's folder.")] = None,
    shape: Annotated[Path | None, typer.Option(help="A model's shape, a JSON file.")] = None,
    profile: Annotated[
        Path | None, typer.Option(help="Measured times, as `zorse profile` writes them.")
    ] = None,
    adapters: Annotated[
        Path | None, typer.Option(help="Train LoRA adapters alone: a peft configuration.")
    ] = None,
    dtype: Annotated[
        DtypeName, typer.Option(help="Compute in this where a GPU can, else in the nearest.")
    ] = "bfloat16",
    objective: Annotated[
        Objective,
        typer.Option(help="Least time, or least price of a token (nodes may stay unused)."),
    ] = "time",
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Write the plan.")] = None,
    add: Annotated[
        list[str] | None, typer.Option(help="What if: GPUs more, as 2xA100-SXM-80GB; repeatable.")
    ] = None,
    without: Annotated[
        list[str] | None, typer.Option(help="What if: a node less, by name or number; repeatable.")
    ] = None,
    batch: Annotated[
        list[int] | None, typer.Option(min=1, help="What if: another global batch; repeatable.")
    ] = None,
    effort: Annotated[
        float, typer.Option(min=0.1, max=100, help="How much to try, relative to the usual.")
    ] = 1.0,
    form: Annotated[
        Form, typer.Option("--format", help="Tables, or the flags of Megatron-Core for the plan.")
    ] = "table",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON for machines.")] = False,
) -> None:
    """Find a plan: who runs which layers on which samples, and how state is kept."""
    files = {"model": model, "shape": shape, "profile": profile, "adapters": adapters}
    setting = load_setting(cluster, seq_len, dtype, **files)
    options = _options(setting, global_batch, add or [], without or [], batch or [])
    answers = _answers(options, objective, _effort(effort))
    if output is not None:
        Plan.from_dict(answers[TODAY]["plan"]).save(output)
    if form == "megatron":
        answers[TODAY]["megatron"] = asdict(_megatron(answers[TODAY], seq_len, dtype))
    _print(answers, output, as_json)


TODAY = "plan"
"""The name of the answer that is no what-if."""


def _print(answers: dict[str, dict[str, Any]], output: Path | None, as_json: bool) -> None:
    if as_json:
        print(json.dumps(answers.pop(TODAY) | {"what_if": answers}))
        return
    console = Console(highlight=False)
    megatron = answers[TODAY].get("megatron")
    if megatron is not None:
        # The flags alone go to the output, so that a script can take them.
        print(shlex.join(megatron["flags"]))
        for sentence in megatron["unsaid"]:
            print(f"not in the flags: {sentence}", file=sys.stderr)
        return
    show_answer(console, answers[TODAY], output)
    if len(answers) > 1:
        show_options(console, answers)


def _megatron(answer: dict[str, Any], seq_len: int, dtype: DtypeName) -> MegatronFlags:
    return megatron_flags(Plan.from_dict(answer["plan"]), seq_len, dtype)


def find_plan(setting: Setting, global_batch: int) -> Plan:
    """The fastest plan for all GPUs. Raises `PlannerError`."""
    with _progress(TODAY) as report:
        return choose(setting, global_batch, "time", _effort(1.0), report).found.best.plan


def _options(
    setting: Setting, global_batch: int, add: list[str], without: list[str], batch: list[int]
) -> dict[str, tuple[Setting, int]]:
    """What to plan for: as it is, and each what-if alone. Raises `ClusterError`."""
    options = {TODAY: (setting, global_batch)}
    for what in add:
        cluster = setting.cluster.with_added(what)
        options[f"add {what}"] = (replace(setting, cluster=cluster), global_batch)
    for node in without:
        cluster = setting.cluster.without([node])
        options[f"without {node}"] = (replace(setting, cluster=cluster), global_batch)
    for size in batch:
        options[f"batch {size}"] = (setting, size)
    return options


def _answers(
    options: dict[str, tuple[Setting, int]], objective: Objective, effort: Effort
) -> dict[str, dict[str, Any]]:
    answers = {}
    for name, (setting, batch) in options.items():
        with _progress(name) as report:
            choice = choose(setting, batch, objective, effort, report)
        unused = {"left_out": list(choice.left_out)}
        answers[name] = answer_of(choice.found, choice.setting) | unused
    return answers


def _effort(factor: float) -> Effort:
    usual = Effort(workers=min(2, os.cpu_count() or 1))
    return replace(
        usual,
        judged=max(1, round(usual.judged * factor)),
        improved=max(1, round(usual.improved * factor)),
        events=round(usual.events * factor),
    )


@contextmanager
def _progress(name: str) -> Iterator[Report]:
    """A bar on the terminal, nothing where there is none."""
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    console = Console(stderr=True)
    with Progress(
        *columns, console=console, transient=True, disable=not console.is_terminal
    ) as bar:
        task = bar.add_task(name)

        def report(what: str, done: int, whole: int) -> None:
            bar.update(task, description=f"{name}: {what}", completed=done, total=whole)

        yield report
