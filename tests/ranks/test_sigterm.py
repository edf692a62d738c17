"""SIGTERM on one rank: all save after the same step and exit with the documented code."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.ranks.checkpoint_jobs import make_engine
from tests.ranks.scripts import Ended, outcome, start
from zorse_ds.core.checkpoint.folder import CheckpointFolder
from zorse_ds.integrations.deepspeed.signals import EXIT_SAVED

STEPS, TOLD_IN = 8, 3
WORLD_SIZE = 3
PLAN = "3 ranks"


class Data(list[Any]):
    """Sends SIGTERM to its own process when the given rank reads it in the given step."""

    step, told = 0, ()

    def __getitem__(self, index: Any) -> Any:
        if int(os.environ["RANK"]) in self.told and self.step == TOLD_IN:
            os.kill(os.getpid(), signal.SIGTERM)
        return super().__getitem__(index)


def main() -> None:
    """`FOLDER PLACE RANKS`: trains, resuming what there is; writes each loss as it comes."""
    from tests.ranks.engine_models import vectors

    folder, place, ranks = Path(sys.argv[1]), sys.argv[2], sys.argv[3]
    data = Data(vectors(24))
    data.told = tuple(int(rank) for rank in ranks.split(",") if rank)
    checkpoint = {"folder": str(folder / "ckpt")} if place == "config" else {}
    engine = make_engine(PLAN, data, zorse={"checkpoint": checkpoint})
    if place == "load":
        engine.load_checkpoint(str(folder / "ckpt"))
    with (folder / f"losses{os.environ['RANK']}").open("a") as file:
        while engine.global_steps < STEPS:
            data.step = engine.global_steps + 1
            loss = float(engine.train_batch())
            print(engine.global_steps, loss.hex(), file=file, flush=True)
    engine.destroy()
    torch.distributed.destroy_process_group()


def run(folder: Path, place: str, told: str) -> list[Ended]:
    ranks = start(main, [str(folder), place, told], WORLD_SIZE, folder)
    return list(outcome(ranks, folder, timeout_s=60))


def losses(folder: Path, rank: int = 0) -> list[str]:
    return (folder / f"losses{rank}").read_text().splitlines()


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Losses of the uninterrupted run."""
    folder = tmp_path_factory.mktemp("whole")
    assert [each.code for each in run(folder, "none", "")] == [0, 0, 0]
    return losses(folder)


@pytest.mark.parametrize("told", ["0", "2", "0,1,2"])
@pytest.mark.parametrize("place", ["load", "config"])
def test_all_save_after_the_step_and_a_new_start_goes_on(
    place: str, told: str, whole: list[str], tmp_path: Path
) -> None:
    ended = run(tmp_path, place, told)
    text = "\n".join(each.output for each in ended)
    assert [each.code for each in ended] == [EXIT_SAVED] * WORLD_SIZE, text
    assert "Traceback" not in text
    saved = CheckpointFolder(tmp_path / "ckpt").latest()
    assert saved == f"global_step{TOLD_IN}"
    assert text.count(f"zorse: SIGTERM; saved {tmp_path}/ckpt/{saved} after step {TOLD_IN} in") == 1
    for rank in range(WORLD_SIZE):
        # The script saw what came before; the loss of the last step is in no one's hands.
        assert losses(tmp_path, rank) == whole[: TOLD_IN - 1]
    assert [each.code for each in run(tmp_path, "load", "")] == [0, 0, 0]
    assert losses(tmp_path) == whole[: TOLD_IN - 1] + whole[TOLD_IN:]


def test_without_a_place_to_save_in_it_ends_the_process_as_ever(tmp_path: Path) -> None:
    ended = run(tmp_path, "none", "1")
    assert ended[1].code == -signal.SIGTERM
    assert all(ended[rank].code not in (0, None) for rank in (0, 2))
    assert "rank 1 (stage 0, CPU of" in ended[0].output
