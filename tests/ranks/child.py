"""The child's half of `tests.ranks.harness`: what one forked rank does from start to exit."""

from __future__ import annotations

import faulthandler
import mmap
import os
import pickle
import signal
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

NOTE_BYTES = 512
STACK_SIGNAL = signal.SIGUSR1


class NoteBoard:
    """A line of text for each rank, in anonymous memory that a parent shares with its forks."""

    def __init__(self, world_size: int) -> None:
        self._memory = mmap.mmap(-1, world_size * NOTE_BYTES)

    def write(self, rank: int, text: str) -> None:
        data = text.encode()[:NOTE_BYTES].ljust(NOTE_BYTES, b"\0")
        self._memory[rank * NOTE_BYTES : (rank + 1) * NOTE_BYTES] = data

    def read(self, rank: int) -> str:
        data = self._memory[rank * NOTE_BYTES : (rank + 1) * NOTE_BYTES]
        return data.rstrip(b"\0").decode(errors="replace")


@dataclass(frozen=True)
class ChildSetup:
    """All that a rank is given. `release` is (reader, writer) of a pipe that carries nothing: its
    end of file, when the parent closes the last writer, tells all ranks to exit together."""

    rank: int
    environment: Mapping[str, str]
    board: NoteBoard
    stack_path: Path
    result: Connection
    release: tuple[Connection, Connection]
    lifetime_s: int


# Set in a child before the test's function runs: a test calls `note` from deep inside a program,
# where it has no handle of the harness.
_place: tuple[NoteBoard, int] | None = None


def note(text: str) -> None:
    """Records what this rank is about to do, for the report of a hang. Nothing outside a rank."""
    if _place is not None:
        board, rank = _place
        board.write(rank, text)


def run_child(setup: ChildSetup, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
    """Runs the function, reports its result or traceback, and exits when all ranks may."""
    global _place
    with setup.stack_path.open("w") as stack_file:
        _prepare(setup, stack_file.fileno())
        _place = (setup.board, setup.rank)
        setup.result.send_bytes(_outcome(setup.rank, function, args))
        # Rank 0 holds the store and every rank holds sockets that the others may still read from.
        setup.release[0].poll(None)
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()


def _prepare(setup: ChildSetup, stack_fd: int) -> None:
    """Turns a copy of the test runner into a rank."""
    faulthandler.register(STACK_SIGNAL, file=stack_fd, all_threads=True)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGALRM):
        signal.signal(number, signal.SIG_DFL)
    # Should the parent be killed, nobody else would end a rank that hangs.
    signal.alarm(setup.lifetime_s)
    setup.release[1].close()
    os.environ.update(setup.environment)
    torch.set_num_threads(1)


def _outcome(rank: int, function: Callable[..., Any], args: tuple[Any, ...]) -> bytes:
    """The pickled `(True, result)` or `(False, traceback)`.

    Plain pickle, not the one of multiprocessing, which would put tensors into shared memory.
    """
    try:
        return pickle.dumps((True, function(rank, *args)))
    except BaseException:  # SystemExit and pytest's outcomes are failures of the rank as well.
        return pickle.dumps((False, traceback.format_exc()))
