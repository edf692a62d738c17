"""`zorse profile`: seconds and bytes of a model's layers, measured here or estimated."""

import json
import os
from pathlib import Path
from typing import Annotated, Any, cast, get_args

import typer
from rich.console import Console
from rich.table import Table

from zorse_ds.cli.profile_estimate import estimates, parse_layer, print_estimates
from zorse_ds.core.plan import Dtype
from zorse_ds.core.profile import LayerTimes, Profile
from zorse_ds.core.strict import listed, suggestion
from zorse_ds.errors import ProfileError

_DEFAULT_SEQ_LENS = "512"
_DEFAULT_SIZES = "1,2,4"


def profile(
    model: Annotated[
        Path | None, typer.Option(help="Hugging Face folder; its config.json is enough.")
    ] = None,
    estimate: Annotated[
        str | None, typer.Option(help="GPU type to estimate one block on, instead of measuring.")
    ] = None,
    layer: Annotated[
        str | None, typer.Option(help="With --estimate: hidden=4096,ffn=11008,heads=32,kv_heads=8.")
    ] = None,
    seq_len: Annotated[str, typer.Option(help="Tokens a sample, one or more.")] = _DEFAULT_SEQ_LENS,
    micro_batch: Annotated[str, typer.Option(help="Micro-batch sizes.")] = _DEFAULT_SIZES,
    dtype: Annotated[
        str | None,
        typer.Option(help="float32, bfloat16 or float16, one or more; default: by device."),
    ] = None,
    device: Annotated[
        str | None, typer.Option(help="cpu, cuda or cuda:1; default: each GPU type here.")
    ] = None,
    seconds: Annotated[float, typer.Option(min=0.01, help="Time for repeats of one point.")] = 1.0,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Write the profile here, as JSON.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON for machines.")] = False,
) -> None:
    """Measure a model's layers on the devices here, or estimate one for a GPU that is not.

    On several hosts, each GPU type is measured once:
    deepspeed --hostfile HOSTS --no_local_rank --module zorse_ds.cli profile --model FOLDER -o P
    """
    lengths, sizes = _numbers("--seq-len", seq_len), _numbers("--micro-batch", micro_batch)
    if estimate is not None:
        if model is not None or layer is None or len(lengths) != 1:
            raise ProfileError(
                "--estimate is about one block; expected --layer hidden=…,ffn=…,heads=…, one "
                "--seq-len and no --model"
            )
        wanted = _dtypes(dtype or "bfloat16")[0]
        found = estimates(estimate, parse_layer(layer), wanted, lengths[0], sizes)
        print(json.dumps(found)) if as_json else print_estimates(found)
        return
    if model is None or layer is not None:
        raise ProfileError("expected --model FOLDER to measure, or --estimate TYPE with --layer")
    dtypes = None if dtype is None else _dtypes(dtype)
    measured = _measured(model, device, dtypes, (lengths, sizes), seconds)
    if measured is not None:
        _tell(measured, output, as_json)


def _measured(
    model: Path,
    device: str | None,
    dtypes: tuple[Dtype, ...] | None,
    points: tuple[tuple[int, ...], tuple[int, ...]],
    seconds: float,
) -> Profile | None:
    """The whole profile; None on ranks other than 0."""
    # torch and transformers take seconds to load, which estimates do not pay.
    from zorse_ds.cli.profile_devices import measure_here, measure_on_ranks

    lengths, sizes = points
    if "RANK" in os.environ:
        return measure_on_ranks(model, device, dtypes, lengths, sizes, seconds)
    return measure_here(model, device, dtypes, lengths, sizes, seconds)


def _tell(found: Profile, output: Path | None, as_json: bool) -> None:
    if output is not None:
        found.save(output)
    if as_json:
        print(json.dumps(found.model_dump(mode="json", exclude_defaults=True)))
        return
    console = Console(highlight=False)
    console.print(_times_table(found))
    console.print(_bytes_table(found))
    for each in found.optimizer:
        console.print(
            f"Optimizer on {each.gpu_type}: {1e9 * each.step_s_per_param:.3f} ns a parameter"
        )
    if output is not None:
        console.print(f"Written to {output}", markup=False)


def _times_table(found: Profile) -> Table:
    heads = ["GPU type", "layer", "dtype", "length", "sizes", "forward ms", "backward ms"]
    table = Table(*heads, title="Times, fitted to n samples", title_justify="left", box=None)
    for each in found.times:
        table.add_row(
            each.gpu_type,
            each.kind,
            each.dtype,
            str(each.seq_len),
            ",".join(map(str, each.micro_batches)),
            _fit_text(each, each.forward_s),
            _fit_text(each, each.backward_s),
        )
    return table


def _fit_text(times: LayerTimes, seconds: tuple[float, ...]) -> str:
    slope, fixed = _line(times, seconds)
    return f"{1e3 * slope:.3g}n {'+' if fixed >= 0 else '-'} {abs(1e3 * fixed):.2g}"


def _line(times: LayerTimes, seconds: tuple[float, ...]) -> tuple[float, float]:
    """Slope and intercept against the micro-batch size, all points equally exact in proportion."""
    import numpy as np

    if len(seconds) == 1:
        return seconds[0] / times.micro_batches[0], 0.0
    weights = 1 / np.array(seconds)
    slope, fixed = np.polyfit(times.micro_batches, seconds, 1, w=weights)
    return float(slope), float(fixed)


def _bytes_table(found: Profile) -> Table:
    heads = ["layer", "dtype", "length", "saved", "boundary", "workspace"]
    table = Table(*heads, title="MiB a sample", title_justify="left", box=None)
    for each in found.bytes:
        sizes = (each.saved_bytes, each.boundary_bytes, each.workspace_bytes)
        mib = (f"{size / 2**20:.3g}" for size in sizes)
        table.add_row(each.kind, each.dtype, str(each.seq_len), *mib)
    return table


def _numbers(option: str, text: str) -> tuple[int, ...]:
    """Ascending numbers out of `128,256`."""
    parts = [part.strip() for part in text.split(",")]
    wrong = next((part for part in parts if not part.isdecimal() or int(part) < 1), None)
    if wrong is not None:
        raise ProfileError(f"{option} has {wrong!r}; expected whole numbers from 1, such as 1,2,4")
    return tuple(sorted({int(part) for part in parts}))


def _dtypes(text: str) -> tuple[Dtype, ...]:
    parts = [part.strip() for part in text.split(",")]
    known = get_args(Dtype)
    for part in parts:
        if part not in known:
            near = suggestion(part, known)
            raise ProfileError(f"--dtype has {part!r}; expected {listed(known)}{near}")
    return tuple(cast(Any, dict.fromkeys(parts)))
