"""A script as a user writes it, in which one rank fails in a given way at a given step.

    python failing_job.py FOLDER WAY RANK

Ways: `dataset`, `layer`, `loss` raise there; `between` raises in the script; `kill` and `stop` send
SIGKILL and SIGSTOP to the own process in the middle of a step; `sleep` and `spin` never return, the
latter without giving other threads a turn; `exit` leaves the program without a word; `none` trains.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from deepspeed.pipe import LayerSpec
from torch import Tensor, nn

import zorse_ds
from tests.ranks.engine_models import WIDTH, plan_of, vectors

FAILS_AT = 3
STEPS = 6
PLAN = plan_of([[[3, 1], [2, 1]], [[2, 5]], [[7]]], [0, 1, 2, 3], zero=[1, 0, 0])
"""Four ranks: 0 and 1 first, 2 in the middle, 3 last."""
TIMEOUT_S = 6.0

folder, way, failing_rank = Path(), "none", -1
steps_begun = 0


def fail() -> None:
    """In the middle of a step of the failing rank."""
    (folder / "failed").touch()
    if way in ("dataset", "layer", "loss", "between"):
        raise ValueError(f"broken {way}")
    if way == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if way == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    if way == "exit":
        sys.exit(5)
    if way == "sleep":
        time.sleep(3600)
    if way == "spin":
        ctypes.PyDLL(None).usleep(ctypes.c_uint(3_600_000_000 // 2))


def is_time(*ways: str) -> bool:
    mine = int(os.environ["RANK"]) == failing_rank
    return mine and way in ways and steps_begun == FAILS_AT


class Data(list[Any]):
    def __getitem__(self, index: Any) -> Any:
        if is_time("dataset"):
            fail()
        return super().__getitem__(index)


class Layer(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        if is_time("layer", "kill", "stop", "sleep", "spin", "exit"):
            fail()
        return super().forward(x)


def loss_fn(outputs: Tensor, labels: Tensor) -> Tensor:
    if is_time("loss"):
        fail()
    return F.mse_loss(outputs, labels)


def main() -> None:
    global folder, way, failing_rank, steps_begun
    folder, way, failing_rank = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
    model = zorse_ds.ZorsePipelineModule(
        [LayerSpec(Layer, WIDTH, WIDTH) for _ in range(3)],
        zorse_ds.Plan.from_dict(PLAN),
        loss_fn=loss_fn,
    )
    config = {
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        "steps_per_print": None,
        "zorse": {"timeout_s": TIMEOUT_S},
    }
    engine, *_ = zorse_ds.initialize(model=model, config=config, training_data=Data(vectors(28)))
    for steps_begun in range(1, STEPS + 1):
        if is_time("between"):
            fail()
        engine.train_batch()
        if steps_begun == FAILS_AT - 1:
            engine.save_checkpoint(str(folder / "ckpt"))
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
