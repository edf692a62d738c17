"""One process a rank on this host: forked, so that libraries are loaded once."""

import multiprocessing
import os
import signal
import socket
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkProcess
from typing import Any

import torch

from zorse_ds.errors import PeerError, RehearsalError, ZorseError

END_S = 5.0
"""How long a rank may take to end by itself."""
GRACE_S = 1.0
"""How long the others may still report after the first failure: they may say more."""
Tell = Callable[[Any], None]
Job = Callable[[int, Tell], Any]
"""(rank, tell) → result; what it gives to `tell` is progress."""


@dataclass(frozen=True, slots=True)
class Report:
    """What a rank says of itself."""

    rank: int
    progress: Any = None
    result: Any = None
    error: Exception | None = None
    """What ended it."""
    is_last: bool = True


def run_processes(
    num_ranks: int,
    job: Job,
    progress: Callable[[int, Any], None] = lambda rank, what: None,
) -> list[Any]:
    """`[job(rank, tell) for rank …]`, each in a process with a launcher's environment.

    What a job gives to `tell` reaches `progress(rank, what)` here. Raises what the first rank
    failed with, a `ZorseError` as it is and another as `RehearsalError`; no process is left.
    """
    torch.set_num_threads(1)
    with _started(num_ranks, job) as readers:
        reports = _collected(readers, progress)
    failed = [report.error for report in reports if report.error is not None]
    if failed:
        # Ranks that lost another one fail too, and say less.
        raise min(failed, key=lambda error: isinstance(error, PeerError))
    results = {report.rank: report.result for report in reports}
    return [results[rank] for rank in range(num_ranks)]


@contextmanager
def _started(num_ranks: int, job: Job) -> Iterator[list[Connection]]:
    """The running processes' reports; none outlives it."""
    context = multiprocessing.get_context("fork")
    port = _free_port()
    processes: list[ForkProcess] = []
    readers: list[Connection] = []
    try:
        for rank in range(num_ranks):
            reader, writer = context.Pipe(duplex=False)
            arguments = (rank, _environment(rank, num_ranks, port), job, writer)
            process = context.Process(target=_child, args=arguments, daemon=True)
            process.start()
            # The child's copy must be the last, so that its death is an end of file here.
            writer.close()
            processes.append(process)
            readers.append(reader)
        yield readers
    finally:
        for process in processes:
            process.terminate()
        for process in processes:
            _end(process)


def _child(rank: int, environment: dict[str, str], job: Job, writer: Connection) -> None:
    threading.Thread(target=_end_with_parent, name="zorse-parent", daemon=True).start()
    os.environ.update(environment)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)
    # The engine's own messages would tear the tables of the parent's output.
    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), 1)
        os.dup2(nowhere.fileno(), 2)
    try:
        result = job(rank, lambda what: writer.send(Report(rank, progress=what, is_last=False)))
        writer.send(Report(rank, result=result))
    except ZorseError as error:
        writer.send(Report(rank, error=error))
    except Exception:
        writer.send(Report(rank, error=_failure(rank, traceback.format_exc())))
    # Peers may still read from this rank's sockets: the parent ends all together.
    signal.pause()


def _end_with_parent() -> None:
    """A parent that is killed cannot end its ranks."""
    parent = multiprocessing.parent_process()
    assert parent is not None, "ranks are children"
    parent.join()
    os._exit(1)


def _collected(readers: Sequence[Connection], progress: Callable[[int, Any], None]) -> list[Report]:
    """The last reports: of all ranks, or of those that came until some time after a failure."""
    last: list[Report] = []
    pending = {reader: rank for rank, reader in enumerate(readers)}
    while pending:
        has_failed = any(report.error is not None for report in last)
        ready = wait(list(pending), GRACE_S if has_failed else None)
        if not ready:
            break
        for reader, rank in [item for item in pending.items() if item[0] in ready]:
            report = _read(reader, rank)
            if report.is_last:
                last.append(report)
                del pending[reader]
            else:
                progress(rank, report.progress)
    return last


def _read(reader: Connection, rank: int) -> Report:
    try:
        report: Report = reader.recv()
    except EOFError:
        return Report(rank, error=_failure(rank, "the process died"))
    return report


def _failure(rank: int, what: str) -> RehearsalError:
    return RehearsalError(f"rank {rank} failed; expected it to run: {what}")


def _environment(rank: int, num_ranks: int, port: int) -> dict[str, str]:
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(num_ranks),
        "LOCAL_SIZE": str(num_ranks),
        "LOCAL_WORLD_SIZE": str(num_ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": "1",
        "DS_ACCELERATOR": "cpu",
    }


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _end(process: ForkProcess) -> None:
    process.join(END_S)
    if process.is_alive():
        process.kill()
        process.join()
    process.close()
