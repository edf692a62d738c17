"""Starting a run with DeepSpeed's own launcher."""

import os
import socket
import sys
from collections.abc import Mapping
from pathlib import Path

import torch
from deepspeed.launcher.runner import fetch_hostfile

from zorse_ds.core.hostfile import check_slots
from zorse_ds.core.plan import Plan
from zorse_ds.errors import ConfigError
from zorse_ds.integrations.recipe.run_folder import RunFolder
from zorse_ds.integrations.recipe.schema import Recipe

SCRIPT = "zorse_ds.integrations.recipe.script"


def hostfile_of(recipe: Recipe) -> Path | None:
    """The launcher's hostfile: the recipe's, or its cluster where that is one."""
    if recipe.hostfile is not None:
        return Path(recipe.hostfile)
    cluster = None if recipe.cluster is None else Path(recipe.cluster)
    if cluster is None or not cluster.is_file() or cluster.suffix == ".json":
        return None
    return cluster if not cluster.read_text().lstrip().startswith("{") else None


def command_of(recipe: Recipe, plan: Plan, folder: RunFolder) -> list[str]:
    """The command that trains. Raises `ConfigError` where it would start other than all ranks."""
    command = [sys.executable, "-m", "deepspeed.launcher.runner"]
    command += ["--no_local_rank", "--log_level", "warning"]
    hostfile = hostfile_of(recipe)
    if hostfile is None:
        _check_devices(plan.world_size)
        command += ["--num_accelerators", str(plan.world_size), "--master_port", str(_free_port())]
    else:
        _check_hosts(hostfile, plan.world_size)
        command += ["--hostfile", str(hostfile)]
    return [*command, "--module", SCRIPT, str(folder.root)]


def environment_of(plan: Plan, given: Mapping[str, str]) -> dict[str, str]:
    """`given` with what processes on the CPU need, where there is nothing else."""
    if uses_gpus(given):
        return dict(given)
    threads = max((os.cpu_count() or 1) // plan.world_size, 1)
    return {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": str(threads), **given}


def uses_gpus(environment: Mapping[str, str] = os.environ) -> bool:
    """Whether ranks compute on accelerators."""
    return environment.get("DS_ACCELERATOR") != "cpu" and torch.cuda.device_count() > 0


def _check_devices(num_ranks: int) -> None:
    found = torch.cuda.device_count()
    if uses_gpus() and found < num_ranks:
        raise ConfigError(
            f"the plan has {num_ranks} ranks, but there are {found} GPUs here; expected a hostfile "
            "of all nodes, or DS_ACCELERATOR=cpu for processes on the CPU"
        )


def _check_hosts(hostfile: Path, num_ranks: int) -> None:
    check_slots(hostfile)
    found = sum(fetch_hostfile(str(hostfile)).values())
    if found != num_ranks:
        raise ConfigError(
            f"{hostfile} has {found} slots, but the plan has {num_ranks} ranks; expected one for "
            "each"
        )


def _free_port() -> int:
    """A port of its own, so that another job on this machine does not matter."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
