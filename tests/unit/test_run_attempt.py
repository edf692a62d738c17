"""SIGTERM to `zorse run`: the job is asked first, and told by its launcher if it is deaf."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from pathlib import Path

import pytest

from zorse_ds.cli import run_job
from zorse_ds.cli.run_job import Attempt
from zorse_ds.core.handover import EXIT_SAVED, ProgressNotes, notice_path, read_notice

JOB = """
import sys, time
from zorse_ds.core.handover import ProgressNotes
notes, way = ProgressNotes(sys.argv[1]), sys.argv[2]
if way == "young":
    open(sys.argv[1] + ".up", "w")
    time.sleep(60)
for step in range(1, 600):
    if way != "deaf" and notes.hears_notice():
        if way == "saves":
            notes.note_saved()
        sys.exit(3)
    notes.note(step)
    time.sleep(0.05)
"""
"""A launcher with its only rank."""


def told(folder: Path, way: str, times: int = 1) -> tuple[int, float]:
    """Exit code of the attempt, and how many seconds after the signal it was there."""
    progress = folder / "progress"
    sign = Path(f"{progress}.up") if way == "young" else progress
    sent: list[float] = []

    def tell() -> None:
        until = time.monotonic() + 30
        while not (sign.exists() and (way == "young" or sign.stat().st_size)):
            assert time.monotonic() < until
            time.sleep(0.02)
        # The attempt looks for the first step from time to time.
        time.sleep(3 * run_job.LOOK_S)
        for _ in range(times):
            sent.append(time.monotonic())
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(0.3)

    attempt = Attempt(
        [sys.executable, "-c", JOB, str(progress), way],
        {**os.environ},
        progress,
        list,
        lambda step: None,
    )
    teller = threading.Thread(target=tell)
    teller.start()
    code = attempt.run()
    ended_at = time.monotonic()
    teller.join()
    assert attempt.told == signal.SIGTERM
    return code, ended_at - sent[0]


def test_a_job_that_saves_gives_the_documented_code(tmp_path: Path) -> None:
    assert told(tmp_path, "saves")[0] == EXIT_SAVED
    assert read_notice(notice_path(tmp_path / "progress")) == "saved"


def test_one_that_ends_without_a_save_gives_its_own(tmp_path: Path) -> None:
    assert told(tmp_path, "hears")[0] == 3
    assert told(tmp_path, "saves")[0] == EXIT_SAVED, "what was left of it is forgotten"


def test_a_deaf_one_is_told_by_its_launcher(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_job, "END_S", 1.0)
    code, seconds = told(tmp_path, "deaf")
    assert code == -signal.SIGTERM and 1.0 < seconds < 10.0


def test_a_second_signal_does_not_wait(tmp_path: Path) -> None:
    code, seconds = told(tmp_path, "deaf", times=2)
    assert code == -signal.SIGTERM and seconds < 10.0


def test_before_the_first_step_there_is_nothing_to_save(tmp_path: Path) -> None:
    code, seconds = told(tmp_path, "young")
    assert code == -signal.SIGTERM and seconds < 10.0


def test_nobody_asks_a_job_of_its_own(tmp_path: Path) -> None:
    assert not ProgressNotes(None).hears_notice()
    ProgressNotes(None).note_saved()
    notes = ProgressNotes(str(tmp_path / "progress"))
    notes.note_saved()
    assert read_notice(notice_path(tmp_path / "progress")) is None
    notes.close()
