"""A rank that was started twice, or not at all, is told by all processes before they connect."""

from __future__ import annotations

import os
import sys
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist

from tests.ranks.scripts import Ended, outcome, start
from zorse_ds.errors import WorldError
from zorse_ds.integrations.deepspeed import roll_call
from zorse_ds.integrations.deepspeed.module import init_distributed

WORLD_SIZE = 3


def main() -> None:
    """`RANKS`: those that the processes say they are, of `WORLD_SIZE`; connects twice."""
    ranks = sys.argv[1].split(",")
    os.environ["RANK"] = os.environ["LOCAL_RANK"] = ranks[int(os.environ["RANK"])]
    os.environ["WORLD_SIZE"] = str(WORLD_SIZE)
    roll_call.default_pg_timeout = timedelta(seconds=5)
    try:
        for _ in range(2):
            init_distributed()
            dist.barrier()
            dist.destroy_process_group()
    except WorldError as error:
        print(f"refused: {error}")


def run(ranks: str, folder: Path) -> list[Ended]:
    started = start(main, [ranks], len(ranks.split(",")), folder)
    return list(outcome(started, folder, timeout_s=60))


@pytest.mark.parametrize(("ranks", "twice", "missing"), [("0,1,1", 1, 2), ("0,0,1", 0, 2)])
def test_a_rank_that_was_started_twice(
    ranks: str, twice: int, missing: int, tmp_path: Path
) -> None:
    ended = run(ranks, tmp_path)
    lines = [own.output.split("refused: ")[1].split("\n")[0] for own in ended]
    assert len(set(lines)) == 1 and [own.code for own in ended] == [0] * 3
    pids = [
        own.pid for own, rank in zip(ended, ranks.split(","), strict=True) if int(rank) == twice
    ]
    assert lines[0].startswith(f"rank {twice} of 3 was started twice, as process ")
    assert all(f"process {pid} on " in lines[0] for pid in pids)
    assert f"and none as rank {missing}; expected one process a rank" in lines[0]


def test_a_rank_that_was_not_started(tmp_path: Path) -> None:
    ended = run("0,2", tmp_path)
    said = "refused: no process came as rank 1 of 3 in 5 s; expected one process a rank"
    assert all(said in own.output for own in ended), [own.output for own in ended]


def test_right_ones_may_even_connect_again(tmp_path: Path) -> None:
    ended = run("0,1,2", tmp_path)
    assert [(own.code, "refused" in own.output) for own in ended] == [(0, False)] * 3
