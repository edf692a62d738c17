"""A script as a user writes it for `zorse run`: goes on from its last checkpoint, saves every step.

    restarted_job.py OUTPUT [--kill STEP RANK] [--pause SECONDS]

Appends `step loss` to OUTPUT/losses on the first rank. With --kill that rank is killed in that step
of the first attempt.
"""

from __future__ import annotations

import argparse
import os
import signal
import time
from pathlib import Path

import deepspeed
import torch.distributed as dist
from torch import nn

import zorse_ds
from tests.ranks.checkpoint_jobs import CONFIG, PLANS, Numbered, job_layers

STEPS = 8


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("output", type=Path)
    parser.add_argument("--plan", default="3 ranks")
    parser.add_argument("--kill", type=int, nargs=2, default=(-1, -1))
    parser.add_argument("--pause", type=float, default=0.0, help="after each step")
    parser.add_argument("--local_rank", type=int, default=0)
    args = parser.parse_args()
    plan = zorse_ds.Plan.from_dict(PLANS[args.plan])
    model = zorse_ds.ZorsePipelineModule(job_layers(), plan, loss_fn=nn.MSELoss())
    config = CONFIG | {"zorse": {"timeout_s": 60}}
    engine, *_ = zorse_ds.initialize(model=model, config=config, training_data=Numbered())
    path, _ = engine.load_checkpoint(str(args.output / "ckpt"))
    while engine.global_steps < STEPS:
        if path is None and [engine.global_steps + 1, dist.get_rank()] == list(args.kill):
            os.kill(os.getpid(), signal.SIGKILL)
        loss = float(engine.train_batch())
        if dist.get_rank() == 0:
            with (args.output / "losses").open("a") as file:
                print(engine.global_steps, loss.hex(), len(model.plan.groups), file=file)
        engine.save_checkpoint(str(args.output / "ckpt"))
        time.sleep(args.pause)
    engine.destroy()
    dist.destroy_process_group()


if __name__ == "__main__":
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    main()
