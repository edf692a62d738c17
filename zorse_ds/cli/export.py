"""`zorse export`: a Hugging Face folder out of a checkpoint, on any machine."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from zorse_ds.core.strict import listed, suggestion
from zorse_ds.errors import ConfigError

DTYPES = ("float32", "bfloat16", "float16")


def export(
    checkpoint: Annotated[
        Path, typer.Argument(help="A checkpoint, or the folder that save_checkpoint was given.")
    ],
    folder: Annotated[Path, typer.Argument(help="The folder to write.")],
    tag: Annotated[str | None, typer.Option(help="Which one; default: the latest.")] = None,
    dtype: Annotated[
        str, typer.Option(help=f"Of the weights written: {', '.join(DTYPES)}.")
    ] = DTYPES[0],
    merge: Annotated[
        bool, typer.Option("--merge", help="Put adapters into the weights; else they come alone.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON for machines.")] = False,
) -> None:
    """Write the weights of a checkpoint as a folder that transformers loads.

    Of a model with adapters these alone, for `PeftModel.from_pretrained`, unless --merge.
    """
    if dtype not in DTYPES:
        raise ConfigError(
            f"--dtype is {dtype!r}; expected {listed(DTYPES)}{suggestion(dtype, DTYPES)}"
        )
    # Torch and transformers take seconds to load, which other commands need not wait for.
    import torch

    from zorse_ds.integrations.huggingface import export as exporting

    done = exporting.export(
        exporting.find_checkpoint(checkpoint, tag),
        folder,
        dtype=getattr(torch, dtype),
        merge_adapters=merge,
    )
    facts = {key: str(v) if isinstance(v, Path) else v for key, v in asdict(done).items()}
    if as_json:
        print(json.dumps(facts))
        return
    table = Table(show_header=False)
    for label, value in (
        ("checkpoint", facts["checkpoint"]),
        ("written to", facts["folder"]),
        ("pipeline layers", str(done.num_layers)),
        ("files", str(done.num_files)),
        ("size", f"{done.num_bytes / 2**20:.1f} MiB in {done.dtype}"),
    ):
        table.add_row(label, value)
    Console(highlight=False).print(table)
