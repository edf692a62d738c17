"""Kills a training run with SIGKILL at seeded random instants, also while it saves.

    python -m tests.chaos [--kills 20] [--seed 1]

Four runs share the kills: under one plan and under changing plans, saving in the foreground and in
the background. Every step of every attempt must have the loss and the samples of the run that
nobody interrupted: bit for bit under its plan, within 1e-6 once there was another. Prints a table;
the exit code is 1 when a run went wrong.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from pathlib import Path

os.environ.setdefault("DS_ACCELERATOR", "cpu")
os.environ.setdefault("OMP_NUM_THREADS", "1")

from rich.console import Console
from rich.table import Table

from tests.chaos.series import Kill, check, killed_run, uninterrupted

SAME, CHANGING = ("3 ranks",), ("3 ranks", "2 ranks", "ministages", "3 other ranks")
RUNS = [(plans, mode) for plans in (SAME, CHANGING) for mode in ("sync", "async")]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos")
    parser.add_argument("--kills", type=int, default=20, help="in all runs together")
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    begun = time.monotonic()
    table = Table(
        "run", "plan", "ranks killed", "while saving", "steps", "resumed after", "gone, s"
    )
    problems = []
    with tempfile.TemporaryDirectory() as root:
        whole = uninterrupted(Path(root, "whole"), SAME[0])
        for number, (plans, mode) in enumerate(RUNS):
            share = len(range(number, args.kills, len(RUNS)))
            seed = args.seed * len(RUNS) + number
            folder = Path(root, str(number))
            try:
                kills, trails = killed_run(folder, plans, mode, share, seed)
                add_rows(table, f"{number} {mode}", kills)
                check(kills, trails, whole, SAME[0])
            except AssertionError as problem:
                problems.append(f"run {number} ({mode}, seed {seed}): {problem}")
    Console().print(table)
    print(f"{args.kills} kills in {time.monotonic() - begun:.0f} s; {len(problems)} problems")
    sys.exit("\n".join(problems) or 0)


def add_rows(table: Table, run: str, kills: list[Kill]) -> None:
    for kill in kills:
        ranks = ", ".join(map(str, sorted(kill.ranks)))
        steps = (str(kill.steps_done), str(kill.resumed_at), f"{kill.gone_after_s:.1f}")
        table.add_row(run, kill.plan, ranks, "yes" if kill.while_saving else "", *steps)


if __name__ == "__main__":
    main()
