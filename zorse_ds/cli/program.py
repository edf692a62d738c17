"""The `zorse` program: its commands, its version and how it reports mistakes."""

import sys
from typing import Annotated

import typer

from zorse_ds import __version__
from zorse_ds.cli.doctor import doctor
from zorse_ds.cli.export import export
from zorse_ds.cli.gpus import gpus
from zorse_ds.cli.plan import plan
from zorse_ds.cli.probe import probe
from zorse_ds.cli.profile import profile
from zorse_ds.cli.rehearse import rehearse
from zorse_ds.cli.run import run
from zorse_ds.cli.show import show
from zorse_ds.cli.simulate import simulate
from zorse_ds.cli.train import train
from zorse_ds.errors import ZorseError

USER_ERROR = 2
"""Exit code when something the user gave is wrong."""

# Errors are reported by `main`, so typer's decorated tracebacks stay off. A command is a function
# in a module of its own; lines below are all that knows its name.
app = typer.Typer(
    name="zorse",
    help="Train language models on mixed GPUs.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
)
app.command("doctor")(doctor)
app.command("export")(export)
app.command("gpus")(gpus)
app.command("plan")(plan)
app.command("probe")(probe)
app.command("profile")(profile)
app.command("rehearse")(rehearse)
app.command("run")(run)
app.command("show")(show)
app.command("simulate")(simulate)
app.command("train")(train)


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"zorse {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version."
        ),
    ] = False,
) -> None:
    pass


def main() -> None:
    """Run the command line; a mistake of the user is one sentence a problem, without traceback."""
    try:
        app(prog_name="zorse")
    except ZorseError as error:
        print(error, file=sys.stderr)
        sys.exit(USER_ERROR)
