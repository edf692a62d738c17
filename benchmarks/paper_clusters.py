"""How good are the planner's plans on the clusters of the Zorse paper, and how soon are they found?

    python -m benchmarks.paper_clusters

Llama-2 shapes, a batch of a million tokens. Per cluster and model: the fraction of the compute-only
ceiling (full recompute, no communication) of the planner's plan by the simulator, beside the best
uniform plan of equal layers and equal batches over every pipeline depth, and ZeRO-3 over all. Times
of layers are estimates from the catalogue. `--growth` prints planning seconds against GPUs instead.
"""

import argparse
import json
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from zorse_ds.core.cluster import Cluster
from zorse_ds.core.cluster_files import cluster_from
from zorse_ds.core.model import ModelShape
from zorse_ds.core.plan import Plan
from zorse_ds.cost.compute import compute_times
from zorse_ds.cost.dtypes import dtype_of, usable_dtype
from zorse_ds.cost.layer_times import timer_of
from zorse_ds.cost.memory import memory_of
from zorse_ds.cost.setting import Setting
from zorse_ds.errors import PlannerError
from zorse_ds.planner.effort import Effort
from zorse_ds.planner.search import search
from zorse_ds.ranges import apportion, consecutive
from zorse_ds.simulator.quick import quick_step_s
from zorse_ds.simulator.simulate import ceiling_samples_per_s

TOKENS = 1 << 20
LENGTHS = {"zorse_a": 4096, "zorse_b": 1024, "zorse_c": 512}
MODELS = {
    "7B": ModelShape.llama("7B", 32, 4096, 11008, 32),
    "13B": ModelShape.llama("13B", 40, 5120, 13824, 40),
    "33B": ModelShape.llama("33B", 60, 6656, 17920, 52),
}
POD_TYPES = ("H100-SXM", "A100-SXM-80GB", "A10G", "V100-SXM2-32GB")


@dataclass(frozen=True)
class Row:
    """One cluster and model."""

    cluster: str
    model: str
    ceiling_share: float | None
    """Of the planner's plan; None when it found none."""
    planning_s: float
    schedule: str
    num_groups: int
    num_visits: int
    offload: bool
    uniform_share: float | None
    """Of the best plan of equal layers and batches that fits; None when none does."""
    zero3_share: float | None
    """Of one group of all GPUs, sharded parameters."""


def measured(name: str, model: str, effort: Effort) -> Row:
    """Plan for a cluster and model, and judge the uniform plans."""
    setting = setting_for(cluster_from(name), MODELS[model], LENGTHS[name])
    batch = TOKENS // LENGTHS[name]
    ceiling_s = batch / ceiling_samples_per_s(setting)
    uniform = _best_share(uniform_plans(setting, batch), setting, ceiling_s)
    zero3 = _best_share(sharded_plans(setting, batch), setting, ceiling_s)
    start = time.perf_counter()
    try:
        best = search(setting, batch, effort).best
    except PlannerError:
        planning_s = time.perf_counter() - start
        return Row(name, model, None, planning_s, "", 0, 0, False, uniform, zero3)
    return Row(
        name,
        model,
        ceiling_s / best.step_s,
        time.perf_counter() - start,
        best.plan.schedule,
        len(best.plan.groups),
        best.draft.num_visits,
        any(group.offload != "none" for group in best.plan.groups),
        uniform,
        zero3,
    )


def setting_for(cluster: Cluster, model: ModelShape, seq_len: int) -> Setting:
    """With estimated layer times."""
    return Setting(cluster, model, timer_of(None, cluster.known_types), seq_len)


def uniform_plans(setting: Setting, batch: int) -> Iterator[dict[str, Any]]:
    """What stock DeepSpeed's pipeline can say: a rectangle of equal stages and micro-batches."""
    world, layers = len(setting.cluster.gpus), setting.model.num_layers
    for depth in range(1, min(world, layers) + 1):
        if world % depth or batch % (world // depth):
            continue
        width = world // depth
        for size in (1, 2, 4, 8):
            if (batch // width) % size:
                continue
            for recompute in ("none", "full"):
                groups = [
                    _group(i, range(i * width, (i + 1) * width), batch // width, size)
                    | {"zero_level": 1, "recompute": recompute}
                    for i in range(depth)
                ]
                yield _plan(setting, batch, "1f1b", groups, depth)


def sharded_plans(setting: Setting, batch: int) -> Iterator[dict[str, Any]]:
    """ZeRO-3 over all GPUs with equal batches; parameters gathered once a stage of one layer."""
    world, layers = len(setting.cluster.gpus), setting.model.num_layers
    if batch % world:
        return
    for size in (1, 2, 4, 8):
        if not (batch // world) % size:
            group = _group(0, range(world), batch // world, size)
            group |= {"zero_level": 3, "recompute": "full"}
            yield _plan(setting, batch, "ministage", [group], layers)


def _group(index: int, ranks: range, samples: int, size: int) -> dict[str, Any]:
    sizes = [size] * (samples // size)
    gpus = [{"rank": rank, "micro_batches": sizes} for rank in ranks]
    return {"name": f"group {index}", "gpus": gpus}


def _plan(
    setting: Setting, batch: int, schedule: str, groups: list[dict[str, Any]], stages: int
) -> dict[str, Any]:
    types = {gpu.type.name: gpu.type for gpu in setting.cluster.gpus}
    dtypes = {usable_dtype(setting.dtype, kind) for kind in types.values()}
    dtype = dtypes.pop() if len(dtypes) == 1 else "float16"
    cuts = consecutive(apportion(setting.model.num_layers, [1] * stages))
    return {
        "global_batch_size": batch,
        "schedule": schedule,
        "groups": [group | {"dtype": dtype} for group in groups],
        "stages": [
            {"group": f"group {i % len(groups)}", "layers": list(cut)} for i, cut in enumerate(cuts)
        ],
    }


def _best_share(
    plans: Iterator[dict[str, Any]], setting: Setting, ceiling_s: float
) -> float | None:
    best_s: float | None = None
    for data in plans:
        plan = Plan.from_dict(data)
        # No step is shorter than what its busiest rank computes.
        if best_s is not None and _busiest_s(plan, setting) >= best_s:
            continue
        if all(own.fits for own in memory_of(plan, setting).values()):
            step_s = quick_step_s(plan, setting)
            best_s = step_s if best_s is None else min(best_s, step_s)
    return None if best_s is None else ceiling_s / best_s


def _busiest_s(plan: Plan, setting: Setting) -> float:
    times, seconds = compute_times(setting), dict.fromkeys(range(plan.world_size), 0.0)
    for index, stage in enumerate(plan.stages):
        group = plan.group_of_stage(index)
        for gpu in group.gpus:
            name = setting.cluster.gpus[gpu.rank].type.name
            sums = times.sums(name, dtype_of(group, setting), gpu.micro_batches[0])
            again = plan.recomputed(index)
            one = sums.forward_s(stage.layers) + sums.backward_s(stage.layers, again)
            seconds[gpu.rank] += one * len(gpu.micro_batches)
    return max(seconds.values())


def pods(num_gpus: int) -> Cluster:
    """Nodes of eight GPUs, of up to four types, a type's nodes in pods of 32 GPUs."""
    nodes = [
        {
            "gpu_type": POD_TYPES[index // 4 % len(POD_TYPES)],
            "num_gpus": 8,
            "intra_gb_per_s": 150,
            "nic_gb_per_s": 12.5,
        }
        for index in range(num_gpus // 8)
    ]
    return Cluster.from_dict({"nodes": nodes})


def growth(effort: Effort, console: Console) -> None:
    """Planning seconds for more and more GPUs; each is told as it is found."""
    table = Table("GPUs", "planning s", "of the ceiling")
    for num_gpus in (16, 32, 64, 128, 256, 512, 1024, 2048):
        setting = setting_for(pods(num_gpus), MODELS["7B"], 2048)
        batch = max(512, 2 * num_gpus)
        start = time.perf_counter()
        best = search(setting, batch, effort).best
        seconds = time.perf_counter() - start
        share = batch / ceiling_samples_per_s(setting) / best.step_s
        console.log(f"{num_gpus} GPUs: {seconds:.1f} s, {share:.3f} of the ceiling")
        table.add_row(str(num_gpus), f"{seconds:.1f}", f"{share:.3f}")
    console.print(table)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--clusters", nargs="+", choices=list(LENGTHS), default=list(LENGTHS))
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=list(MODELS))
    parser.add_argument("--growth", action="store_true")
    parser.add_argument("--output", type=Path, default=Path("build/benchmarks"))
    args = parser.parse_args()
    console, effort = Console(), Effort(workers=2)
    if args.growth:
        growth(effort, console)
        return
    rows = []
    for cluster in args.clusters:
        for model in args.models:
            rows.append(measured(cluster, model, effort))
            console.log(rows[-1])
    args.output.mkdir(parents=True, exist_ok=True)
    text = json.dumps([asdict(row) for row in rows], indent=2)
    (args.output / "paper_clusters.json").write_text(text)
    heads = ["cluster", "model", "planned", "uniform", "ZeRO-3", "planning s", "schedule"]
    table = Table(*heads, "groups", "visits", "offload")
    for row in rows:
        shares = (row.ceiling_share, row.uniform_share, row.zero3_share)
        table.add_row(
            row.cluster,
            row.model,
            *("none fits" if share is None else f"{share:.3f}" for share in shares),
            f"{row.planning_s:.1f}",
            row.schedule,
            str(row.num_groups),
            str(row.num_visits),
            "yes" if row.offload else "no",
        )
    console.print(table)


if __name__ == "__main__":
    main()
