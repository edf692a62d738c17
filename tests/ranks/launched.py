"""Starts `launched_job.py` in processes that share nothing with the tests; reads its results."""

from __future__ import annotations

import json
import os
import socket
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from tests.ranks.launched_job import STEPS, WIDTH, dataset

ROOT = Path(__file__).parents[2]
JOB = Path(__file__).with_name("launched_job.py")
PLAN = {
    "version": 1,
    "global_batch_size": 5,
    "groups": [
        {"name": "a", "gpus": [{"rank": 0, "micro_batches": [2, 3]}]},
        {"name": "b", "gpus": [{"rank": 1, "micro_batches": [4, 1]}]},
    ],
    "stages": [{"group": "a", "layers": [0, 1]}, {"group": "b", "layers": [1, 4]}],
}
CONFIG = {
    "train_batch_size": 5,
    "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
    "gradient_clipping": 0.0,
    "zorse": {"plan": "plan.json", "data": {"shuffle": False}},
}


def write_inputs(folder: Path) -> list[str]:
    """Plan and config beside each other; the script's arguments."""
    (folder / "plan.json").write_text(json.dumps(PLAN))
    (folder / "ds.json").write_text(json.dumps(CONFIG))
    return ["--deepspeed", "--deepspeed_config", "ds.json", "--output", str(folder)]


def environment(packages: Sequence[Path] = ()) -> dict[str, str]:
    """Of a user's shell on a host without GPUs; `packages` shadow what is installed."""
    path = os.pathsep.join(map(str, [*packages, ROOT]))
    return {**os.environ, "PYTHONPATH": path, "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}


def free_port() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])


def run_to_end(
    commands: Sequence[tuple[Sequence[str], Mapping[str, str]]], folder: Path, timeout_s: float
) -> None:
    """Runs commands at once; fails with the output of the first that fails."""
    options: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    processes = [
        subprocess.Popen(command, env=dict(env), cwd=folder, **options) for command, env in commands
    ]
    try:
        outputs = [process.communicate(timeout=timeout_s)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    for process, output in zip(processes, outputs, strict=True):
        assert process.returncode == 0, output[-4000:]


def results_in(folder: Path) -> list[dict[str, Any]]:
    return [torch.load(folder / f"rank{rank}.pt") for rank in range(2)]


def reference_losses() -> list[float]:
    """The same steps in this process."""
    layers = []
    for index in range(4):
        torch.manual_seed(1234 + index)
        layers.append(torch.nn.Linear(WIDTH, WIDTH))
    model = torch.nn.Sequential(*layers)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for step in range(STEPS):
        inputs, labels = zip(*dataset()[5 * step : 5 * step + 5], strict=True)
        loss = torch.nn.functional.mse_loss(model(torch.stack(inputs)), torch.stack(labels))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses
