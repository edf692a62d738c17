"""Stock DeepSpeed and zorse_ds on the same virtual cluster: who trains more tokens a second?

    python -m benchmarks.vs_deepspeed --cluster mini_b [--blocks 16] [--batch 240] [--ablation …]

Stock may do all it can: plain data parallelism with ZeRO-1, 2 and 3 and `PipelineModule` at every
pipes × width, both partition methods, every micro-batch size that divides, with and without
recompute; on all GPUs and without the slower types. Configurations that cannot fit are left out by
what they hold at least, and the rest are rehearsed in the order of their own schedule's formula:
the best `--most` of each part of the cluster, unless the formula alone is slower than what was
measured. Then stock's best and the planner's plan run in turns. `--sends free` lets stock's sends
return at once, as if buffers had no end: more than stock can reach.
"""

import argparse
import json
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.vs_deepspeed_plans import ABLATIONS, ablated, effort_of, planned
from benchmarks.vs_deepspeed_runs import (
    Runner,
    Say,
    Tried,
    measured,
    parts_of,
    plan_runner,
    stock_runner,
    summary,
    try_stock,
)
from zorse_ds.core.cluster import Cluster
from zorse_ds.core.cluster_files import cluster_from
from zorse_ds.core.gpus import GIB
from zorse_ds.core.model import ModelShape
from zorse_ds.core.plan import Plan
from zorse_ds.cost.frozen import FrozenTimes
from zorse_ds.cost.layer_times import timer_of
from zorse_ds.cost.setting import Setting
from zorse_ds.errors import PlannerError
from zorse_ds.integrations.picture import draw_timeline
from zorse_ds.rehearsal.clock import Pace
from zorse_ds.rehearsal.figures import StepFigures
from zorse_ds.simulator.simulate import ceiling_samples_per_s
from zorse_ds.simulator.timeline import Span, Timeline

OURS, ON_ALL, ON_PART = "zorse_ds", "stock, all GPUs", "stock, best part"
EQUAL = {
    "link_figures": "assumed",
    "nodes": [{"gpu_type": "A10G", "num_gpus": 4, "intra_gb_per_s": 16, "nic_gb_per_s": 6}],
}
Runs = dict[str, list[list[StepFigures]]]
"""By contestant, repeat and rank."""
console = Console(highlight=False, width=130)


def setting_of(name: str, blocks: int) -> Setting:
    """Layers of Llama-2-7B, as many as asked for, at 1024 tokens a sample."""
    cluster = Cluster.from_dict(EQUAL) if name == "equal" else cluster_from(name)
    model = ModelShape.llama(f"llama-2-7b, {blocks} blocks", blocks, 4096, 11008, 32)
    timer = FrozenTimes(timer_of(None, cluster.known_types))
    # Virtual GPUs have no host memory beside them, so nobody offloads to it, stock neither.
    return Setting(cluster, model, timer, 1024, dtype="float16", may_offload=False)


def run(args: argparse.Namespace) -> dict[str, Any]:
    """The whole contest."""
    setting = setting_of(args.cluster, args.blocks)
    with console.status("") as status:
        return _contest(setting, args, status.update)


def _contest(setting: Setting, args: argparse.Namespace, tell: Say) -> dict[str, Any]:
    tried = [
        try_stock(part, gone, args.batch, args.most, args.sends, console.print, tell)
        for part, gone in parts_of(setting)
    ]
    plan = planned(setting, args.batch, effort_of(args.effort), tell)
    runners = _contestants(tried, plan, setting)
    for name in args.ablation:
        other = ablated(name, plan, setting, args.batch)
        if other == plan:
            console.print(f"{name}: the plan has nothing of what this takes out of it")
        else:
            runners[name] = plan_runner(other, setting)
    runs, failed = measured(runners, Pace(args.time_scale), args.repeats, tell)
    if not tried[0].seconds:
        failed[ON_ALL] = f"none of {len(tried[0].out_of_memory)} configurations fits"
    _draw(runs, setting, args.output / f"vs_deepspeed_{_label(args)}.png")
    return {
        "cluster": args.cluster,
        "model": setting.model.name,
        "batch": args.batch,
        "sends": args.sends,
        "time_scale": args.time_scale,
        "ceiling_tokens_per_s": ceiling_samples_per_s(setting) * setting.seq_len,
        "runs": _told_runs(runs, args.batch * setting.seq_len),
        "out_of_memory": failed,
        "plan": plan.to_dict(),
        "stock": [each.told() for each in tried],
    }


def _contestants(tried: list[Tried], plan: Plan, setting: Setting) -> dict[str, Runner]:
    runners = {OURS: plan_runner(plan, setting)}
    fitting = [each for each in tried if each.seconds]
    if tried[0].seconds:
        runners[ON_ALL] = stock_runner(tried[0].best, tried[0])
    if fitting:
        part = min(fitting, key=lambda each: each.seconds[each.best])
        if part is not tried[0]:
            runners[ON_PART] = stock_runner(part.best, part)
    return runners


def _told_runs(runs: Runs, tokens: int) -> dict[str, Any]:
    facts = {name: summary(own, tokens) for name, own in runs.items()}
    ours = facts[OURS]["seconds"] if OURS in facts else None
    for own in facts.values():
        pairs = zip(own["seconds"], ours, strict=True) if ours else ()
        own["ratios"] = [it / us for it, us in pairs]
    return facts


def show(facts: dict[str, Any]) -> None:
    """The table for people."""
    ceiling = facts["ceiling_tokens_per_s"]
    heads = ("", "tokens/s", "zorse_ds ÷ it", "ceiling ÷ it", "of ceiling", "bubble")
    table = Table(*heads, "peak GiB by rank")
    for name, own in facts["runs"].items():
        table.add_row(
            name,
            f"{own['tokens_per_s']:,.0f}",
            _spread(own["ratios"]),
            f"{ceiling / own['tokens_per_s']:.2f}",
            f"{100 * own['tokens_per_s'] / ceiling:.0f} %",
            f"{100 * own['bubble_share']:.0f} %",
            " ".join(f"{each / GIB:.1f}" for each in own["peak_bytes"]),
        )
    for name in facts["out_of_memory"]:
        table.add_row(name, "out of memory")
    console.print(table)
    for part in facts["stock"]:
        console.print(_sentence(part))
    for name, why in facts["out_of_memory"].items():
        console.print(f"{name}: {why}")


def _spread(ratios: list[float]) -> str:
    """Of the repeats; empty where there is nothing to compare with."""
    if not ratios:
        return ""
    least, most = min(ratios), max(ratios)
    return f"{least:.2f}" + (f"–{most:.2f}" if most - least > 0.005 else "")


def _sentence(part: dict[str, Any]) -> str:
    where = f"without {', '.join(part['left_out'])}" if part["left_out"] else "on all GPUs"
    best = f"best is {part['best']['name']}" if part["best"] else "nothing fits"
    memory, rest = len(part["out_of_memory"]), part["not_run"]
    return (
        f"Stock {where}: {best}; {len(part['seconds'])} configurations ran, {memory} have too "
        f"little memory, {rest} are behind by their schedule's formula"
    )


def _draw(runs: Runs, setting: Setting, path: Path) -> None:
    """The timelines above each other: stock's ranks, then ours, on one scale."""
    spans: list[Span] = []
    labels: list[str] = []
    for name in (ON_ALL, OURS):
        for own in runs.get(name, [[]])[-1]:
            mine = own.timeline.spans
            spans += [_renumbered(span, len(labels)) for span in mine]
            labels.append(f"{name}: {setting.cluster.gpus[own.rank].type.name}")
    draw_timeline(Timeline(tuple(spans)), Timeline(()), labels, path)


def _renumbered(span: Span, rank: int) -> Span:
    return Span(rank, span.name, span.start_s, span.stop_s, span.stage, span.micro_batch)


def _label(args: argparse.Namespace) -> str:
    return f"{Path(args.cluster).stem}_{args.blocks}"


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--cluster", default="mini_b", help="a name, a file, or `equal`: 4 A10G")
    parser.add_argument("--blocks", type=int, default=16, help="of Llama-2-7B, which has 32")
    parser.add_argument("--batch", type=int, default=240, help="samples of 1024 tokens a step")
    parser.add_argument("--most", type=int, default=3, help="rehearsed of stock, by part")
    parser.add_argument("--effort", type=int, default=3, help="of the planner: times the usual")
    parser.add_argument("--sends", default="held", choices=["held", "free"], help="of stock")
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--time-scale", type=float, default=0.0, help="0: virtual clocks alone")
    parser.add_argument("--ablation", nargs="*", default=[], choices=list(ABLATIONS))
    parser.add_argument("--output", type=Path, default=Path("build/benchmarks"))
    args = parser.parse_args()
    args.output.mkdir(parents=True, exist_ok=True)
    try:
        facts = run(args)
    except PlannerError as error:
        parser.error(str(error))
    path = args.output / f"vs_deepspeed_{_label(args)}.json"
    path.write_text(json.dumps(facts, indent=2))
    show(facts)


if __name__ == "__main__":
    main()
