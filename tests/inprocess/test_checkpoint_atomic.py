"""A save that fails or is killed leaves the checkpoints that there were; the next one cleans."""

from __future__ import annotations

import errno
import multiprocessing
import os
import random
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.inprocess.checkpoint_cases import (
    PLANS,
    STEPS,
    job,
    loading,
    request_of,
    saving,
    state_of,
)
from tests.inprocess.local_job import Rank, run
from zorse_ds.core.checkpoint.folder import CheckpointFolder
from zorse_ds.core.checkpoint.manifest import VALUE
from zorse_ds.errors import CheckpointError
from zorse_ds.ranges import Range
from zorse_ds.runtime.checkpoint import files
from zorse_ds.runtime.checkpoint.capture import Capture, Entry, HostCopy, capture
from zorse_ds.runtime.checkpoint.exchange import Alone
from zorse_ds.runtime.checkpoint.loading import open_checkpoint
from zorse_ds.runtime.checkpoint.saving import BackgroundSave, save
from zorse_ds.runtime.optimizer import ShardedOptimizer


def names(root: Path) -> list[str]:
    return sorted(path.name for path in root.iterdir())


@pytest.mark.parametrize("full_on", [0, 2])
@pytest.mark.parametrize("room", [0, 900])
def test_a_full_disk_is_one_sentence_on_all_ranks(
    full_on: int, room: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = PLANS["2-1-2"]
    run(job(), plan, STEPS[:1], after=saving(tmp_path, tag="first"))
    before = (tmp_path / "first" / "manifest.json").read_bytes()
    write_all, left = files.write_all, [room]

    def full(file: Any, data: memoryview) -> None:
        if f"rank-{full_on:05d}" in str(file.name):
            left[0] -= len(data)
            if left[0] < 0:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        write_all(file, data)

    monkeypatch.setattr(files, "write_all", full)
    sentences = []

    def hook(rank: Rank, optimizer: ShardedOptimizer) -> None:
        with pytest.raises(CheckpointError) as caught:
            saving(tmp_path, tag="second")(rank, optimizer)
        sentences.append(str(caught.value))

    run(job(), plan, STEPS[:1], after=hook)
    assert len(sentences) == plan.world_size and len(set(sentences)) == 1
    assert sentences[0] == (
        f"saving second in {tmp_path} failed on rank {full_on} (No space left on device); expected "
        "a folder that all ranks share, with room for the whole checkpoint"
    )
    assert names(tmp_path) == ["first", "latest"]
    assert (tmp_path / "first" / "manifest.json").read_bytes() == before
    monkeypatch.undo()
    run(job(), plan, [], before=loading(tmp_path), after=saving(tmp_path, tag="second"))
    assert names(tmp_path) == ["first", "latest", "second"]


def test_a_folder_that_cannot_be_made_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match=r"failed on rank 0 \(.*; expected a folder that all"):
        run(job(), PLANS["1-3"], [], after=saving(tmp_path / "file"))
    with pytest.raises(CheckpointError, match=r"the tag is '\.\./x'; expected"):
        run(job(), PLANS["1-3"], [], after=saving(tmp_path, tag="../x"))


def test_the_oldest_go_when_a_new_one_is_there(tmp_path: Path) -> None:
    for tag in "abc":
        run(job(), PLANS["1-3"], [], after=saving(tmp_path, tag=tag, keep_last=2))
    assert names(tmp_path) == ["b", "c", "latest"]


def numbered(count: int) -> Capture:
    """Some MiB of which every element is `count`."""
    values = torch.full((1_000_000,), float(count))
    entry = Entry("w", VALUE, Range(0, len(values)), values)
    return Capture((entry,), {"w": (len(values),)}, {"w": {}})


def save_for_ever(root: Path) -> None:
    """Checkpoint after checkpoint, some under a tag that was there before."""
    for count in range(1_000_000):
        request = request_of(
            PLANS["one process"], root, tag=f"t{count % 5}", state={"count": count}, keep_last=3
        )
        save(request, numbered(count), Alone())


@pytest.mark.parametrize("seed", range(12))
def test_a_kill_at_any_instant_leaves_a_whole_checkpoint(seed: int, tmp_path: Path) -> None:
    child = multiprocessing.get_context("fork").Process(target=save_for_ever, args=(tmp_path,))
    child.start()
    assert child.pid is not None
    while not (tmp_path / "latest").exists():
        time.sleep(0.001)
    time.sleep(random.Random(seed).uniform(0, 0.15))
    os.kill(child.pid, signal.SIGKILL)
    child.join()
    folder = CheckpointFolder(tmp_path)
    latest = folder.latest()
    assert latest is not None
    for tag in {*folder.tags(), latest}:
        reader = open_checkpoint(folder.find(tag))
        found = reader.read_whole(VALUE, "w")
        assert len(found.unique()) == 1
        assert float(found[0]) == reader.manifest.state["count"]
    save(request_of(PLANS["one process"], tmp_path, tag="next"), numbered(0), Alone())
    assert not [name for name in names(tmp_path) if name.startswith(".")]
    assert folder.latest() == "next"


def test_training_goes_on_while_the_copy_is_written(tmp_path: Path) -> None:
    """What is saved is what was there when the save began."""
    plan = PLANS["abaca"]
    masters: dict[int, list[torch.Tensor]] = {}

    def hook(rank: Rank, optimizer: ShardedOptimizer) -> None:
        taken = HostCopy().take(capture(state_of(rank, optimizer)))
        masters[rank.rank] = [bucket.master.detach().clone() for bucket in optimizer.buckets]
        exchange = rank.world.exchange(rank.rank)
        running = BackgroundSave(request_of(plan, tmp_path), taken, exchange)
        with torch.no_grad():
            for bucket in optimizer.buckets:
                bucket.master.fill_(7)
                for value in optimizer.inner.state[bucket.master].values():
                    value.fill_(7)
        running.wait()
        assert running.is_done

    run(job(), plan, STEPS[:2], after=hook)
    found: dict[int, list[torch.Tensor]] = {}

    def look(rank: Rank, optimizer: ShardedOptimizer) -> None:
        found[rank.rank] = [bucket.master.detach().clone() for bucket in optimizer.buckets]
        assert all(
            not (value == 7).any()
            for bucket in optimizer.buckets
            for value in optimizer.inner.state[bucket.master].values()
        )

    run(job(), plan, [], before=loading(tmp_path), after=look)
    for rank, expected in masters.items():
        assert all(map(torch.equal, found[rank], expected)) and len(expected) == len(found[rank])


def test_an_error_in_the_background_waits_for_the_next_call(tmp_path: Path) -> None:
    request = request_of(PLANS["one process"], tmp_path / "file" / "x")
    (tmp_path / "file").touch()
    running = BackgroundSave(request, numbered(1), Alone())
    with pytest.raises(CheckpointError, match="Not a directory"):
        running.wait()
    running.wait()


def test_the_copy_is_kept_for_the_next_time() -> None:
    copy = HostCopy()
    first, second = copy.take(numbered(1)), copy.take(numbered(2))
    assert first.entries[0].values.data_ptr() == second.entries[0].values.data_ptr()
    assert float(second.entries[0].values[0]) == 2
