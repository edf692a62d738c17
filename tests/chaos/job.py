"""The training script of the chaos runs: resumes what there is, saves often, writes what it saw.

    FOLDER ATTEMPT PLAN MODE     (MODE: `sync` or `async`)

Each rank appends `step loss ids` to a file of its own after each step.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch

from tests.ranks.checkpoint_jobs import make_engine

STEPS = 60
SAVED_EVERY = 2


def trail_path(folder: Path, attempt: int, rank: int) -> Path:
    return folder / f"trail-{attempt}-{rank}"


def main() -> None:
    folder, attempt, plan, mode = Path(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:5]
    checkpoint = {"async": mode == "async", "keep_last": 3}
    engine = make_engine(plan, zorse={"checkpoint": checkpoint, "timeout_s": 30})
    engine.load_checkpoint(str(folder / "ckpt"))
    samples = engine.training_dataloader.dataset
    with trail_path(folder, attempt, int(os.environ["RANK"])).open("w") as file:
        while engine.global_steps < STEPS:
            samples.read.clear()
            loss = float(engine.train_batch())
            ids = ",".join(map(str, samples.read))
            print(engine.global_steps, loss.hex(), ids, file=file, flush=True)
            if engine.global_steps % SAVED_EVERY == 0:
                engine.save_checkpoint(str(folder / "ckpt"))
    engine.destroy()
    torch.distributed.destroy_process_group()
