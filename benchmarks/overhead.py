"""What does an instruction cost when the layers cost nothing?

    python -m benchmarks.overhead [--micro-batches 100 1000 10000]

One rank in the middle of a three-stage pipeline runs its real program through the real `Worker`;
its layers hand their input on, and its wires answer at once. Printed are microseconds per
instruction, which must not grow with the number of instructions, and what compiling costs.
"""

import argparse
import json
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from zorse_ds.core.plan import Plan
from zorse_ds.ranges import Range
from zorse_ds.runtime.local import LocalWorld
from zorse_ds.runtime.losses import Criterion
from zorse_ds.runtime.optimizer import ShardedOptimizer, StageParameters
from zorse_ds.runtime.stage import StageRunner
from zorse_ds.runtime.step import StepRule
from zorse_ds.runtime.transport import Receive
from zorse_ds.runtime.values import Message
from zorse_ds.runtime.worker import Worker
from zorse_ds.schedule.compile import compile_trace

RANK = 1


class AnsweringWires:
    """A transport on which everything has already arrived."""

    def __init__(self) -> None:
        hidden = torch.zeros(1, 4)
        self._activation = Message("*", [hidden], [True], [True])
        self._grad = Message(["list", "*"], [hidden], [False], [False])

    def begin(self, receives: Sequence[Receive]) -> None:
        """Nothing to prepare."""

    def reached(self) -> None:
        """Nothing to post."""

    def send(self, boundary: int, peer: int, tag: int, message: Message) -> None:
        """Nobody listens."""

    def take(self, tag: int) -> Message:
        """Activations have even tags, gradients odd ones."""
        return self._grad if tag % 2 else self._activation

    def end(self) -> None:
        """Nothing to drain."""


class EmptyRunner(StageRunner):
    """Layers that hand their input on, without autograd."""

    def __init__(self) -> None:
        super().__init__(lambda value: value)

    def backward(self, micro_batch: int, grads: Sequence[tuple[Range, Message]]) -> None:
        """Inputs get the gradients as they are."""
        leaf, (_, message) = self.held[micro_batch].inputs[0], grads[0]
        if isinstance(leaf, Tensor) and isinstance(message.leaves[0], Tensor):
            leaf.grad = message.leaves[0]


def three_stages(micro_batches: int) -> Plan:
    """One rank a stage, one sample a micro-batch."""
    return Plan.from_dict(
        {
            "global_batch_size": micro_batches,
            "groups": [
                {"name": str(i), "gpus": [{"rank": i, "micro_batches": [1] * micro_batches}]}
                for i in range(3)
            ],
            "stages": [{"group": str(i), "layers": [i, i + 1]} for i in range(3)],
        }
    )


def worker() -> Worker:
    """The middle rank, with nothing to train."""
    world = LocalWorld(1).process_group(0, [0])
    nothing = torch.nn.Parameter(torch.zeros(0))
    optimizer = ShardedOptimizer(
        {1: StageParameters((), (), ())},
        {},
        [{}],
        lambda bucket: 0,
        lambda groups: torch.optim.SGD([nothing], lr=0),
        world,
    )
    criterion = Criterion(None)
    device = torch.device("cpu")
    wires = AnsweringWires()
    return Worker(RANK, {1: EmptyRunner()}, criterion, wires, optimizer, {1: world}, world, device)


def measure(micro_batches: int, repeats: int) -> dict[str, Any]:
    """Compile and run one size."""
    start = time.perf_counter()
    trace = compile_trace(three_stages(micro_batches))
    compile_s = time.perf_counter() - start
    program = trace.project(RANK)
    own, seconds = worker(), []
    for _ in range(repeats):
        start = time.perf_counter()
        own.train(trace, batch=None, rule=StepRule())  # type: ignore[arg-type]
        seconds.append(time.perf_counter() - start)
    return {
        "instructions": len(program),
        "us_per_instruction": statistics.median(seconds) / len(program) * 1e6,
        "compile_us_per_instruction": compile_s / len(trace.instructions) * 1e6,
    }


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--micro-batches", type=int, nargs="+", default=[100, 1000, 10000])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--output", type=Path, default=Path("build/benchmarks"))
    args = parser.parse_args()
    torch.set_num_threads(1)
    measure(100, 2)
    results = [measure(count, args.repeats) for count in args.micro_batches]
    table = Table("instructions of the rank", "µs / instruction", "compiling, µs / instruction")
    for result in results:
        us, compile_us = result["us_per_instruction"], result["compile_us_per_instruction"]
        table.add_row(str(result["instructions"]), f"{us:.1f}", f"{compile_us:.1f}")
    Console().print(table)
    args.output.mkdir(parents=True, exist_ok=True)
    (args.output / "overhead.json").write_text(json.dumps(results, indent=2))


if __name__ == "__main__":
    main()
