"""What do ministages save, and what do they cost?

    python -m benchmarks.interleave [--interleave 1 2 4 8] [--width 2] [--steps 3]

Two groups of `width` ranks train a 60M-parameter Llama with full recompute. `interleave` is how
many stages each group hosts under the "ministage" schedule with parameters in shards (zero_level
3), gathered once a visit. Beside them: ZeRO-2 in an ordinary 1F1B pipeline, ZeRO-3 as it is usually
done, with a gather for every micro-batch, the paper's order without the turn-around, and masters,
optimizer state and shards in host memory. Peak bytes are the ledger's (largest rank), without what
is in host memory, which is counted apart; bytes moved are what a rank receives in collectives. All
are counted while the real engine runs. The ways of training take turns; step time is the fastest of
all rounds, CPU time the median of what all ranks together computed in a step, which other jobs on
the machine hardly change.
"""

import argparse
import json
import os
import statistics
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table

import zorse_ds
from benchmarks.llama_layers import TokenLoss, layer_specs, llama_config, random_tokens
from tests.ranks.harness import run_ranks
from zorse_ds.core.plan import Plan
from zorse_ds.ranges import apportion, consecutive
from zorse_ds.runtime.process_groups import TorchProcessGroup
from zorse_ds.schedule import compile as compiling
from zorse_ds.schedule.instructions import (
    BackwardPass,
    ForwardPass,
    Instruction,
    ReshardParams,
    UnshardParams,
)

GROUPS = 2
MODEL = llama_config(blocks=16)
CONFIG: dict[str, Any] = {
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "torch_adam": True}},
    "gradient_clipping": 0.0,
    "steps_per_print": 10**9,
}


@dataclass(frozen=True)
class Way:
    """One way to train."""

    name: str
    interleave: int = 1
    zero_level: int = 3
    schedule: str = "ministage"
    turnaround: bool = True
    offload: str = "none"
    gathers_always: bool = False


def ways_of(interleaves: list[int]) -> list[Way]:
    """What is compared; the first is what the others are relative to."""
    most = max(interleaves)
    return [
        Way("ZeRO-2, 1F1B", zero_level=2, schedule="1f1b"),
        Way("ZeRO-3, a gather a micro-batch", schedule="1f1b", gathers_always=True),
        *(Way(f"ministages, interleave {each}", each) for each in interleaves),
        Way(f"interleave {most}, plain order", most, turnaround=False),
        Way(f'interleave {most}, offload "params"', most, offload="params"),
    ]


def plan_of(way: Way, width: int, micro_batches: int) -> Plan:
    """Two equal groups, alternating over `interleave` stages each."""
    stages = GROUPS * way.interleave
    cuts = consecutive(apportion(MODEL.num_hidden_layers + 2, [1] * stages))
    groups = [
        {
            "name": f"group {g}",
            "zero_level": way.zero_level,
            "recompute": "full",
            "offload": way.offload,
            "gpus": [
                {"rank": width * g + i, "micro_batches": [1] * micro_batches} for i in range(width)
            ],
        }
        for g in range(GROUPS)
    ]
    return Plan.from_dict(
        {
            "global_batch_size": width * micro_batches,
            "schedule": way.schedule,
            "turnaround": way.turnaround,
            "groups": groups,
            "stages": [
                {"group": f"group {s % GROUPS}", "layers": list(cut)} for s, cut in enumerate(cuts)
            ],
        }
    )


def gather_every_micro_batch(
    trace: Iterable[Instruction], order: Any, plan: Plan, schedule: str
) -> Iterator[Instruction]:
    """The usual ZeRO-3: a stage is whole for one computation at a time.

    Ranks of a group do the same here, so the k-th computations of all are gathered for together.
    """
    done: Counter[int] = Counter()
    gathered: dict[str, set[int]] = defaultdict(set)
    for instruction in trace:
        if not isinstance(instruction, ForwardPass | BackwardPass):
            yield instruction
            continue
        group = plan.group_of_rank(instruction.rank)
        number = done[instruction.rank]
        if number not in gathered[group.name]:
            gathered[group.name].add(number)
            yield from (UnshardParams(rank, instruction.stage) for rank in group.ranks)
        yield instruction
        yield ReshardParams(instruction.rank, instruction.stage)
        done[instruction.rank] += 1


class Traffic:
    """Bytes that a rank receives in collectives, and how often it gathers parameters."""

    def __init__(self) -> None:
        self.received_bytes = 0
        self.gathers = 0

    def watch(self) -> None:
        """Count from now on, in this process."""
        start_gather, reduce_shards = (
            TorchProcessGroup.start_gather,
            TorchProcessGroup.reduce_shards,
        )

        def gather(group: Any, flat: Any, layout: Any) -> Any:
            self.gathers += 1
            others = layout.numel - layout.of(group.rank).size
            self.received_bytes += others * flat.element_size()
            return start_gather(group, flat, layout)

        def reduce(group: Any, flat: Any, layout: Any, wire: Any = None) -> Any:
            own = layout.of(group.rank).size
            self.received_bytes += (len(group.ranks) - 1) * own * (wire or flat.dtype).itemsize
            return reduce_shards(group, flat, layout, wire)

        mock.patch.object(TorchProcessGroup, "start_gather", gather).start()
        mock.patch.object(TorchProcessGroup, "reduce_shards", reduce).start()


def measure(rank: int, way: Way, plan: Plan, length: int, steps: int) -> dict[str, Any]:
    """Time some steps, then count memory and traffic of one."""
    torch.set_num_threads(1)
    if way.gathers_always:
        mock.patch.object(compiling, "add_residency", gather_every_micro_batch).start()
    module = zorse_ds.ZorsePipelineModule(layer_specs(MODEL), plan, TokenLoss())
    data = random_tokens(4 * plan.global_batch_size, length, MODEL.vocab_size)
    config = CONFIG | {"zorse": {"count_memory": True}}
    engine = zorse_ds.initialize(model=module, config=config, training_data=data)[0]
    ledger, engine._worker.ledger = engine._worker.ledger, None
    seconds, cpu_seconds, losses = [], [], []
    for _ in range(steps + 1):
        start, cpu_start = time.perf_counter(), time.process_time()
        losses.append(float(engine.train_batch()))
        seconds.append(time.perf_counter() - start)
        cpu_seconds.append(time.process_time() - cpu_start)
    engine._worker.ledger = ledger
    traffic = Traffic()
    traffic.watch()
    engine.train_batch()
    memory = engine.report.memory
    return {
        "seconds": seconds[1:],
        "cpu_seconds": cpu_seconds[1:],
        "losses": losses,
        "peak_bytes": memory.peak_bytes,
        "at_peak": memory.at_peak,
        "peak_instruction": memory.peak_instruction,
        "host_bytes": 0 if engine.parts.host is None else engine.parts.host.peak_bytes,
        "received_bytes": traffic.received_bytes,
        "gathers": traffic.gathers,
    }


def compare(ways: list[Way], args: argparse.Namespace) -> list[dict[str, Any]]:
    """All ways in turns, `rounds` times."""
    runs: dict[Way, list[list[dict[str, Any]]]] = defaultdict(list)
    for way in track(ways * args.rounds, description="interleave"):
        plan = plan_of(way, args.width, args.micro_batches)
        results = run_ranks(
            plan.world_size, measure, way, plan, args.length, args.steps, timeout_s=600
        )
        runs[way].append(results)
    return [_result(way, results) for way, results in runs.items()]


def _result(way: Way, rounds: list[list[dict[str, Any]]]) -> dict[str, Any]:
    ranks = rounds[0]
    worst = max(ranks, key=lambda rank: rank["peak_bytes"])
    seconds = [s for ranks in rounds for s in ranks[0]["seconds"]]
    cpu_seconds = [
        sum(step)
        for ranks in rounds
        for step in zip(*(r["cpu_seconds"] for r in ranks), strict=True)
    ]
    return {
        "kind": way.name,
        "step_s": min(seconds),
        "cpu_s": statistics.median(cpu_seconds),
        **{key: worst[key] for key in ("peak_bytes", "at_peak", "peak_instruction")},
        **{key: max(rank[key] for rank in ranks) for key in COUNTED},
        "losses": ranks[0]["losses"],
    }


COUNTED = ("host_bytes", "received_bytes", "gathers")


def show(results: list[dict[str, Any]]) -> None:
    """The table for people; everything relative to ZeRO-2."""
    base = results[0]
    heads = ("peak memory", "host memory", "step time", "CPU time", "bytes received", "gathers")
    table = Table("", *heads)
    for result in results:
        table.add_row(
            result["kind"],
            f"{result['peak_bytes'] / base['peak_bytes']:.2f}",
            f"{result['host_bytes'] / base['peak_bytes']:.2f}",
            *(f"{result[k] / base[k]:.2f}" for k in ("step_s", "cpu_s", "received_bytes")),
            str(result["gathers"]),
        )
    Console(width=110).print(table)


def draw(results: list[dict[str, Any]], path: Path) -> None:
    """The picture: peak memory by purpose, and CPU time."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 2, figsize=(11, 3.6), sharey=True, layout="constrained")
    names = [result["kind"] for result in results]
    base = results[0]
    left = [0.0] * len(results)
    for purpose in ("parameters", "gradients", "optimizer", "activations", "buffers"):
        parts = [r["at_peak"].get(purpose, 0) / base["peak_bytes"] for r in results]
        axes[0].barh(names, parts, left=left, label=purpose)
        left = [b + p for b, p in zip(left, parts, strict=True)]
    host = [result["host_bytes"] / base["peak_bytes"] for result in results]
    axes[0].barh(names, host, left=left, label="host memory", color="lightgrey", hatch="//")
    axes[0].set_title("peak memory of the largest rank, ZeRO-2 = 1")
    axes[0].legend(fontsize="small", loc="lower right")
    axes[0].invert_yaxis()
    axes[1].barh(names, [r["cpu_s"] / base["cpu_s"] for r in results], color="grey")
    axes[1].set_title("CPU time of all ranks, ZeRO-2 = 1")
    figure.savefig(path, dpi=120)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--interleave", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--width", type=int, default=2, help="ranks of a group")
    parser.add_argument("--micro-batches", type=int, default=8, help="of one sample, on each rank")
    parser.add_argument("--length", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--output", type=Path, default=Path("build/benchmarks"))
    args = parser.parse_args()
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    results = compare(ways_of(args.interleave), args)
    args.output.mkdir(parents=True, exist_ok=True)
    name = "interleave" if args.width == 2 else f"interleave-width-{args.width}"
    (args.output / f"{name}.json").write_text(json.dumps(results, indent=2))
    draw(results, args.output / f"{name}.png")
    show(results)


if __name__ == "__main__":
    main()
