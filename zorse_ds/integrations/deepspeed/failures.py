"""A rank that fails, dies or hangs ends all ranks, with one message: the watch behind an engine."""

import atexit
import os
import secrets
import socket
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from zorse_ds.core.plan import Plan
from zorse_ds.errors import PeerError
from zorse_ds.integrations.deepspeed.agreement import together
from zorse_ds.runtime import watch_process
from zorse_ds.runtime.dist_world import DistWorld
from zorse_ds.runtime.watch import Watch
from zorse_ds.runtime.watch_process import Duty
from zorse_ds.runtime.watch_verdict import Place
from zorse_ds.runtime.worker import Worker
from zorse_ds.schedule.instructions import describe


class Failures:
    """What happens when a rank fails between the construction of an engine and its `destroy`.

    Collective: every rank constructs it, in the main thread. Raises `WorldError` where the first
    rank is out of reach.
    """

    def __init__(
        self, world: DistWorld, plan: Plan, device: torch.device, timeout_s: float
    ) -> None:
        self._watch = None if world.size == 1 else _start(world, plan, device, timeout_s)
        self._previous_hook = sys.excepthook
        if self._watch is not None:
            sys.excepthook = self._hook
            atexit.register(self._at_exit)

    def observe(self, worker: Worker) -> None:
        """The worker's instructions are what messages name."""
        if self._watch is not None:
            self._watch.doing = _doing_of(worker)

    def step(self, number: int) -> AbstractContextManager[None]:
        """An exception inside ends all ranks; see `Watch.step`."""
        return nullcontext() if self._watch is None else self._watch.step(number)

    def close(self) -> None:
        """Leave the watch."""
        if self._watch is None:
            return
        self._watch.close()
        atexit.unregister(self._at_exit)
        if sys.excepthook == self._hook:
            sys.excepthook = self._previous_hook

    def _hook(
        self, kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        """What the program does not catch ends all ranks; the first of them shows its traceback."""
        assert self._watch is not None, "a hook is set where there is a watch"
        if isinstance(error, PeerError):
            return
        if isinstance(error, KeyboardInterrupt) or self._watch.tell(error):
            self._previous_hook(kind, error, trace)

    def _at_exit(self) -> None:
        if self._watch is not None:
            self._watch.close()


def _start(world: DistWorld, plan: Plan, device: torch.device, timeout_s: float) -> Watch:
    """Collective: each host starts a watch process, of which the first one's holds the hub."""
    own = _own_place(world.rank, plan, device)
    places: list[Any] = world.gather_objects(own)
    duty = Duty(tuple(places), own.home, secrets.token_hex(16), timeout_s)
    offer: tuple[tuple[str, int], str] | None = None
    with together("starting the watch"):
        if world.rank == 0:
            host = os.environ.get("MASTER_ADDR") or socket.gethostname()
            offer = ((host, watch_process.start(duty)), duty.token)
    offers: list[Any] = world.gather_objects(offer)
    address, token = offers[0]
    with together("starting the watch"):
        at_home = [place.rank for place in places if place.home == own.home]
        if world.rank == at_home[0] != 0:
            watch_process.start(replace(duty, token=token, address=address))
    return Watch(world.rank, places, address, token, timeout_s)


def _own_place(rank: int, plan: Plan, device: torch.device) -> Place:
    name = "CPU"
    if device.type == "cuda":
        name = f"GPU {device.index} {torch.cuda.get_device_name(device)}"
    host = socket.gethostname()
    namespace = Path("/proc/self/ns/pid")
    home = f"{host} {os.readlink(namespace) if namespace.exists() else ''}"
    return Place(rank, plan.stages_of_rank(rank), name, host, os.getpid(), home)


def _doing_of(worker: Worker) -> Callable[[], tuple[str, float] | None]:
    def doing() -> tuple[str, float] | None:
        now = worker.now
        return None if now is None else (describe(now[0]), now[1])

    return doing
