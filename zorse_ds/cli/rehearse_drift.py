"""What `zorse rehearse` tells when GPUs change their speed or shares move: step by step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

if TYPE_CHECKING:
    from zorse_ds.integrations.deepspeed.rehearsal_plan import RankRun
    from zorse_ds.rehearsal.slowdowns import Slowdown

SlowGpus = Annotated[
    list[str] | None,
    typer.Option(
        metavar="RANK:FACTOR@STEP",
        help="From a step on a GPU takes so many times as long; may be given several times.",
    ),
]
AdaptShares = Annotated[
    bool,
    typer.Option("--adapt-shares", help="Let micro-batches move, as zorse.adapt_shares does."),
]


@dataclass(frozen=True, slots=True)
class Drift:
    """GPUs that become slower, and whether shares may follow; false if neither."""

    slowdowns: tuple[Slowdown, ...]
    adapts: bool

    def __bool__(self) -> bool:
        return bool(self.slowdowns) or self.adapts

    @classmethod
    def parsed(cls, slow: Sequence[str], num_ranks: int, num_steps: int, adapts: bool) -> Drift:
        """From what was typed. Raises `RehearsalError`."""
        if not slow:
            return cls((), adapts)
        # Behind it is torch, which no other command and no mistake should wait for.
        from zorse_ds.rehearsal.slowdowns import Slowdown

        return cls(tuple(Slowdown.parse(text, num_ranks, num_steps) for text in slow), adapts)


def steps_of(runs: Sequence[RankRun]) -> list[dict[str, Any]]:
    """Virtual seconds of each step, and every rank's number of micro-batches in it."""
    return [
        {
            "step_s": max(own.steps[step].virtual_s for own in runs),
            "busy_s": [own.steps[step].busy_s for own in runs],
            "micro_batches": list(counts),
        }
        for step, counts in enumerate(runs[0].counts)
    ]


def show_steps(facts: dict[str, Any], pace: str) -> None:
    """A row a step."""
    console = Console(highlight=False)
    console.print(f"{facts['step_s']['simulated']:.4g} s a step as planned, simulated; {pace}")
    table = Table("step", box=None, pad_edge=False)
    table.add_column("s", justify="right", no_wrap=True)
    table.add_column("micro-batches by rank")
    table.add_column("busy s by rank")
    for number, step in enumerate(facts["steps"], 1):
        counts = " ".join(map(str, step["micro_batches"]))
        busy = " ".join(f"{seconds:.3g}" for seconds in step["busy_s"])
        table.add_row(str(number), f"{step['step_s']:.4g}", counts, busy)
    console.print(table)
