"""Virtual GPUs that become slower while a rehearsal runs, and how their passes are measured."""

import re
from collections import defaultdict
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Literal

from zorse_ds.errors import RehearsalError
from zorse_ds.rehearsal.gpu import VirtualGpu
from zorse_ds.runtime.stopwatch import Measured, Pass

_WAYS: dict[str, Literal["forward", "backward"]] = {
    "ForwardPass": "forward",
    "BackwardPass": "backward",
}


@dataclass(frozen=True, slots=True)
class Slowdown:
    """From a step on, a rank's passes take `factor` times as long as planned."""

    rank: int
    factor: float
    step: int

    @classmethod
    def parse(cls, text: str, num_ranks: int, num_steps: int) -> "Slowdown":
        """`RANK:FACTOR@STEP`, such as `3:2@5`. Raises `RehearsalError`."""
        found = re.fullmatch(r"(\d+):(\d+\.?\d*|\.\d+)@(\d+)", text, re.ASCII)
        if found is None:
            raise RehearsalError(
                f"--slow is {text!r}; expected RANK:FACTOR@STEP, such as 0:2@5 for rank 0 to take "
                "twice as long from step 5 on"
            )
        rank, factor, step = int(found[1]), float(found[2]), int(found[3])
        if rank >= num_ranks:
            raise RehearsalError(
                f"--slow {text} names rank {rank}; expected one of 0 to {num_ranks - 1}"
            )
        if not 0.01 <= factor <= 100:
            raise RehearsalError(
                f"--slow {text} has factor {found[2]}; expected one from 0.01 to 100"
            )
        if not 1 <= step <= num_steps:
            raise RehearsalError(
                f"--slow {text} begins with step {step}; expected one of the steps 1 to {num_steps}"
            )
        return cls(rank, factor, step)


def factor_at(slowdowns: Sequence[Slowdown], rank: int, step: int) -> float:
    """What the passes of a rank take in a step, over what is planned: the latest word counts."""
    begun = [each for each in slowdowns if each.rank == rank and each.step <= step]
    return max(begun, key=lambda each: each.step).factor if begun else 1.0


class VirtualStopwatch:
    """See `Stopwatch`: a rank's passes in virtual seconds, its memory in virtual bytes."""

    def __init__(self, gpu: VirtualGpu) -> None:
        self._gpu = gpu
        self._held_bytes, self._start_s = 0, 0.0

    def begin(self) -> None:
        """See `Stopwatch.begin`."""
        self._held_bytes = self._gpu.pool.held_bytes
        self._start_s = self._gpu.clock.now_s

    def passing(self, at: Pass) -> AbstractContextManager[None]:
        """See `Stopwatch.passing`: the virtual clock knows already."""
        return nullcontext()

    def read(self) -> Measured:
        """See `Stopwatch.read`."""
        passes_s: defaultdict[Pass, float] = defaultdict(float)
        for work in self._gpu.clock.works:
            if work.start_s >= self._start_s and work.name in _WAYS and work.cause is not None:
                passes_s[work.cause.stage, _WAYS[work.name]] += work.stop_s - work.start_s
        pool = self._gpu.pool
        return Measured(
            self._gpu.clock.now_s - self._start_s,
            dict(passes_s),
            (pool.report.peak_bytes - self._held_bytes) * self._gpu.miniature.ratio,
            pool.room_bytes,
        )
