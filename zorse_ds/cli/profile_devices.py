"""Which devices `zorse profile` measures, and the progress that it shows."""

import os
import platform
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from zorse_ds.core.gpus import type_of_device
from zorse_ds.core.plan import Dtype
from zorse_ds.core.profile import Profile
from zorse_ds.errors import ProfileError
from zorse_ds.integrations.huggingface.timed import TimedModel
from zorse_ds.profiler.layers import Points, joined, measure_layers, num_points
from zorse_ds.profiler.timing import Budget

_VERSIONED = ("zorse_ds", "torch", "transformers")


def measure_here(
    model: Path,
    device: str | None,
    dtypes: tuple[Dtype, ...] | None,
    lengths: tuple[int, ...],
    sizes: tuple[int, ...],
    seconds: float,
) -> Profile:
    """On the device named, or on one GPU of each type in this host, or on the CPU."""
    chosen = [_device(device)] if device is not None else _devices_here()
    return joined([_measure(model, each, dtypes, (lengths, sizes), seconds) for each in chosen])


def measure_on_ranks(
    model: Path,
    device: str | None,
    dtypes: tuple[Dtype, ...] | None,
    lengths: tuple[int, ...],
    sizes: tuple[int, ...],
    seconds: float,
) -> Profile | None:
    """As one of the launcher's ranks: the first rank of each GPU type measures it.

    The profile of all types on rank 0, None elsewhere. Raises `ProfileError` on every rank when one
    failed. Collective: every rank.
    """
    import torch.distributed as dist

    dist.init_process_group("gloo")
    rank = dist.get_rank()
    own = _device(device) if device is not None else _device_of_rank()
    names: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(names, type_name(own))
    found: Profile | ProfileError | None = None
    if names.index(names[rank]) == rank:
        try:
            found = _measure(model, own, dtypes, (lengths, sizes), seconds)
        except Exception as error:
            # The others wait for this rank; all of them end with its sentence.
            found = ProfileError(f"rank {rank} ({names[rank]}): {error}")
    all_found: list[Any] = [None] * len(names)
    dist.all_gather_object(all_found, found)
    dist.destroy_process_group()
    for each in all_found:
        if isinstance(each, ProfileError):
            raise each
    profiles = [each for each in all_found if each is not None]
    return joined(profiles) if rank == 0 else None


def type_name(device: torch.device) -> str:
    """The catalogue's name, or what the driver says; `CPU`, as `zorse probe` calls it."""
    if device.type != "cuda":
        return "CPU"
    name = torch.cuda.get_device_name(device)
    kind = type_of_device(name)
    return name if kind is None else kind.name


def _device(text: str) -> torch.device:
    try:
        device = torch.device(text)
        usable = device.type == "cpu" or (
            device.type == "cuda" and (device.index or 0) < torch.cuda.device_count()
        )
    except RuntimeError:
        usable = False
    if not usable:
        count = torch.cuda.device_count()
        cuda = f" or cuda:0 to cuda:{count - 1}" if count else "; no CUDA device is here"
        raise ProfileError(f"--device is {text!r}; expected cpu{cuda}")
    return device


def _devices_here() -> list[torch.device]:
    devices = [torch.device("cuda", i) for i in range(torch.cuda.device_count())]
    by_type: dict[str, torch.device] = {}
    for device in devices or [torch.device("cpu")]:
        by_type.setdefault(type_name(device), device)
    return list(by_type.values())


def _device_of_rank() -> torch.device:
    if not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))


def _default_dtype(device: torch.device) -> Dtype:
    if device.type != "cuda":
        return "float32"
    # Since Ampere; older ones imitate it.
    return "bfloat16" if torch.cuda.get_device_capability(device) >= (8, 0) else "float16"


def _measure(
    model: Path,
    device: torch.device,
    dtypes: tuple[Dtype, ...] | None,
    points: tuple[tuple[int, ...], tuple[int, ...]],
    seconds: float,
) -> Profile:
    lengths, sizes = points
    wanted = Points(dtypes or (_default_dtype(device),), lengths, sizes)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    source = TimedModel(model, device)
    name = type_name(device)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    console = Console(stderr=True)
    with Progress(*columns, TimeElapsedColumn(), console=console) as progress:
        task = progress.add_task(name, total=num_points(source.shape, wanted))
        started = False

        def report(what: str) -> None:
            nonlocal started
            progress.update(task, advance=int(started), description=f"{name}: {what}")
            started = True

        found = measure_layers(source.shape, name, source, device, wanted, Budget(seconds), report)
        progress.update(task, advance=1, description=name)
    return found.model_copy(update={"versions": _versions()})


def _versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for package in _VERSIONED:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found
