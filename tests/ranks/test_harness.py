"""The harness itself: results, failures, hangs and what is left behind."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch
import torch.distributed as dist

from tests.ranks.harness import RanksError, note, run_ranks


@pytest.fixture(autouse=True)
def no_child_outlives_a_test() -> Iterator[None]:
    before = psutil.Process().children(recursive=True)
    yield
    assert psutil.Process().children(recursive=True) == before


def all_reduce_cases(rank: int, cases: list[int]) -> list[float]:
    """A worker that loops over many cases in one launch."""
    dist.init_process_group("gloo")
    sums = []
    for case in cases:
        tensor = torch.full((4,), float(case + rank))
        dist.all_reduce(tensor)
        sums.append(tensor[0].item())
    return sums


def test_results_come_back_by_rank() -> None:
    assert run_ranks(3, all_reduce_cases, [0, 10], timeout_s=30) == [[3.0, 33.0]] * 3


def test_ranks_see_the_environment_of_a_launcher() -> None:
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_SIZE", "MASTER_ADDR", "OMP_NUM_THREADS")
    before = dict(os.environ)
    results = run_ranks(2, lambda rank: [os.environ[name] for name in names], timeout_s=30)
    assert results == [[str(r), str(r), "2", "2", "127.0.0.1", "1"] for r in range(2)]
    assert dict(os.environ) == before


def test_large_results_and_tensors_leave_nothing_in_shared_memory() -> None:
    def large(rank: int) -> tuple[np.ndarray, torch.Tensor]:
        return np.full(300_000, rank), torch.full((300_000,), float(rank))

    before = set(os.listdir("/dev/shm"))
    results = run_ranks(2, large, timeout_s=30)
    assert [(int(a.sum()), t.sum().item()) for a, t in results] == [(0, 0.0), (300_000, 300_000.0)]
    new = set(os.listdir("/dev/shm")) - before
    assert not [name for name in new if name.startswith(("torch_", "deepspeed_"))]


def test_deepspeed_starts_without_compiling_its_shared_memory_op() -> None:
    import deepspeed

    def start(rank: int) -> float:
        begin = time.monotonic()
        deepspeed.init_distributed("gloo", dist_init_required=True)
        tensor = torch.ones(1)
        deepspeed.comm.all_reduce(tensor)
        assert tensor.item() == 2
        return time.monotonic() - begin

    # Compiling takes over a minute; a file that it leaves would be found by `run_ranks`.
    assert max(run_ranks(2, start, timeout_s=60)) < 20


def test_children_may_run_backward_after_the_parent_did() -> None:
    def gradient(rank: int) -> float:
        x = torch.full((64, 64), float(rank), requires_grad=True)
        (x @ x).sum().backward()
        return x.grad[0, 0].item()  # type: ignore[index]

    assert [gradient(0), gradient(1)] == run_ranks(2, gradient, timeout_s=30)


def raise_on_one(rank: int, failing: int) -> None:
    dist.init_process_group("gloo")
    note(f"rank {rank} is about to reduce")
    if rank == failing:
        raise ValueError("broken on purpose")
    dist.all_reduce(torch.zeros(1))


def test_a_rank_that_raises_is_named_with_its_traceback_and_ends_the_others() -> None:
    start = time.monotonic()
    with pytest.raises(RanksError) as caught:
        run_ranks(3, raise_on_one, 1, timeout_s=30)
    assert time.monotonic() - start < 15
    message = str(caught.value)
    assert message.splitlines()[0] == "rank 1 raised"
    assert "ValueError: broken on purpose" in message
    assert "rank 0 was still running; last note: rank 0 is about to reduce" in message
    assert message.count("in all_reduce") == 2


def hang_on_one(rank: int, hanging: int) -> int:
    note("step 1, RecvActivation of micro-batch 2")
    if rank == hanging:
        wait_for_ever()
    return rank


def wait_for_ever() -> None:
    threading.Event().wait()


def test_a_time_out_names_the_rank_its_last_note_and_its_stack() -> None:
    start = time.monotonic()
    with pytest.raises(RanksError) as caught:
        run_ranks(2, hang_on_one, 1, timeout_s=3)
    assert 3 <= time.monotonic() - start < 15
    message = str(caught.value)
    assert message.splitlines()[0] == "not done after 3 s: rank 1"
    assert "rank 0 finished" in message
    assert "rank 1 was still running; last note: step 1, RecvActivation of micro-batch 2" in message
    assert f'"{__file__}", line' in message
    assert "in wait_for_ever" in message
    assert "_pytest" not in message


def test_a_rank_that_ignores_sigterm_is_killed() -> None:
    def stubborn(rank: int) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        wait_for_ever()

    with pytest.raises(RanksError, match="not done after 1 s: rank 0"):
        run_ranks(1, stubborn, timeout_s=1)


def test_a_rank_that_dies_is_named_with_its_exit_code() -> None:
    def die(rank: int) -> None:
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)

    with pytest.raises(RanksError, match=r"^rank 1 died\n(.*\n)*    exit code -9"):
        run_ranks(2, die, timeout_s=30)


def test_a_rank_that_does_not_exit_after_its_result_fails() -> None:
    def leave_a_thread(rank: int) -> None:
        threading.Thread(target=wait_for_ever).start()

    with pytest.raises(RanksError, match="rank 0 finished, but did not exit"):
        run_ranks(1, leave_a_thread, timeout_s=30)


def test_a_file_left_in_shared_memory_is_an_error() -> None:
    def leak(rank: int) -> str:
        path = Path(f"/dev/shm/torch_{os.getpid()}_left")
        path.touch()
        return str(path)

    try:
        with pytest.raises(RanksError, match=r"left in shared memory: torch_\d+_left"):
            run_ranks(1, leak, timeout_s=30)
    finally:
        for path in Path("/dev/shm").glob("torch_*_left"):
            path.unlink()


def test_note_outside_a_rank_does_nothing() -> None:
    note("nobody listens")
