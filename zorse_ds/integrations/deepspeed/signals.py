"""SIGTERM, the notice of a spot machine or a scheduler: save at the step's end, then leave."""

import signal
import sys
import threading
import time
from types import FrameType
from typing import Any

from zorse_ds.core.handover import EXIT_SAVED, ProgressNotes
from zorse_ds.integrations.deepspeed.checkpoint import Checkpoints
from zorse_ds.runtime.worker import StepReport, Worker


class Notice:
    """SIGTERM on any rank makes all ranks save after the same step and exit with `EXIT_SAVED`.

    The step's own sum over all ranks carries the news, so that it costs nothing. Where no folder to
    save in is known yet, SIGTERM does what it did before.
    """

    def __init__(self, worker: Worker, checkpoints: Checkpoints) -> None:
        self._worker, self._checkpoints = worker, checkpoints
        self._previous: Any = None
        self._is_set = threading.current_thread() is threading.main_thread()
        if self._is_set:
            self._previous = signal.signal(signal.SIGTERM, self._on_signal)

    def listen(self, notes: ProgressNotes) -> None:
        """Before a step: what `zorse run` asks of the first rank is as if SIGTERM had come."""
        if notes.hears_notice():
            self._on_signal(signal.SIGTERM, None)

    def obey(self, engine: Any, report: StepReport | None) -> None:
        """Collective: after a step. Raises `SystemExit` when a rank was told to end during it."""
        if report is None or not report.noticed or self._checkpoints.place is None:
            return
        start = time.perf_counter()
        folder = self._checkpoints.save_at_notice()
        engine.parts.progress.note_saved()
        engine.destroy()
        if engine.global_rank == 0:
            sys.stderr.write(
                f"zorse: SIGTERM; saved {folder} after step {engine.global_steps} in "
                f"{time.perf_counter() - start:.2f} s, exit code {EXIT_SAVED}\n"
            )
            sys.stderr.flush()
        raise SystemExit(EXIT_SAVED)

    def close(self) -> None:
        """SIGTERM does again what it did before."""
        if self._is_set and signal.getsignal(signal.SIGTERM) == self._on_signal:
            signal.signal(signal.SIGTERM, self._previous or signal.SIG_DFL)
        self._is_set = False

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self._checkpoints.place is not None:
            self._worker.is_noticed = True
            return
        self.close()
        signal.raise_signal(number)
