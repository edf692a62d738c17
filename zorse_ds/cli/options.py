"""Options that several commands share."""

from pathlib import Path
from typing import Annotated, Literal

import typer

from zorse_ds.cli.settings import DtypeName

PlanFile = Annotated[Path, typer.Argument(help="The plan, a JSON file.")]
ClusterName = Annotated[
    str, typer.Option(help="A cluster's JSON file, a hostfile, or an example's name.")
]
SeqLen = Annotated[int, typer.Option(min=1, help="Tokens of a sample.")]
ModelFolder = Annotated[Path | None, typer.Option(help="A Hugging Face model's folder.")]
ShapeFile = Annotated[Path | None, typer.Option(help="A model's shape, a JSON file.")]
ProfileFile = Annotated[
    Path | None, typer.Option(help="Measured times, as `zorse profile` writes them.")
]
GroupDtype = Annotated[DtypeName, typer.Option(help="Of groups that name none in the plan.")]
OptimizerStep = Annotated[
    Literal["delayed", "interleaved"],
    typer.Option(help="When stages step: all at the end, or each after its backward."),
]
