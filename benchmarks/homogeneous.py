"""Equal devices, real compute: is zorse_ds as quick and as small as stock DeepSpeed?

    python -m benchmarks.homogeneous [--ranks 2 4] [--rounds 5] [--steps 8]

Stock `PipelineEngine` with ZeRO-1 and `ZorseEngine` run the same layers, cut, micro-batches and
optimizer on the same processes, in turns. Reported are ratios of medians; a step is a whole
`train_batch`. Memory is what a rank's resident set grew at its highest, from before the model was
built.
"""

import argparse
import json
import os
import statistics
import time
from pathlib import Path
from typing import Any

import deepspeed
import torch
from deepspeed.pipe import PipelineModule
from rich.console import Console
from rich.progress import track
from rich.table import Table

import zorse_ds
from benchmarks.llama_layers import layer_specs, llama_config, mean_token_loss, random_tokens
from benchmarks.resident import reset_peak, status_bytes
from tests.ranks.harness import run_ranks
from zorse_ds.integrations.deepspeed.module import init_distributed

STAGES = 2
MICRO_BATCH_SIZE = 2
LENGTH = 128
MICRO_BATCHES = 8
CONFIG: dict[str, Any] = {
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "torch_adam": True}},
    "gradient_clipping": 1.0,
    "steps_per_print": 10**9,
}


def stock_engine(world_size: int) -> Any:
    """DeepSpeed's own engine: pipe 2, data-parallel for the rest, ZeRO-1."""
    model = llama_config()
    batch = MICRO_BATCH_SIZE * MICRO_BATCHES * (world_size // STAGES)
    module = PipelineModule(
        layer_specs(model),
        num_stages=STAGES,
        loss_fn=mean_token_loss,
        partition_method="parameters",
        seed_layers=False,
    )
    config = CONFIG | {
        "train_batch_size": batch,
        "train_micro_batch_size_per_gpu": MICRO_BATCH_SIZE,
        "zero_optimization": {"stage": 1},
    }
    data = random_tokens(4 * batch, LENGTH, model.vocab_size)
    return deepspeed.initialize(model=module, config=config, training_data=data)[0], module.parts


def zorse_engine(world_size: int, parts: list[int], **config: Any) -> Any:
    """The same cut, width and micro-batches as a plan."""
    model = llama_config()
    width = world_size // STAGES
    plan = zorse_ds.Plan.from_dict(
        {
            "global_batch_size": MICRO_BATCH_SIZE * MICRO_BATCHES * width,
            "groups": [
                {
                    "name": f"stage {s}",
                    "zero_level": 1,
                    "gpus": [
                        {"rank": s * width + i, "micro_batches": [MICRO_BATCH_SIZE] * MICRO_BATCHES}
                        for i in range(width)
                    ],
                }
                for s in range(STAGES)
            ],
            "stages": [
                {"group": f"stage {s}", "layers": [parts[s], parts[s + 1]]} for s in range(STAGES)
            ],
        }
    )
    module = zorse_ds.ZorsePipelineModule(layer_specs(model), plan, mean_token_loss)
    data = random_tokens(4 * plan.global_batch_size, LENGTH, model.vocab_size)
    return zorse_ds.initialize(model=module, config=CONFIG | config, training_data=data)[0]


def measure(rank: int, kind: str, world_size: int, parts: list[int], steps: int) -> dict[str, Any]:
    """Build one engine, warm it up, time its steps."""
    torch.set_num_threads(1)
    init_distributed()
    reset_peak()
    before = status_bytes("VmRSS")
    if kind == "stock":
        engine, parts = stock_engine(world_size)
    else:
        engine = zorse_engine(world_size, parts)
    losses, seconds = [], []
    for step in range(steps + 2):
        start = time.perf_counter()
        losses.append(float(engine.train_batch()))
        if step >= 2:
            seconds.append(time.perf_counter() - start)
    peak = status_bytes("VmHWM") - before
    return {
        "seconds": seconds,
        "peak_bytes": peak,
        "losses": losses,
        "parts": [int(p) for p in parts],
    }


def compare(world_size: int, rounds: int, steps: int) -> dict[str, Any]:
    """Both engines in turns; medians over all steps of all rounds."""
    runs: dict[str, list[list[dict[str, Any]]]] = {"stock": [], "zorse": []}
    parts: list[int] = []
    for i in track(range(2 * rounds), description=f"{world_size} ranks"):
        kind = ("stock", "zorse")[i % 2]
        results = run_ranks(world_size, measure, kind, world_size, parts, steps, timeout_s=600)
        parts = results[0]["parts"]
        runs[kind].append(results)
    seconds = {k: [s for r in v for s in r[0]["seconds"]] for k, v in runs.items()}
    peaks = {
        k: [statistics.median(r[rank]["peak_bytes"] for r in v) for rank in range(world_size)]
        for k, v in runs.items()
    }
    by_round = [
        statistics.median(z[0]["seconds"]) / statistics.median(s[0]["seconds"])
        for s, z in zip(runs["stock"], runs["zorse"], strict=True)
    ]
    return {
        "ranks": world_size,
        "median_step_s": {k: statistics.median(v) for k, v in seconds.items()},
        "step_ratio": statistics.median(seconds["zorse"]) / statistics.median(seconds["stock"]),
        "step_ratio_by_round": by_round,
        "peak_bytes": peaks,
        "peak_ratio": [z / s for z, s in zip(peaks["zorse"], peaks["stock"], strict=True)],
        "first_losses": {k: v[0][0]["losses"][:3] for k, v in runs.items()},
    }


def show(results: list[dict[str, Any]]) -> None:
    """The table for people."""
    table = Table("ranks", "step, ours / stock", "by round", "peak memory by rank, ours / stock")
    for result in results:
        table.add_row(
            str(result["ranks"]),
            f"{result['step_ratio']:.3f}",
            " ".join(f"{ratio:.2f}" for ratio in result["step_ratio_by_round"]),
            " ".join(f"{ratio:.2f}" for ratio in result["peak_ratio"]),
        )
    Console().print(table)


def draw(results: list[dict[str, Any]], path: Path) -> None:
    """The picture: median step and peak memory of both, side by side."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 2, figsize=(8, 3), layout="constrained")
    for offset, kind in ((-0.2, "stock"), (0.2, "zorse")):
        places = [i + offset for i in range(len(results))]
        step = [r["median_step_s"][kind] / r["median_step_s"]["stock"] for r in results]
        peak = [max(r["peak_bytes"][kind]) / max(r["peak_bytes"]["stock"]) for r in results]
        for axis, values in zip(axes, (step, peak), strict=True):
            axis.bar(places, values, width=0.38, label=kind)
    for axis, title in zip(axes, ("step time", "largest peak memory"), strict=True):
        axis.set_title(f"{title}, stock = 1")
        axis.set_xticks(range(len(results)), [f"{r['ranks']} ranks" for r in results])
        axis.axhline(1, color="grey", linewidth=0.8)
    axes[0].legend()
    figure.savefig(path, dpi=120)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--output", type=Path, default=Path("build/benchmarks"))
    args = parser.parse_args()
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    results = [compare(ranks, args.rounds, args.steps) for ranks in args.ranks]
    args.output.mkdir(parents=True, exist_ok=True)
    (args.output / "homogeneous.json").write_text(json.dumps(results, indent=2))
    draw(results, args.output / "homogeneous.png")
    show(results)


if __name__ == "__main__":
    main()
