"""`zorse train`: from a recipe to a trained model, through DeepSpeed's launcher."""

import json
import os
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from zorse_ds.errors import ConfigError
from zorse_ds.files import read_json, write_text
from zorse_ds.integrations.recipe.schema import Recipe

if TYPE_CHECKING:
    from zorse_ds.cli.train_parts import Job


def train(
    recipe: Annotated[Path | None, typer.Argument(help="The recipe, a JSON file.")] = None,
    model: Annotated[str | None, typer.Option(help="A Hugging Face model's folder.")] = None,
    output: Annotated[str | None, typer.Option("--output", "-o", help="The run's folder.")] = None,
    train: Annotated[str | None, typer.Option(help="Data: files, a glob or a data set.")] = None,
    validation: Annotated[str | None, typer.Option(help="Data that is measured on.")] = None,
    plan: Annotated[str | None, typer.Option(help="A plan, a JSON file.")] = None,
    cluster: Annotated[
        str | None, typer.Option(help="Find a plan for this cluster's file, hostfile or name.")
    ] = None,
    global_batch: Annotated[int | None, typer.Option(help="Samples of a step.")] = None,
    seq_len: Annotated[int | None, typer.Option(help="Tokens of a sample, at most.")] = None,
    epochs: Annotated[int | None, typer.Option(help="Times through the data.")] = None,
    steps: Annotated[int | None, typer.Option(help="Optimizer updates, instead of epochs.")] = None,
    others: Annotated[
        list[str] | None,
        typer.Option("--set", help="Any key of a recipe, as monitor.wandb=mine; repeatable."),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show configuration and plan, start nothing.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON for machines.")] = False,
) -> None:
    """Fine-tune by a recipe; run again, it goes on where it ended.

    Flags win over the recipe's keys, and can take its place. Data are tokenised and everything is
    checked before DeepSpeed's launcher starts.
    """
    flags = {"model": model, "output": output, "data.train": train, "data.validation": validation}
    flags |= {"plan": plan, "cluster": cluster}
    numbers = {"global_batch": global_batch, "seq_len": seq_len, "epochs": epochs, "steps": steps}
    given = {key: value for key, value in {**flags, **numbers}.items() if value is not None}
    if recipe is None and not given and not others:
        raise ConfigError(
            "zorse train was given nothing; expected a recipe's file, or --model, --output, "
            "--train, --seq-len, --steps or --epochs, and --plan or --cluster"
        )
    job = _job_of(read_recipe(recipe, given | dict(map(_setting, others or []))))
    if as_json:
        print(json.dumps(job.facts()))
    else:
        _show(job, in_full=dry_run)
    if job.is_finished:
        print(f"{job.folder.root} is finished: {job.folder.finished} says what came out")
    elif not dry_run:
        _start(job)


def _setting(text: str) -> tuple[str, Any]:
    """`key=value`, where the value is JSON or else a text."""
    key, equals, value = text.partition("=")
    if not key or not equals:
        raise ConfigError(f"--set is {text!r}; expected KEY=VALUE, as learning_rate=1e-4")
    try:
        return key, json.loads(value)
    except ValueError:
        return key, value


def read_recipe(path: Path | None, flags: dict[str, Any]) -> Recipe:
    """The recipe of a file, with values over it at keys such as `data.train`.

    Raises `ConfigError`, each sentence with the path if there is one.
    """
    data = {} if path is None else read_json(path, ConfigError)
    for key, value in flags.items():
        *sections, name = key.split(".")
        place = data
        for section in sections:
            place = place.setdefault(section, {})
            if not isinstance(place, dict):
                raise ConfigError(f"{path}: {section} is {place!r}; expected an object {{...}}")
        place[name] = value
    # One flag takes the place of the other, as a file may have that.
    for name, other in (("steps", "epochs"), ("epochs", "steps")):
        if name in flags and other not in flags:
            data.pop(other, None)
    try:
        return Recipe.from_dict(data)
    except ConfigError as error:
        where = "" if path is None else f"{path}: "
        raise ConfigError("\n".join(f"{where}{line}" for line in str(error).splitlines())) from None


def _job_of(recipe: Recipe) -> "Job":
    # Torch, DeepSpeed and transformers take seconds, which a mistake in the file need not wait for.
    from zorse_ds.cli.train_parts import job_of

    return job_of(recipe)


def _show(job: "Job", *, in_full: bool) -> None:
    console = Console(highlight=False, stderr=not in_full)
    plan, facts = job.plan, job.facts()
    done = f", {facts['steps_saved']} of them done" if facts["steps_saved"] else ""
    console.print(
        f"{facts['num_samples'] or 'a stream of'} samples, {plan.global_batch_size} a step, "
        f"{job.num_steps} steps{done}, on {plan.world_size} ranks"
    )
    if job.predicted_step_s is not None:
        console.print(f"{job.predicted_step_s:.4g} s a step are predicted")
    for group in plan.groups:
        layers = " ".join(
            f"{stage.layers.start}-{stage.layers.stop - 1}"
            for stage in plan.stages
            if stage.group == group.name
        )
        console.print(
            f"group {group.name}: ranks {list(group.ranks)}, layers {layers}", markup=False
        )
    if in_full:
        console.print(f"\nDeepSpeed JSON ({job.folder.config}):", markup=False, soft_wrap=True)
        console.print_json(json.dumps(job.config))
        console.print(f"\nPlan ({job.folder.plan}):", markup=False, soft_wrap=True)
        console.print_json(json.dumps(plan.to_dict()))
        console.print(f"\n{shlex.join(job.command)}", markup=False, soft_wrap=True)


def _start(job: "Job") -> None:
    """Write what the ranks read and become the launcher, so that signals and exit code are its."""
    folder = job.folder
    try:
        job.recipe.save(folder.recipe)
        job.plan.save(folder.plan)
        write_text(folder.config, json.dumps(job.config, indent=2) + "\n")
        folder.finished.unlink(missing_ok=True)
    except OSError as problem:
        raise ConfigError(
            f"output is {folder.root}, which cannot be written ({problem.strerror}); expected a "
            "folder in which files may be written"
        ) from problem
    sys.stdout.flush()
    os.execve(job.command[0], job.command, job.environment)
