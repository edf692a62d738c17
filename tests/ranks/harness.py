"""Runs a function on several real ranks: one forked process each, the parent's imports shared.

    results = run_ranks(3, train_some_steps, plan, timeout_s=60)

calls `train_some_steps(rank, plan)` in three processes with the environment of a launcher, and
returns their results by rank. A start costs milliseconds, because torch (and DeepSpeed, if the test
module imports it at its top) is loaded already; a function that loops over many cases pays it once.

If a rank raises, dies or hangs, all are ended and `RanksError` says of each what became of it, its
last `note` and its Python stack.
"""

from __future__ import annotations

import contextlib
import math
import multiprocessing
import os
import pickle
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkProcess
from pathlib import Path
from typing import Any

import torch

from tests.ranks import child
from tests.ranks.child import ChildSetup, NoteBoard, note

__all__ = ["RanksError", "note", "run_ranks"]

# A forked child inherits the memory of a thread pool but not its threads, and hangs in it.
torch.set_num_threads(1)

# How long the other ranks may go on after the first failure: often they fail too, and say why.
GRACE_S = 1.0
# How long a rank may take to exit after its result.
EXIT_S = 5.0
# How long a rank may take to obey SIGTERM.
SIGTERM_S = 2.0
# How long a rank may take to print its stack.
STACK_S = 2.0
# A rank whose parent is gone ends itself this long after the time-out.
ORPHAN_S = 60


class RanksError(AssertionError):
    """Not every rank succeeded; the message tells of each what became of it."""


class State(StrEnum):
    """What is known of a rank."""

    RUNNING = "was still running"
    FINISHED = "finished"
    RAISED = "raised"
    DIED = "died"
    STUCK = "finished, but did not exit"


@dataclass
class Rank:
    """The parent's view of one child. `detail` is a traceback, a stack or an exit code."""

    index: int
    process: ForkProcess
    reader: Connection
    stack_path: Path
    state: State = State.RUNNING
    result: Any = None
    detail: str = ""

    def receive(self) -> None:
        """Takes the child's report; end of file without one means that it died."""
        try:
            has_result, value = pickle.loads(self.reader.recv_bytes())
        except EOFError:
            self.process.join(EXIT_S)
            self.state, self.detail = State.DIED, f"exit code {self.process.exitcode}"
            return
        if has_result:
            self.state, self.result = State.FINISHED, value
        else:
            self.state, self.detail = State.RAISED, value

    def take_stack_if_running(self) -> None:
        """Says where a child is that has not reported."""
        if self.state is State.RUNNING:
            self.detail = self._stack()

    def check_exit(self) -> None:
        """Expects a child that has finished, and may exit, to do so cleanly."""
        if self.state is not State.FINISHED:
            return
        self.process.join(EXIT_S)
        if self.process.is_alive():
            self.state, self.detail = State.STUCK, self._stack()
        elif self.process.exitcode != 0:
            code = self.process.exitcode
            self.state, self.detail = State.DIED, f"exit code {code}, after its result"

    def _stack(self) -> str:
        """The Python stack of the child now, innermost call first, down to the test's function."""
        assert self.process.pid is not None
        os.kill(self.process.pid, child.STACK_SIGNAL)
        give_up = time.monotonic() + STACK_S
        while not self.stack_path.stat().st_size and time.monotonic() < give_up:
            time.sleep(0.01)
        time.sleep(0.05)  # The first line is there; the others follow at once.
        lines = self.stack_path.read_text().splitlines()
        # Below the child's own frames lie those of the test runner that was forked.
        own = [i for i, line in enumerate(lines) if child.__file__ in line]
        return "\n".join(lines[: own[0]] if own else lines) or "(it printed no stack)"

    def end(self) -> None:
        """Ends the child if it is alive, politely first, and frees what it held here."""
        if self.process.is_alive():
            self.process.terminate()
            self.process.join(SIGTERM_S)
        if self.process.is_alive():
            self.process.kill()
        self.process.join()
        self.process.close()
        self.reader.close()

    def describe(self, last_note: str) -> str:
        """What became of the rank, and the detail indented below."""
        title = f"rank {self.index} {self.state}"
        if last_note:
            title += f"; last note: {last_note}"
        return "\n    ".join([title, *self.detail.rstrip().splitlines()])


def run_ranks(
    world_size: int, function: Callable[..., Any], *args: Any, timeout_s: float = 60.0
) -> list[Any]:
    """Returns `[function(rank, *args) for rank in range(world_size)]`, each from its own process.

    `function` and `args` may be closures: they are inherited, not pickled. Results are pickled to
    bytes, tensors included, so nothing is left in shared memory. The process group is the
    function's to make (the environment names a free port); it is destroyed for it.

    Raises `RanksError` if a rank raises, dies, is not done after `timeout_s`, or leaves a file in
    shared memory.
    """
    _disable_deepspeed_shm_op()
    port = _free_port()
    board = NoteBoard(world_size)
    lifetime_s = math.ceil(timeout_s) + ORPHAN_S
    with _started(_environments(world_size, port), board, lifetime_s, function, args) as started:
        ranks, release = started
        pids = [rank.process.pid for rank in ranks]
        _collect(ranks, timeout_s)
        # Before any rank exits: those that wait for it would wake up with an error of their own.
        for rank in ranks:
            rank.take_stack_if_running()
        release.close()
        for rank in ranks:
            rank.check_exit()
    leaked = _left_in_shared_memory(port, pids)
    if leaked or any(rank.state is not State.FINISHED for rank in ranks):
        states = [rank.describe(board.read(rank.index)) for rank in ranks]
        raise RanksError("\n".join([_headline(ranks, leaked, timeout_s), *states]))
    return [rank.result for rank in ranks]


@contextlib.contextmanager
def _started(
    environments: Sequence[Mapping[str, str]],
    board: NoteBoard,
    lifetime_s: int,
    function: Callable[..., Any],
    args: tuple[Any, ...],
) -> Iterator[tuple[list[Rank], Connection]]:
    """The running ranks, and the connection whose closing lets them exit; none outlives it."""
    context = multiprocessing.get_context("fork")
    release = context.Pipe(duplex=False)
    ranks: list[Rank] = []
    with tempfile.TemporaryDirectory(prefix="zorse-ranks-") as folder, release[0], release[1]:
        try:
            for index, environment in enumerate(environments):
                reader, writer = context.Pipe(duplex=False)
                stack_path = Path(folder, str(index))
                stack_path.touch()
                setup = ChildSetup(
                    index, environment, board, stack_path, writer, release, lifetime_s
                )
                process = context.Process(target=child.run_child, args=(setup, function, args))
                process.start()
                # The child's copy must be the last, so that its death is an end of file here.
                writer.close()
                ranks.append(Rank(index, process, reader, stack_path))
            yield ranks, release[1]
        finally:
            for rank in ranks:
                rank.end()


def _environments(world_size: int, port: int) -> list[dict[str, str]]:
    """What a launcher would set for each rank of one host."""
    shared = {
        "WORLD_SIZE": str(world_size),
        "LOCAL_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": "1",
    }
    return [shared | {"RANK": str(r), "LOCAL_RANK": str(r)} for r in range(world_size)]


def _collect(ranks: Sequence[Rank], timeout_s: float) -> None:
    """Takes the reports as they come, until all are in, or time or patience is over."""
    deadline = time.monotonic() + timeout_s
    pending = {rank.reader: rank for rank in ranks}
    while pending and (left_s := deadline - time.monotonic()) > 0:
        for reader in wait(list(pending), left_s):
            rank = pending.pop(reader)  # type: ignore[call-overload]
            rank.receive()
            if rank.state is not State.FINISHED:
                deadline = min(deadline, time.monotonic() + GRACE_S)


def _headline(ranks: Sequence[Rank], leaked: Sequence[str], timeout_s: float) -> str:
    """The one sentence that names the cause: failures come before those that waited for them."""
    failed = [r for r in ranks if r.state in (State.RAISED, State.DIED, State.STUCK)]
    if failed:
        return "; ".join(f"rank {rank.index} {rank.state}" for rank in failed)
    if running := [str(rank.index) for rank in ranks if rank.state is State.RUNNING]:
        return f"not done after {timeout_s:g} s: rank {', '.join(running)}"
    return f"left in shared memory: {', '.join(leaked)}"


def _disable_deepspeed_shm_op() -> None:
    """Keeps DeepSpeed from compiling its shared-memory all-reduce for CPU, which nothing here uses.

    The build takes over a minute, and each rank then leaves a file of 66 MiB in /dev/shm for ever.
    The table of ops is kept by the module, so children inherit the change. A test that does not
    import DeepSpeed pays nothing.
    """
    if "deepspeed" in sys.modules:
        from deepspeed import ops

        ops.__compatible_ops__["deepspeed_shm_comm"] = False


def _free_port() -> int:
    """A port that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _left_in_shared_memory(port: int, pids: Sequence[int | None]) -> list[str]:
    """Files in /dev/shm that only these ranks can have made: by their port, or by their process."""
    folder = Path("/dev/shm")
    if not folder.is_dir():
        return []
    return sorted(
        path.name
        for path in folder.iterdir()
        if (path.name.startswith("deepspeed_") and f"_{port}_" in path.name)
        or path.name.startswith(tuple(f"torch_{pid}_" for pid in pids))
    )
