"""What do ministages save, and what do they cost?

    python -m benchmarks.interleave [--interleave 1 2 4 8] [--steps 3]

Two groups of two ranks train a 60M-parameter Llama with full recompute. `interleave` is how many
stages each group hosts under the "ministage" schedule with parameters in shards (zero_level 3),
gathered once a visit. Beside them: ZeRO-2 in an ordinary 1F1B pipeline, and ZeRO-3 as it is usually
done, with a gather for every micro-batch. Peak bytes are the ledger's (largest rank), bytes moved
are what a rank receives in collectives; both are counted while the real engine runs.
"""

import argparse
import json
import os
import statistics
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
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

GROUPS, WIDTH = 2, 2
MODEL = llama_config(blocks=16)
CONFIG: dict[str, Any] = {
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "torch_adam": True}},
    "gradient_clipping": 0.0,
    "steps_per_print": 10**9,
}
ZERO2 = "ZeRO-2, 1F1B"
ZERO3 = "ZeRO-3, a gather a micro-batch"
PLAIN = "plain order"
"""The paper's order, without turning around at the last stage."""


def plan_of(kind: str, interleave: int, micro_batches: int) -> Plan:
    """Two equal groups, alternating over `interleave` stages each."""
    stages = GROUPS * interleave
    cuts = consecutive(apportion(MODEL.num_hidden_layers + 2, [1] * stages))
    gpus = [
        [{"rank": WIDTH * g + i, "micro_batches": [1] * micro_batches} for i in range(WIDTH)]
        for g in range(GROUPS)
    ]
    return Plan.from_dict(
        {
            "global_batch_size": WIDTH * micro_batches,
            "schedule": "ministage" if kind in ("ministage", PLAIN) else "1f1b",
            "turnaround": kind != PLAIN,
            "groups": [
                {
                    "name": f"group {g}",
                    "zero_level": 2 if kind == ZERO2 else 3,
                    "recompute": "full",
                    "gpus": gpus[g],
                }
                for g in range(GROUPS)
            ],
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

        def reduce(group: Any, flat: Any, layout: Any) -> Any:
            own = layout.of(group.rank).size
            self.received_bytes += (len(group.ranks) - 1) * own * flat.element_size()
            return reduce_shards(group, flat, layout)

        mock.patch.object(TorchProcessGroup, "start_gather", gather).start()
        mock.patch.object(TorchProcessGroup, "reduce_shards", reduce).start()


def measure(rank: int, kind: str, plan: Plan, length: int, steps: int) -> dict[str, Any]:
    """Time some steps, then count memory and traffic of one."""
    torch.set_num_threads(1)
    if kind == ZERO3:
        mock.patch.object(compiling, "add_residency", gather_every_micro_batch).start()
    module = zorse_ds.ZorsePipelineModule(layer_specs(MODEL), plan, TokenLoss())
    data = random_tokens(4 * plan.global_batch_size, length, MODEL.vocab_size)
    config = CONFIG | {"zorse": {"count_memory": True}}
    engine = zorse_ds.initialize(model=module, config=config, training_data=data)[0]
    ledger, engine._worker.ledger = engine._worker.ledger, None
    seconds, losses = [], []
    for _ in range(steps + 1):
        start = time.perf_counter()
        losses.append(float(engine.train_batch()))
        seconds.append(time.perf_counter() - start)
    engine._worker.ledger = ledger
    traffic = Traffic()
    traffic.watch()
    engine.train_batch()
    memory = engine.report.memory
    return {
        "seconds": seconds[1:],
        "losses": losses,
        "peak_bytes": memory.peak_bytes,
        "at_peak": memory.at_peak,
        "received_bytes": traffic.received_bytes,
        "gathers": traffic.gathers,
    }


def compare(
    interleaves: list[int], micro_batches: int, length: int, rounds: int, steps: int
) -> Any:
    """All kinds in turns, `rounds` times."""
    ministages = [("ministage", v) for v in interleaves]
    kinds = [(ZERO2, 1), (ZERO3, 1), *ministages, (PLAIN, max(interleaves))]
    runs: dict[tuple[str, int], list[list[dict[str, Any]]]] = defaultdict(list)
    for kind in track(kinds * rounds, description="interleave"):
        plan = plan_of(*kind, micro_batches)
        runs[kind].append(
            run_ranks(plan.world_size, measure, kind[0], plan, length, steps, timeout_s=600)
        )
    return [_result(kind, results) for kind, results in runs.items()]


def _result(kind: tuple[str, int], results: list[list[dict[str, Any]]]) -> dict[str, Any]:
    name = {"ministage": f"ministages, interleave {kind[1]}"}.get(kind[0], kind[0])
    if kind[0] == PLAIN:
        name = f"interleave {kind[1]}, {PLAIN}"
    worst = max(results[0], key=lambda rank: rank["peak_bytes"])
    return {
        "kind": name,
        "step_s": statistics.median(s for ranks in results for s in ranks[0]["seconds"]),
        "peak_bytes": worst["peak_bytes"],
        "at_peak": worst["at_peak"],
        "received_bytes": max(rank["received_bytes"] for rank in results[0]),
        "gathers": max(rank["gathers"] for rank in results[0]),
        "losses": results[0][0]["losses"],
    }


def show(results: list[dict[str, Any]]) -> None:
    """The table for people; everything relative to ZeRO-2."""
    base = results[0]
    table = Table("", "peak memory", "step time", "bytes received", "gathers a step")
    for result in results:
        table.add_row(
            result["kind"],
            *(f"{result[k] / base[k]:.2f}" for k in ("peak_bytes", "step_s", "received_bytes")),
            str(result["gathers"]),
        )
    Console().print(table)


def draw(results: list[dict[str, Any]], path: Path) -> None:
    """The picture: peak memory by purpose, and step time."""
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
    axes[0].set_title("peak memory of the largest rank, ZeRO-2 = 1")
    axes[0].legend(fontsize="small", loc="lower right")
    axes[0].invert_yaxis()
    axes[1].barh(names, [r["step_s"] / base["step_s"] for r in results], color="grey")
    axes[1].set_title("step time, ZeRO-2 = 1")
    figure.savefig(path, dpi=120)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--interleave", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--micro-batches", type=int, default=8, help="of one sample, on each rank")
    parser.add_argument("--length", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--output", type=Path, default=Path("build/benchmarks"))
    args = parser.parse_args()
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    results = compare(args.interleave, args.micro_batches, args.length, args.rounds, args.steps)
    args.output.mkdir(parents=True, exist_ok=True)
    (args.output / "interleave.json").write_text(json.dumps(results, indent=2))
    draw(results, args.output / "interleave.png")
    show(results)


if __name__ == "__main__":
    main()
