"""`zorse doctor`: can this model be trained here, and how is it laid out?"""

import json
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from zorse_ds.core.gpus import GIB
from zorse_ds.errors import ModelError

if TYPE_CHECKING:
    from zorse_ds.integrations.huggingface.doctor import Diagnosis, Layer
    from zorse_ds.profiler.environment import Device, Library


def doctor(
    model: Annotated[
        Path | None, typer.Option(help="Folder of a Hugging Face model; its config.json will do.")
    ] = None,
    plan: Annotated[
        bool, typer.Option("--plan", help="Print a plan for two equal GPUs, and nothing else.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON for machines.")] = False,
) -> None:
    """Check versions and devices, and a model: is it understood, and what are its layers?

    Exit code 2 with the reason when a model cannot be cut into stages.
    """
    from transformers.utils import logging

    from zorse_ds.integrations.huggingface.doctor import diagnose
    from zorse_ds.profiler.environment import devices, libraries

    logging.set_verbosity_error()
    if plan:
        if model is None:
            raise ModelError("--plan was given without --model; expected the model's folder")
        print(json.dumps(diagnose(model).plan.to_dict(), indent=2))
        return
    present = (libraries(), devices())
    if not as_json:
        _print_environment(*present)
    try:
        diagnosis = None if model is None else diagnose(model)
    except ModelError as refusal:
        if as_json:
            print(json.dumps(_facts(*present) | {"understood": False, "reason": str(refusal)}))
        raise
    if as_json:
        print(json.dumps(_facts(*present) | ({} if diagnosis is None else _of_model(diagnosis))))
    elif diagnosis is not None:
        _print_model(diagnosis, f"zorse doctor --model {model} --plan")


def _facts(libraries: "tuple[Library, ...]", devices: "tuple[Device, ...]") -> dict[str, Any]:
    from dataclasses import asdict

    return {
        "libraries": [asdict(each) for each in libraries],
        "devices": [asdict(each) for each in devices],
    }


def _of_model(diagnosis: "Diagnosis") -> dict[str, Any]:
    from dataclasses import asdict

    return {
        "understood": True,
        "architecture": diagnosis.architecture,
        "num_params": diagnosis.shape.num_params,
        "layers": [asdict(layer) for layer in diagnosis.layers],
        "tied": list(diagnosis.tied),
        "boundary": [asdict(each) for each in diagnosis.boundary],
        "notes": list(diagnosis.notes),
        "shape": diagnosis.shape.model_dump(mode="json", exclude_defaults=True),
        "plan": diagnosis.plan.to_dict(),
    }


def _print_environment(libraries: "tuple[Library, ...]", devices: "tuple[Device, ...]") -> None:
    console = Console(highlight=False)
    table = _table("Libraries", ["name", "installed", "tested", ""])
    for each in libraries:
        remark = "" if each.is_tested else "missing" if each.version is None else "not tested"
        table.add_row(each.name, each.version or "-", each.expected, remark)
    console.print(table)
    console.print()
    table = _table("Devices", ["device", "GPU type", "GiB", "bf16"])
    for device in devices:
        is_gpu = device.memory_bytes is not None
        memory = f"{(device.memory_bytes or 0) / GIB:.1f}" if is_gpu else "-"
        kind = device.gpu_type or ("not in the catalogue" if is_gpu else "-")
        table.add_row(device.name, kind, memory, "yes" if device.has_bf16 else "no")
    console.print(table)


def _print_model(diagnosis: "Diagnosis", command: str) -> None:
    console = Console(highlight=False)
    table = _table("Pipeline layers", ["layers", "module", "kind", "parameters", "together"])
    for layers in _runs(diagnosis.layers):
        table.add_row(*map(Text, _row(layers)))
    console.print()
    console.print(table)
    lines = [
        "",
        f"{diagnosis.architecture} is understood: {diagnosis.shape.num_params:,} parameters in "
        f"{len(diagnosis.layers)} pipeline layers, which can be cut anywhere: its own forward "
        "keeps making masks, positions and scales, so stages compute what the whole model does.",
        "From stage to stage travel: "
        + ", ".join(
            f"{each.name} {each.shape}{' when given' if each.is_optional else ''}"
            for each in diagnosis.boundary
        ),
        *(f"Tied: {text}; both hold it and add up its gradients" for text in diagnosis.tied),
        *(f"Note: {note}" for note in diagnosis.notes),
        f"A plan's stages tile layers [0, {len(diagnosis.layers)}). For two equal GPUs: {command}",
    ]
    for line in lines:
        console.print(Text(line))


def _runs(layers: "tuple[Layer, ...]") -> "list[list[Layer]]":
    """Layers of one kind that follow each other."""
    return [list(run) for _, run in groupby(layers, key=lambda layer: layer.kind)]


def _row(layers: "list[Layer]") -> list[str]:
    first, last = layers[0], layers[-1]
    each = f"{first.num_params:,}"
    if first is last:
        return [str(first.index), first.name, first.kind, each, each]
    total = sum(layer.num_params for layer in layers)
    number = last.name.rpartition(".")[2]
    return [
        f"{first.index}-{last.index}",
        f"{first.name}-{number}",
        first.kind,
        each,
        f"{total:,}",
    ]


def _table(title: str, heads: list[str]) -> Table:
    table = Table(*heads, title=title, title_justify="left", title_style="bold", box=None)
    table.pad_edge = False
    return table
