"""The contestants of `benchmarks.vs_deepspeed`: stock's candidates, and steps of whoever runs."""

import os
import statistics
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from benchmarks.vs_deepspeed_stock import (
    Stock,
    configurations,
    dtype_for,
    least_bytes_missing,
    least_s,
    run_rank,
)
from zorse_ds.core.cluster import Cluster
from zorse_ds.core.gpus import GIB
from zorse_ds.core.plan import Plan
from zorse_ds.cost.compute import best_samples_per_s
from zorse_ds.cost.setting import Setting
from zorse_ds.integrations.deepspeed.rehearsal_plan import PlanRun, rehearse_rank
from zorse_ds.integrations.deepspeed.rehearsal_stock import Sends
from zorse_ds.rehearsal.clock import Pace
from zorse_ds.rehearsal.figures import StepFigures, check_kept_up
from zorse_ds.rehearsal.pool import VirtualMemoryError
from zorse_ds.rehearsal.processes import Job, run_processes

AS_FAST_AS_IT_GOES = Pace(0)
NUM_STEPS = 2
"""All memory is in use only in the second one."""
Say = Callable[[str], None]
"""Told what is going on."""
Runner = Callable[[Pace, Say], list[StepFigures]]
"""Its last step, by rank."""


@dataclass
class Tried:
    """What came of stock's configurations on one part of the cluster."""

    setting: Setting
    left_out: tuple[str, ...]
    sends: Sends
    seconds: dict[Stock, float] = field(default_factory=dict)
    out_of_memory: dict[str, str] = field(default_factory=dict)
    not_run: int = 0
    """Behind by their schedule's formula."""

    @property
    def best(self) -> Stock:
        """The quickest that fits; some did."""
        return min(self.seconds, key=self.seconds.__getitem__)

    def told(self) -> dict[str, Any]:
        """As plain data."""
        best = (
            {"name": self.best.name, "seconds": self.seconds[self.best]} if self.seconds else None
        )
        return {
            "left_out": self.left_out,
            "best": best,
            "seconds": {stock.name: seconds for stock, seconds in self.seconds.items()},
            "out_of_memory": self.out_of_memory,
            "not_run": self.not_run,
        }


def parts_of(setting: Setting) -> list[tuple[Setting, tuple[str, ...]]]:
    """The cluster, and what is left without its slowest types, one after the other."""
    dtype = dtype_for(setting)
    types = dict.fromkeys(gpu.type.name for gpu in setting.cluster.gpus)
    slowest_first = sorted(types, key=lambda name: best_samples_per_s(setting, name, dtype))
    parts: list[tuple[Setting, tuple[str, ...]]] = [(setting, ())]
    for count in range(1, len(slowest_first)):
        gone = tuple(slowest_first[:count])
        parts.append((replace(setting, cluster=_without_types(setting.cluster, gone)), gone))
    return parts


def _without_types(cluster: Cluster, gone: tuple[str, ...]) -> Cluster:
    data = cluster.to_dict()
    nodes = []
    for plain, node in zip(data["nodes"], cluster.nodes, strict=True):
        kept = [name for name in node.types if name not in gone]
        if kept:
            rest = {k: v for k, v in plain.items() if k not in ("gpu_type", "num_gpus")}
            nodes.append({**rest, "gpu_types": kept})
    return Cluster.from_dict({**data, "nodes": nodes})


def try_stock(
    setting: Setting,
    left_out: tuple[str, ...],
    batch: int,
    most: int,
    sends: Sends,
    say: Say,
    tell: Say,
) -> Tried:
    """Rehearse the best configurations by formula, as long as one can win.

    `say` gets lines that stay, `tell` what is going on meanwhile.
    """
    say(f"stock on {len(setting.cluster.gpus)} GPUs, without {', '.join(left_out) or 'nothing'}")
    tried = Tried(setting, left_out, sends)
    fitting = []
    for stock in configurations(setting, batch):
        missing = least_bytes_missing(stock, setting)
        if missing:
            tried.out_of_memory[stock.name] = f"{missing / GIB:.1f} GiB are missing at least"
        else:
            fitting.append((least_s(stock, setting), stock))
    fitting.sort(key=lambda pair: pair[0])
    for number, (least, stock) in enumerate(fitting):
        best_s = min(tried.seconds.values(), default=least)
        if len(tried.seconds) == most or best_s < least:
            tried.not_run = len(fitting) - number
            break
        tell(f"{number + 1} of {len(fitting)} that may fit: {stock.name}")
        _try(stock, tried, say, tell)
    return tried


def _try(stock: Stock, tried: Tried, say: Say, tell: Say) -> None:
    try:
        figures = stock_runner(stock, tried)(AS_FAST_AS_IT_GOES, tell)
    except VirtualMemoryError as error:
        tried.out_of_memory[stock.name] = str(error)
        say(f"  out of memory  {stock.name}")
        return
    tried.seconds[stock] = max(own.virtual_s for own in figures)
    say(f"  {tried.seconds[stock]:8.3f} s  {stock.name}")


def stock_runner(stock: Stock, tried: Tried) -> Runner:
    """Stock's engine on a part of the cluster."""
    setting = tried.setting

    def run(pace: Pace, tell: Say) -> list[StepFigures]:
        job = partial(run_rank, stock, setting, tried.sends, pace, NUM_STEPS)
        return _last_steps(len(setting.cluster.gpus), job, stock.name, tell)

    return run


def plan_runner(plan: Plan, setting: Setting) -> Runner:
    """Our engine."""

    def run(pace: Pace, tell: Say) -> list[StepFigures]:
        job = partial(rehearse_rank, PlanRun(plan, setting, pace, NUM_STEPS))
        return _last_steps(plan.world_size, job, "zorse_ds", tell)

    return run


def _last_steps(num_ranks: int, job: Job, name: str, tell: Say) -> list[StepFigures]:
    def done(rank: int, step: int) -> None:
        tell(f"{name}: rank {rank} has done step {step} of {NUM_STEPS}")

    tell(f"{name}: starting {num_ranks} processes")
    return [own.steps[-1] for own in run_processes(num_ranks, job, done)]


def measured(
    runners: dict[str, Runner], pace: Pace, repeats: int, tell: Say
) -> tuple[dict[str, list[list[StepFigures]]], dict[str, str]]:
    """All in turns: steps by name and repeat, and who has too little memory."""
    found: dict[str, list[list[StepFigures]]] = {}
    failed: dict[str, str] = {}
    for _ in range(repeats):
        for name in [name for name in runners if name not in failed]:
            try:
                figures = runners[name](pace, tell)
            except VirtualMemoryError as error:
                failed[name] = str(error)
                continue
            check_kept_up(figures, pace.scale, len(os.sched_getaffinity(0)))
            found.setdefault(name, []).append(figures)
    return found, failed


def summary(runs: list[list[StepFigures]], tokens: int) -> dict[str, Any]:
    """Of one contestant."""
    seconds = [max(own.wall_s for own in figures) for figures in runs]
    last = runs[-1]
    step_s = max(own.virtual_s for own in last)
    busy = [own.busy_s / step_s for own in last]
    return {
        "seconds": seconds,
        "tokens_per_s": tokens / statistics.median(seconds),
        "bubble_share": 1 - sum(busy) / len(busy),
        "busy_share": busy,
        "peak_bytes": [own.peak_bytes for own in last],
    }
