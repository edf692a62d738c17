"""Before the ranks connect: whether each of them was started, and once.

Two processes with the same rank, as two hosts with the same number make them, would else wait for
the missing one until torch gives up.
"""

import contextlib
import os
import socket
import time
from pathlib import Path

import torch.distributed as dist
from torch.distributed.constants import default_pg_timeout

from zorse_ds.core.strict import listed
from zorse_ds.errors import WorldError

_LAST_WORDS_S = 5.0
"""How long the process that keeps the store waits for the others to hear of a mistake."""
_SHOWN = 8


def call_roll() -> dist.Store | None:
    """Count the processes of the launcher's environment; None where it has no such environment.

    The store must outlive the connection of all ranks. Raises `WorldError` on all of them where a
    rank was started twice, and where one has not come in torch's own time. Collective.
    """
    numbers = [os.environ.get(name, "") for name in ("RANK", "WORLD_SIZE", "MASTER_PORT")]
    if not (os.environ.get("MASTER_ADDR") and all(text.isdecimal() for text in numbers)):
        return None
    rank, world_size = int(numbers[0]), int(numbers[1])
    if world_size == 1:
        return None
    store = dist.PrefixStore(f"zorse/{_attempt()}", _store(rank, world_size))
    _come(store, rank, world_size)
    try:
        store.wait(["all"], default_pg_timeout)
    except dist.DistStoreError:
        _end(store, world_size)
    if store.check(["wrong"]):
        sentence = store.get("wrong").decode()
        _wait_until_all_know(store, rank)
        raise WorldError(sentence)
    return store


def _come(store: dist.Store, rank: int, world_size: int) -> None:
    """Take the place of a rank, unless another process has; who comes last ends the roll call."""
    own = _own_place()
    first = store.compare_set(_key(rank), "", own).decode()
    if first != own:
        places = " and ".join(place.split("\n")[0] for place in (first, own))
        store.set("twice", f"rank {rank} of {world_size} was started twice, {places}")
    # A process may come again, after it has left the others.
    if store.add(f"came/{own}", 1) == 1 and store.add("came", 1) == world_size:
        _end(store, world_size)


def _end(store: dist.Store, world_size: int) -> None:
    """What is wrong, if anything is, is said by one process for all."""
    missing = _missing(store, world_size)
    expected = "expected one process a rank"
    if store.check(["twice"]):
        nobody = f", and none as rank {missing}" if missing else ""
        where = "where each host has its own launcher, look at the number it gives its node"
        store.set("wrong", f"{store.get('twice').decode()}{nobody}; {expected}: {where}")
    elif missing:
        seconds = default_pg_timeout.total_seconds()
        came = f"no process came as rank {missing} of {world_size} in {seconds:g} s"
        store.set("wrong", f"{came}; {expected}")
    store.set("all", "")


def _store(rank: int, world_size: int) -> dist.TCPStore:
    """The one that torch will use; the first rank keeps it, or the agent of torchrun."""
    agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"

    def opened(keeps: bool) -> dist.TCPStore:
        return dist.TCPStore(
            os.environ["MASTER_ADDR"],
            int(os.environ["MASTER_PORT"]),
            world_size,
            keeps,
            timeout=default_pg_timeout,
            wait_for_workers=False,
            multi_tenant=True,
        )

    if rank or agent:
        return opened(False)
    try:
        return opened(True)
    except dist.DistNetworkError:
        # Another process of this host says that it is the first rank too: it keeps the store.
        return opened(False)


def _attempt() -> str:
    """The agent's store outlives its ranks."""
    return os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")


def _own_place() -> str:
    """What tells a process from all others; the first line for people."""
    namespace = Path("/proc/self/ns/pid")
    where = os.readlink(namespace) if namespace.exists() else ""
    return f"as process {os.getpid()} on {socket.gethostname()}\n{where}"


def _key(rank: int) -> str:
    return f"rank/{rank}"


def _wait_until_all_know(store: dist.Store, rank: int) -> None:
    """The first rank keeps the store until the others have read it."""
    with contextlib.suppress(dist.DistError):
        known, came = store.add("known", 1), store.add("came", 0)
        until = time.monotonic() + _LAST_WORDS_S
        while rank == 0 and known < came and time.monotonic() < until:
            time.sleep(0.05)
            known = store.add("known", 0)


def _missing(store: dist.Store, world_size: int) -> str:
    """The ranks that nobody is; empty if there are none."""
    if store.check([_key(rank) for rank in range(world_size)]):
        return ""
    ranks = [rank for rank in range(world_size) if not store.check([_key(rank)])]
    more = f" and {len(ranks) - _SHOWN} more" if len(ranks) > _SHOWN else ""
    return listed(ranks[:_SHOWN]) + more
