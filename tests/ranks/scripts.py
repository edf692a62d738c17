"""Runs a script's `main` in one forked process a rank, as an interpreter would, and lets it fail.

Unlike `harness`, which reports failures of the test's own function, this is for failures that are
the point: exit codes, what each process prints, and how long all of them live are the result.
"""

from __future__ import annotations

import atexit
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from deepspeed import ops

torch.set_num_threads(1)
# See `harness`: its build leaves files in shared memory.
ops.__compatible_ops__["deepspeed_shm_comm"] = False
Main = Callable[[], None]


@dataclass
class Ended:
    """What became of a rank."""

    pid: int
    code: int | None = None
    """Exit code, minus the signal that ended it; None: it was alive at the end of the time."""
    ended_at: float = 0.0
    """By `time.time`."""
    output: str = ""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def start(main: Main, arguments: Sequence[str], world_size: int, folder: Path) -> list[Ended]:
    """The running ranks; `outcome` waits for them."""
    port = free_port()
    ranks = []
    for rank in range(world_size):
        environment = {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(world_size),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
        }
        sys.stdout.flush()
        sys.stderr.flush()
        pid = os.fork()
        if not pid:
            _be_an_interpreter(main, arguments, environment, folder / f"output{rank}")
        ranks.append(Ended(pid))
    return ranks


def outcome(ranks: Sequence[Ended], folder: Path, timeout_s: float) -> Sequence[Ended]:
    """Waits; nobody is alive afterwards."""
    begun = time.monotonic()
    waiting = list(ranks)
    while waiting and time.monotonic() < begun + timeout_s:
        for rank in list(waiting):
            pid, status = os.waitpid(rank.pid, os.WNOHANG)
            if pid:
                rank.code = os.waitstatus_to_exitcode(status)
                rank.ended_at = time.time()
                waiting.remove(rank)
        time.sleep(0.02)
    for rank in waiting:
        os.kill(rank.pid, signal.SIGKILL)
        os.waitpid(rank.pid, 0)
    for index, rank in enumerate(ranks):
        rank.output = (folder / f"output{index}").read_text()
    return ranks


def _be_an_interpreter(
    main: Main, arguments: Sequence[str], environment: dict[str, str], output: Path
) -> None:
    """Runs `main` and ends the process with what Python would do and return."""
    code = 0
    try:
        descriptor = os.open(output, os.O_CREAT | os.O_WRONLY | os.O_TRUNC)
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os.dup2(descriptor, 1)
        os.dup2(descriptor, 2)
        sys.stdout, sys.stderr = (os.fdopen(os.dup(number), "w", 1) for number in (1, 2))
        sys.excepthook = sys.__excepthook__
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_DFL)
        atexit._clear()
        os.environ.update(environment)
        sys.argv = ["script", *arguments]
        code = _run(main)
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(code)


def _run(main: Main) -> int:
    try:
        main()
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        sys.excepthook(*sys.exc_info())
        return 1
    return 0
