"""One rank of `benchmarks.two_hosts`: trains by each of its plans, and times the steps."""

import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from transformers import AutoConfig

import zorse_ds
from benchmarks.llama_layers import random_tokens
from benchmarks.two_hosts import BATCH, LENGTH, plans
from zorse_ds.core.plan import Plan

CONFIG: dict[str, Any] = {
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "torch_adam": True}},
    "gradient_clipping": 0.0,
    "steps_per_print": 10**9,
    "zorse": {"optimizer_step": "delayed", "data": {"shuffle": False}},
}


def step_seconds(folder: Path, plan: Plan, steps: int) -> list[float]:
    """Of each step after a first one, from when all ranks begin to when the last one ends."""
    config = AutoConfig.from_pretrained(folder / "model")
    model = zorse_ds.from_config(config, plan)
    rows = random_tokens(2 * BATCH, LENGTH, config.vocab_size)
    data = [{"input_ids": ids.tolist(), "labels": ids.tolist()} for ids, _ in rows]
    engine = zorse_ds.initialize(model=model, config=CONFIG, training_data=data)[0]
    engine.train_batch()
    seconds = []
    for _ in range(steps):
        dist.barrier()
        start = time.perf_counter()
        engine.train_batch()
        own = torch.tensor(time.perf_counter() - start)
        dist.all_reduce(own, op=dist.ReduceOp.MAX)
        seconds.append(float(own))
    engine.destroy()
    return seconds


def main() -> None:
    """Arguments: the folder, and how many steps."""
    folder, steps = Path(sys.argv[1]), int(sys.argv[2])
    torch.set_num_threads(1)
    seconds = {name: step_seconds(folder, plan, steps) for name, plan in plans().items()}
    if dist.get_rank() == 0:
        (folder / "seconds.json").write_text(json.dumps(seconds))


if __name__ == "__main__":
    main()
