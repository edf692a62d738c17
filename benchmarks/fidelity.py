"""How far is the simulator from the real engine, on clusters that are not at hand?

    python -m benchmarks.fidelity [--batch 48] [--time-scale 0] [--output build/benchmarks]

Nine plans over four clusters: the planner's best in ministages, and its groups with one stage
each in 1F1B and GPipe; on four equal GPUs its best of all, which is one stage over all of them.
Each is simulated, and trained by the real engine on virtual GPUs (as by `zorse rehearse`): virtual
clocks tell its step time, real tensors its peak bytes.
"""

import argparse
import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import track
from rich.table import Table

from zorse_ds.core.cluster import Cluster
from zorse_ds.core.cluster_files import cluster_from
from zorse_ds.core.gpus import GIB
from zorse_ds.core.model import ModelShape
from zorse_ds.core.plan import Plan
from zorse_ds.core.recompute import RECOMPUTE_KEYS
from zorse_ds.cost.frozen import FrozenTimes
from zorse_ds.cost.layer_times import timer_of
from zorse_ds.cost.setting import Setting
from zorse_ds.errors import PlannerError
from zorse_ds.integrations.deepspeed.rehearsal_plan import PlanRun, RankRun, rehearse_rank
from zorse_ds.planner.effort import Effort
from zorse_ds.planner.search import search
from zorse_ds.ranges import consecutive
from zorse_ds.rehearsal.clock import Pace
from zorse_ds.rehearsal.figures import Comparison, check_kept_up, compared
from zorse_ds.rehearsal.processes import run_processes
from zorse_ds.schedule.compile import compile_trace
from zorse_ds.simulator.simulate import simulate

EFFORT = Effort(judged=12, improved=1, events=150_000, workers=2)
"""The best plan need not be found: any will do that a planner would give."""
TWO_SITES = {
    "link_figures": "assumed",
    "inter_region_gb_per_s": 0.5,
    "inter_region_gb_per_s_is": "per_link",
    "nodes": [
        {
            "gpu_type": "A10G",
            "num_gpus": 2,
            "intra_gb_per_s": 16,
            "nic_gb_per_s": 6,
            "region": "here",
        },
        {
            "gpu_type": "L4",
            "num_gpus": 3,
            "intra_gb_per_s": 16,
            "nic_gb_per_s": 3,
            "region": "there",
        },
    ],
}
WANTED = {
    "mini_b": ("ministage", "1f1b", "gpipe"),
    "desk": ("ministage", "1f1b", "gpipe"),
    "two_sites": ("ministage", "1f1b"),
    "equal": ("best",),
}
EQUAL = {
    "link_figures": "assumed",
    "nodes": [{"gpu_type": "A10G", "num_gpus": 4, "intra_gb_per_s": 16, "nic_gb_per_s": 6}],
}
OWN_CLUSTERS: dict[str, dict[str, Any]] = {"two_sites": TWO_SITES, "equal": EQUAL}


@dataclass(frozen=True)
class Case:
    """One plan in its setting."""

    cluster: str
    plan: Plan
    setting: Setting
    optimizer_step: str


def cases(batch: int) -> Iterator[Case]:
    """All of them; stages of every other ministage plan step as soon as they can."""
    for number, (name, schedules) in enumerate(WANTED.items()):
        setting = setting_of(name)
        found = plans_of(setting, batch, schedules)
        for schedule in schedules:
            early = schedule == "ministage" and number % 2 == 0
            yield Case(name, found[schedule], setting, "interleaved" if early else "delayed")


def setting_of(name: str) -> Setting:
    """A model that fills the cluster."""
    own = OWN_CLUSTERS.get(name)
    cluster = cluster_from(name) if own is None else Cluster.from_dict(own)
    if name == "mini_b":
        model = ModelShape.llama("llama-2-7b, 16 blocks", 16, 4096, 11008, 32)
    else:
        model = ModelShape.llama("llama, 1.3B", 24, 2048, 5504, 16)
    timer = FrozenTimes(timer_of(None, cluster.known_types))
    return Setting(cluster, model, timer, 1024, dtype="float16", may_offload=False)


def plans_of(setting: Setting, batch: int, schedules: Sequence[str]) -> dict[str, Plan]:
    """The planner's best plan, or that in ministages and its groups in the other schedules."""
    ranked = search(setting, batch, EFFORT).ranked
    if "best" in schedules:
        return {"best": ranked[0].plan}
    best = next(each.plan for each in ranked if each.plan.schedule == "ministage")
    found = {"ministage": best}
    for schedule in ("1f1b", "gpipe"):
        found[schedule] = one_stage_a_group(best, schedule)
        trace = compile_trace(found[schedule])
        if not all(own.fits for own in simulate(trace, setting, record=False).memory.values()):
            raise PlannerError(f"the plan does not fit as {schedule}; expected a smaller --batch")
    return found


def one_stage_a_group(plan: Plan, schedule: str) -> Plan:
    """The groups of a plan with as many layers as before, all in one stage each, recomputed."""
    data = plan.to_dict() | {"schedule": schedule}
    if schedule == "gpipe":
        # All forwards come first at all events.
        data.pop("ahead", None)
    sizes: dict[str, int] = {}
    for stage in plan.stages:
        sizes[stage.group] = sizes.get(stage.group, 0) + stage.layers.size
    cuts = consecutive(list(sizes.values()))
    data["stages"] = [
        {"group": name, "layers": [cut.start, cut.stop]}
        for name, cut in zip(sizes, cuts, strict=True)
    ]
    for group in data["groups"]:
        for key in RECOMPUTE_KEYS:
            group.pop(key, None)
        group["recompute"] = "full"
    return Plan.from_dict(data)


def compare(case: Case, scale: float) -> Comparison:
    """Rehearse and simulate."""
    interleaved = case.optimizer_step == "interleaved"
    simulation = simulate(
        compile_trace(case.plan, interleaved=interleaved), case.setting, record=False
    )
    run = PlanRun(case.plan, case.setting, Pace(scale), 2, case.optimizer_step)
    runs: list[RankRun] = run_processes(case.plan.world_size, partial(rehearse_rank, run))
    figures = [own.steps[-1] for own in runs]
    check_kept_up(figures, scale, len(os.sched_getaffinity(0)))
    return compared(figures, simulation)


def facts_of(case: Case, comparison: Comparison) -> dict[str, Any]:
    """One row; errors are of the simulator: simulated over rehearsed, less 1."""
    step = comparison.step_s
    peaks = [rank.peak_bytes for rank in comparison.ranks]
    return {
        "cluster": case.cluster,
        "schedule": case.plan.schedule,
        "optimizer_step": case.optimizer_step,
        "groups": len(case.plan.groups),
        "stages": len(case.plan.stages),
        "rehearsed_s": step.measured,
        "simulated_s": step.simulated,
        "error": step.simulated / step.measured - 1,
        "rehearsed_bytes": [peak.measured for peak in peaks],
        "simulated_bytes": [peak.simulated for peak in peaks],
        "bytes_errors": [peak.simulated / peak.measured - 1 for peak in peaks],
        "plan": case.plan.to_dict(),
    }


def show(rows: list[dict[str, Any]]) -> None:
    """The table for people."""
    heads = ("cluster", "schedule, stages", "step s", "simulated", "error", "peak GiB", "error")
    table = Table(*heads)
    for row in rows:
        early = ", early steps" if row["optimizer_step"] == "interleaved" else ""
        errors = row["bytes_errors"]
        table.add_row(
            row["cluster"],
            f"{row['schedule']}, {row['stages']} in {row['groups']} groups{early}",
            f"{row['rehearsed_s']:.3f}",
            f"{row['simulated_s']:.3f}",
            f"{100 * row['error']:+.1f} %",
            f"{min(row['rehearsed_bytes']) / GIB:.1f} – {max(row['rehearsed_bytes']) / GIB:.1f}",
            f"{100 * min(errors):+.1f} – {100 * max(errors):+.1f} %",
        )
    Console(highlight=False, width=120).print(table)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--batch", type=int, default=48, help="samples of 1024 tokens a step")
    parser.add_argument("--time-scale", type=float, default=0.0, help="0: virtual clocks alone")
    parser.add_argument("--output", type=Path, default=Path("build/benchmarks"))
    args = parser.parse_args()
    args.output.mkdir(parents=True, exist_ok=True)
    every = list(cases(args.batch))
    rows = [
        facts_of(case, compare(case, args.time_scale))
        for case in track(every, "rehearsing", transient=True)
    ]
    (args.output / "fidelity.json").write_text(json.dumps(rows, indent=2))
    show(rows)


if __name__ == "__main__":
    main()
