"""A rank that raises, dies or hangs ends all ranks in time, with one message that names it."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.ranks import failing_job
from tests.ranks.failing_job import FAILS_AT, TIMEOUT_S
from tests.ranks.scripts import Ended, outcome, start
from zorse_ds.core.checkpoint.folder import CheckpointFolder
from zorse_ds.runtime.watch import EXIT_PEER

WORLD_SIZE = 4
ALL_GONE_S = 20.0
HANGING_GONE_S = TIMEOUT_S + 5.0
STAGES = (0, 0, 1, 2)
STEP = rf" of step {FAILS_AT}"


def run(
    folder: Path, way: str, rank: int, then: Callable[[list[Ended]], None] = lambda ranks: None
) -> tuple[list[Ended], float]:
    """What became of all, and the seconds from the failure to the end of the last process."""
    before = set(Path("/dev/shm").iterdir())
    ranks = start(failing_job.main, [str(folder), way, str(rank)], WORLD_SIZE, folder)
    until = time.monotonic() + 60.0
    while not (folder / "failed").exists() and time.monotonic() < until:
        time.sleep(0.02)
    then(ranks)
    outcome(ranks, folder, timeout_s=90)
    own = tuple(f"torch_{each.pid}_" for each in ranks)
    left = {path.name for path in set(Path("/dev/shm").iterdir()) - before}
    assert not [name for name in left if name.startswith((*own, "deepspeed_"))]
    assert not left_alive(folder)
    assert CheckpointFolder(folder / "ckpt").latest() == f"global_step{FAILS_AT - 1}"
    failed_at = (folder / "failed").stat().st_mtime
    return ranks, max(each.ended_at for each in ranks) - failed_at


def stop_all(ranks: list[Ended]) -> None:
    """As a host that swaps or a scheduler might."""
    time.sleep(0.5)
    for each in ranks:
        os.kill(each.pid, signal.SIGSTOP)


def left_alive(folder: Path) -> list[str]:
    """Command lines of processes that write where the ranks wrote, after a moment to go."""
    until = time.monotonic() + 3.0
    while (left := list(_writers(folder))) and time.monotonic() < until:
        time.sleep(0.05)
    return left


def _writers(folder: Path) -> Iterator[str]:
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if Path(os.readlink(process / "fd" / "2")).is_relative_to(folder):
                yield (process / "cmdline").read_bytes().replace(b"\0", b" ").decode()


def tellers(ranks: list[Ended]) -> list[int]:
    """Ranks that told what happened to another."""
    return [i for i, each in enumerate(ranks) if "\nzorse: " in f"\n{each.output}"]


def everything(ranks: list[Ended]) -> str:
    return "\n".join(f"exit code {each.code}\n{each.output}" for each in ranks)


def named(rank: int) -> str:
    return rf"rank {rank} \(stage {STAGES[rank]}, CPU of [^)]+\)"


RAISING = [("dataset", 0), ("dataset", 1), ("layer", 2), ("layer", 0), ("loss", 3), ("between", 1)]


@pytest.mark.parametrize(("way", "rank"), RAISING)
def test_an_exception_ends_all_with_its_traceback_once(way: str, rank: int, tmp_path: Path) -> None:
    ranks, seconds = run(tmp_path, way, rank)
    text = everything(ranks)
    assert all(each.code in (1, EXIT_PEER) for each in ranks), text
    assert text.count("Traceback (most recent call last)") == 1, text
    own, at = ranks[rank].output, rf"\w+ stage {STAGES[rank]} micro-batch \d+ of step {FAILS_AT}"
    if way == "between":
        at = "no step"
    assert f"ValueError: broken {way}" in own
    assert re.search(rf"{named(rank)} failed at {at}; all ranks end", own), text
    assert tellers(ranks) == [0 if rank else 1], text
    told = ranks[tellers(ranks)[0]].output
    assert re.search(rf"zorse: {named(rank)} failed at {at}: ValueError: broken {way}", told), text
    assert seconds < ALL_GONE_S


@pytest.mark.parametrize("rank", [0, 2, 3])
@pytest.mark.parametrize("way", ["kill", "exit"])
def test_a_process_that_is_gone_is_named(way: str, rank: int, tmp_path: Path) -> None:
    ranks, seconds = run(tmp_path, way, rank)
    text = everything(ranks)
    assert ranks[rank].code == (-9 if way == "kill" else 5)
    assert all(each.code in (1, EXIT_PEER) for i, each in enumerate(ranks) if i != rank), text
    assert tellers(ranks) == [0 if rank else 1], text
    told = ranks[tellers(ranks)[0]].output
    if way == "kill":
        assert "Traceback" not in text, text
        assert re.search(rf"zorse: {named(rank)} is gone: its process ended without a word", told)
        assert re.search(r"last heard of at .* of step [123]|no step", told), text
    else:
        assert re.search(rf"zorse: {named(rank)} failed at .*of step 3: SystemExit: 5", told), text
    assert seconds < ALL_GONE_S


@pytest.mark.parametrize("rank", [0, 2, 3])
def test_a_rank_that_hangs_is_named_with_what_all_were_doing(rank: int, tmp_path: Path) -> None:
    ranks, seconds = run(tmp_path, "sleep", rank)
    text = everything(ranks)
    assert all(each.code in (1, -9, EXIT_PEER) for each in ranks), text
    told = ranks[tellers(ranks)[0]].output
    assert re.search(rf"zorse: {named(rank)} did not go on: no progress for [\d.]+ s", told), text
    for other in range(WORLD_SIZE):
        assert re.search(rf"\n  rank {other}: .* of step {FAILS_AT}, ", told), text
    assert text.count("the last instruction of each rank") == 1
    assert "Traceback" not in text, text
    assert "failing_job.py" in told and "time.sleep(3600)" in told, text
    assert seconds < HANGING_GONE_S


@pytest.mark.parametrize("rank", [0, 2, 3])
@pytest.mark.parametrize("way", ["stop", "spin"])
def test_a_process_that_cannot_answer_is_named_and_ended(
    way: str, rank: int, tmp_path: Path
) -> None:
    ranks, seconds = run(tmp_path, way, rank)
    text = everything(ranks)
    assert ranks[rank].code == -9, text
    assert all(each.code in (1, EXIT_PEER) for i, each in enumerate(ranks) if i != rank), text
    assert tellers(ranks) == [0 if rank else 1], text
    told = ranks[tellers(ranks)[0]].output
    assert re.search(rf"zorse: {named(rank)} stopped answering: no progress for [\d.]+ s", told)
    assert re.search(rf"\n  rank {rank}: .* of step [123], then no answer", told), text
    for other in {*range(WORLD_SIZE)} - {rank}:
        assert re.search(rf"\n  rank {other}: .* of step {FAILS_AT}, for [\d.]+ s", told), text
    assert seconds < HANGING_GONE_S


def test_when_all_stop_the_watch_process_ends_and_names_them(tmp_path: Path) -> None:
    ranks, seconds = run(tmp_path, "sleep", 0, then=stop_all)
    text = everything(ranks)
    assert [each.code for each in ranks] == [-9] * WORLD_SIZE, text
    assert tellers(ranks) == [0], text
    assert re.search(rf"zorse: {named(0)}, .* and {named(3)} stopped answering", ranks[0].output)
    assert seconds < HANGING_GONE_S
