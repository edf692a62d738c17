"""How far is the simulator from the real engine, on this machine?

    python -m benchmarks.fidelity_cpu [--rounds 3] [--steps 4] [--best]

Two CPU ranks, a core each, train a small Llama by six ragged plans. The profile (seconds of layers,
optimizer) and the cluster (latency and bandwidth of messages, memory bandwidth) are measured here,
by the runtime's own parts, while both ranks work; they are written beside the results and can be
given to `zorse simulate`. Then each plan is run by the engine and simulated from these files. Step
times are medians, measured in turns with the profile (`--best`: minima throughout, for a machine
that others use too); peak bytes are the ledger's.
"""

import argparse
import json
import os
import statistics
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.progress import track
from rich.table import Table

import zorse_ds
from benchmarks.fidelity_parts import LENGTH, MODEL, Pick, cluster_of, measure_parts, profile_of
from benchmarks.llama_layers import TokenLoss, layer_specs, random_tokens
from tests.ranks.harness import run_ranks
from zorse_ds.core.plan import Plan
from zorse_ds.cost.layer_times import timer_of
from zorse_ds.cost.setting import Setting
from zorse_ds.schedule.compile import compile_trace
from zorse_ds.simulator.simulate import simulate

CONFIG: dict[str, Any] = {
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "torch_adam": True}},
    "gradient_clipping": 0.0,
    "steps_per_print": 10**9,
    "zorse": {"count_memory": True, "optimizer_step": "delayed"},
}
RECOMPUTED = ("embedding", "block", "head")
"""Recompute takes every layer of a list."""


def plans() -> dict[str, Plan]:
    """Six ragged plans for two ranks."""
    one, two = _group("a", [(0, [3, 3, 2])]), _group("b", [(1, [2, 1, 2, 1, 2])])
    pair = [(0, [2, 2, 2], 2.0), (1, [3, 1, 1, 1], 1.0)]
    return {
        "1f1b, 4 + 6 layers": _plan("1f1b", 8, [one, two], [("a", 4), ("b", 6)]),
        "1f1b, recompute above": _plan(
            "1f1b", 8, [{**one, "recompute": "full"}, two], [("a", 5), ("b", 5)]
        ),
        "gpipe, 6 + 4 layers": _plan("gpipe", 8, [one, two], [("a", 6), ("b", 4)]),
        "one group, zero 2, shards 2 : 1": _plan(
            "1f1b", 12, [_group("a", pair, zero_level=2)], [("a", 10)]
        ),
        "one group, ministages, zero 3": _plan(
            "ministage", 12, [_group("a", pair, zero_level=3)], [("a", 4), ("a", 3), ("a", 3)]
        ),
        "two groups, ministages": _plan(
            "ministage", 8, [one, two], [("a", 3), ("b", 3), ("a", 2), ("b", 2)]
        ),
    }


def _group(name: str, gpus: list[tuple[Any, ...]], **settings: Any) -> dict[str, Any]:
    keys = ("rank", "micro_batches", "shard_weight")
    return {"name": name, "gpus": [dict(zip(keys, gpu, strict=False)) for gpu in gpus], **settings}


def _plan(
    schedule: str, batch: int, groups: list[dict[str, Any]], cuts: list[tuple[str, int]]
) -> Plan:
    stages, first = [], 0
    for group, size in cuts:
        stages.append({"group": group, "layers": [first, first + size]})
        first += size
    return Plan.from_dict(
        {"global_batch_size": batch, "schedule": schedule, "groups": groups, "stages": stages}
    )


def run_engine(rank: int, plan: Plan, steps: int, counts: bool) -> dict[str, Any]:
    """Time some steps after a first one; or count the memory of the second step."""
    torch.set_num_threads(1)
    module = zorse_ds.ZorsePipelineModule(layer_specs(MODEL), plan, TokenLoss())
    data = random_tokens(2 * plan.global_batch_size, LENGTH, MODEL.vocab_size)
    engine = zorse_ds.initialize(model=module, config=CONFIG, training_data=data)[0]
    ledger, engine._worker.ledger = engine._worker.ledger, None
    engine.train_batch()
    if counts:
        engine._worker.ledger = ledger
        engine.train_batch()
        memory = engine.report.memory
        return {"peak_bytes": memory.peak_bytes, "at_peak": memory.at_peak}
    seconds = []
    for _ in range(steps):
        dist.barrier()
        start = time.perf_counter()
        engine.train_batch()
        seconds.append(time.perf_counter() - start)
    return {"seconds": seconds}


def compare(
    rounds: int, steps: int, repeats: int, pick: Pick, output: Path
) -> list[dict[str, Any]]:
    """Profile and plans in turns; then the simulation from what was measured."""
    parts: list[list[dict[str, Any]]] = []
    seconds: dict[str, list[float]] = {name: [] for name in plans()}
    for _ in track(range(rounds), description="measuring"):
        parts.append(run_ranks(2, measure_parts, repeats, pick, timeout_s=600))
        for name, plan in plans().items():
            runs = run_ranks(2, run_engine, plan, steps, False, timeout_s=600)
            seconds[name] += [max(pair) for pair in zip(*(r["seconds"] for r in runs), strict=True)]
    profile, cluster = profile_of(parts, pick), cluster_of(parts, pick)
    profile.save(output / "fidelity_profile.json")
    cluster.save(output / "fidelity_cluster.json")
    setting = Setting(
        cluster, profile.model, timer_of(profile, cluster.known_types), LENGTH, dtype="float32"
    )
    setting = replace(
        setting, profile=profile, reserve_bytes=0, recomputed=RECOMPUTED, step_workspace_bytes=8
    )
    return [_compared(name, plan, setting, pick(seconds[name])) for name, plan in plans().items()]


def _compared(name: str, plan: Plan, setting: Setting, measured_s: float) -> dict[str, Any]:
    memory = run_ranks(2, run_engine, plan, 1, True, timeout_s=600)
    simulation = simulate(compile_trace(plan), setting, record=False)
    return {
        "plan": name,
        "measured_s": measured_s,
        "simulated_s": simulation.step_s,
        "error": simulation.step_s / measured_s - 1,
        "busy_share": simulation.busy_share,
        "measured_bytes": [own["peak_bytes"] for own in memory],
        "simulated_bytes": [own.counted_bytes for own in simulation.memory.values()],
        "bytes_error": [
            own.counted_bytes / real["peak_bytes"] - 1
            for own, real in zip(simulation.memory.values(), memory, strict=True)
        ],
        "at_peak": [own["at_peak"] for own in memory],
    }


def show(results: list[dict[str, Any]]) -> None:
    """The table for people."""
    table = Table("plan", "step s", "simulated", "error", "peak MB", "simulated", "error")
    for result in results:
        table.add_row(
            result["plan"],
            f"{result['measured_s']:.3f}",
            f"{result['simulated_s']:.3f}",
            f"{100 * result['error']:+.1f} %",
            " ".join(f"{each / 1e6:.1f}" for each in result["measured_bytes"]),
            " ".join(f"{each / 1e6:.1f}" for each in result["simulated_bytes"]),
            " ".join(f"{100 * each:+.1f} %" for each in result["bytes_error"]),
        )
    Console().print(table)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=4, help="timed of each plan and round")
    parser.add_argument("--repeats", type=int, default=9, help="of each part and round")
    parser.add_argument("--best", action="store_true", help="minima, not medians")
    parser.add_argument("--output", type=Path, default=Path("build/benchmarks"))
    args = parser.parse_args()
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    args.output.mkdir(parents=True, exist_ok=True)
    pick: Pick = min if args.best else statistics.median
    results = compare(args.rounds, args.steps, args.repeats, pick, args.output)
    (args.output / "fidelity_cpu.json").write_text(json.dumps(results, indent=2))
    show(results)


if __name__ == "__main__":
    main()
