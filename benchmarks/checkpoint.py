"""Checkpoints: how large, and how long does training wait, against stock DeepSpeed?

    python -m benchmarks.checkpoint [--ranks 4] [--rounds 3] [--hidden 512] [--blocks 7]

Stock `PipelineEngine` with ZeRO-1 and `ZorseEngine` train the same layers with AdamW in float32 and
save after every step; the median counts, without the first save, which also allocates. "Blocked" is
how long `save_checkpoint` keeps the slowest rank from its next step, "written" until the files are
on the disk (stock leaves them to the page cache, so the disk's own time is added by `sync`).
"Copy" is the time that the slowest rank needs to copy the same tensors once in memory, by torch
alone, with all ranks copying at a time: in the background nothing else should block. It copies into
memory that is there, as ours is after the first save; "clone" copies into new memory.
"""

import argparse
import json
import math
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table

from benchmarks import homogeneous
from benchmarks.llama_layers import llama_config
from tests.ranks.harness import run_ranks
from zorse_ds.integrations.deepspeed.module import init_distributed
from zorse_ds.runtime.checkpoint.capture import capture

KINDS = ("stock", "zorse", "zorse, async")


def timed(action: Callable[[], Any]) -> float:
    """Seconds that the slowest rank needs; all begin together."""
    dist.barrier()
    start = time.perf_counter()
    action()
    seconds = torch.tensor(time.perf_counter() - start)
    dist.all_reduce(seconds, dist.ReduceOp.MAX)
    return float(seconds)


def size_of(folder: Path) -> int:
    """Bytes of all files below a folder."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def make_engine(kind: str, world_size: int, parts: list[int]) -> Any:
    """The engine of a kind, and the cut that DeepSpeed chose."""
    if kind == "stock":
        return homogeneous.stock_engine(world_size)
    checkpoint = {"async": kind.endswith("async"), "keep_last": 1}
    engine = homogeneous.zorse_engine(world_size, parts, zorse={"checkpoint": checkpoint})
    return engine, parts


def save_once(engine: Any, root: Path) -> tuple[float, float]:
    """Seconds blocked, and seconds until everything is on the disk."""
    start = time.perf_counter()
    blocked = timed(lambda: engine.save_checkpoint(str(root)))
    if hasattr(engine, "report"):
        engine._checkpoints.wait()
    else:
        os.sync()
    dist.barrier()
    return blocked, time.perf_counter() - start


def copy_seconds(engine: Any, rounds: int) -> tuple[list[float], list[float]]:
    """What it takes to copy a rank's part once: into memory that is there, and into new memory."""
    values = [entry.values for entry in capture(engine._checkpoints._rank_state()).entries]
    kept = [value.clone() for value in values]

    def copy() -> None:
        for target, value in zip(kept, values, strict=True):
            target.copy_(value)

    def clone() -> None:
        _ = [value.clone() for value in values]

    return [timed(copy) for _ in range(rounds)], [timed(clone) for _ in range(rounds)]


def measure(
    rank: int, kind: str, world_size: int, parts: list[int], rounds: int, root: Path
) -> dict[str, Any]:
    """Train, save, load."""
    torch.set_num_threads(1)
    init_distributed()
    engine, parts = make_engine(kind, world_size, parts)
    saves = []
    for _ in range(rounds + 1):
        engine.train_batch()
        saves.append(save_once(engine, root))
        tag = f"global_step{engine.global_steps}"
        if rank == 0:
            num_bytes = size_of(root / tag)
            for old in root.glob("global_step*"):
                if old.name != tag:
                    shutil.rmtree(old)
        dist.barrier()
    load_s = timed(lambda: engine.load_checkpoint(str(root)))
    own = sum(p.numel() for p in engine.module.parameters())
    copies, clones = ([], []) if kind == "stock" else copy_seconds(engine, rounds)
    return {
        "blocked_s": [blocked for blocked, _ in saves[1:]],
        "written_s": [written for _, written in saves[1:]],
        "copy_s": copies,
        "clone_s": clones,
        "load_s": load_s,
        "num_bytes": num_bytes if rank == 0 else 0,
        "num_parameters": own,
        "parts": [int(part) for part in parts],
    }


def compare(world_size: int, rounds: int) -> dict[str, Any]:
    """All kinds, one after the other."""
    found: dict[str, Any] = {}
    parts: list[int] = []
    for kind in KINDS:
        with tempfile.TemporaryDirectory() as folder:
            ranks = run_ranks(
                world_size, measure, kind, world_size, parts, rounds, Path(folder), timeout_s=900
            )
        parts = ranks[0]["parts"]
        width = world_size // homogeneous.STAGES
        state = 12 * sum(rank["num_parameters"] for rank in ranks) // width
        first = ranks[0]
        found[kind] = {
            "state_bytes": state,
            "num_bytes": first["num_bytes"],
            "blocked_s": statistics.median(first["blocked_s"]),
            "written_s": statistics.median(first["written_s"]),
            "copy_s": statistics.median(first["copy_s"] or [float("nan")]),
            "clone_s": statistics.median(first["clone_s"] or [float("nan")]),
            "load_s": first["load_s"],
        }
    return {"ranks": world_size, "by_kind": found}


def show(result: dict[str, Any]) -> None:
    """The table for people."""
    table = Table("", "size / state", "blocked", "written", "copy", "clone", "loaded")
    for kind, found in result["by_kind"].items():
        keys = ("blocked_s", "written_s", "copy_s", "clone_s", "load_s")
        seconds = (found[key] for key in keys)
        ratio = found["num_bytes"] / found["state_bytes"]
        table.add_row(
            kind, f"{ratio:.2f}", *("" if math.isnan(s) else f"{s:.3f} s" for s in seconds)
        )
    state = next(iter(result["by_kind"].values()))["state_bytes"]
    console = Console()
    console.print(f"{result['ranks']} ranks, state (12 bytes a parameter) {state / 2**20:.0f} MiB")
    console.print(table)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--blocks", type=int, default=7)
    parser.add_argument("--output", type=Path, default=Path("build/benchmarks"))
    args = parser.parse_args()
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    homogeneous.llama_config = lambda: llama_config(args.hidden, args.blocks)
    result = compare(args.ranks, args.rounds)
    args.output.mkdir(parents=True, exist_ok=True)
    (args.output / "checkpoint.json").write_text(json.dumps(result, indent=2))
    show(result)


if __name__ == "__main__":
    main()
