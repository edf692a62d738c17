"""The watch process: it loads the standard library alone, and knows the living from the dead."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from tests.unit.test_no_torch_import import loaded_by
from zorse_ds.runtime.watch_process import Duty, RankProcess
from zorse_ds.runtime.watch_verdict import Place

SLEEP = [sys.executable, "-S", "-c", "import time; time.sleep(60)"]


def place(pid: int) -> Place:
    return Place(0, (0,), "CPU", "here", pid, "here")


def soon(what: object) -> bool:
    until = time.monotonic() + 5.0
    while not what() and time.monotonic() < until:  # type: ignore[operator]
        time.sleep(0.01)
    return bool(what())  # type: ignore[operator]


def test_it_loads_nothing_but_the_standard_library() -> None:
    assert loaded_by("zorse_ds.runtime.watch_process", ("torch", "numpy", "pydantic")) == []


def test_a_stopped_process_is_alive_and_can_be_killed() -> None:
    with subprocess.Popen(SLEEP) as process:
        watched = RankProcess(place(process.pid))
        os.kill(process.pid, signal.SIGSTOP)
        assert watched.is_alive
        watched.kill()
        # Its parent has not asked for its exit code yet.
        assert soon(lambda: not watched.is_alive)
        assert process.wait() == -signal.SIGKILL


def test_another_process_of_the_same_number_is_left_alone() -> None:
    with subprocess.Popen(SLEEP) as process:
        watched = RankProcess(place(process.pid))
        watched._began = (watched._began or 0) - 1
        assert not watched.is_alive
        watched.kill()
        assert process.poll() is None
        process.kill()
    assert not RankProcess(place(process.pid)).is_alive


def test_it_goes_when_its_ranks_have_gone(tmp_path: Path) -> None:
    """Started as an engine starts it, for ranks that never say a word."""
    with subprocess.Popen(SLEEP) as process:
        code = (
            "from zorse_ds.runtime import watch_process as w\n"
            "from zorse_ds.runtime.watch_verdict import Place\n"
            f"place = Place(0, (0,), 'CPU', 'here', {process.pid}, 'here')\n"
            "print(w.start(w.Duty((place,), 'here', 'token', 5.0)))\n"
        )
        with (tmp_path / "errors").open("w") as errors:
            started = subprocess.run(
                [sys.executable, "-c", code],
                stdout=subprocess.PIPE,
                stderr=errors,
                timeout=60,
                check=True,
            )
        assert int(started.stdout) > 0
        assert writers(tmp_path / "errors") == 1
        process.kill()
        process.wait()
        assert soon(lambda: writers(tmp_path / "errors") == 0)


def writers(path: Path) -> int:
    """Processes whose standard error is this file."""
    count = 0
    for process in Path("/proc").glob("[0-9]*"):
        try:
            count += os.readlink(process / "fd" / "2") == str(path)
        except OSError:
            continue
    return count


def test_a_duty_travels_as_json() -> None:
    duty = Duty((place(1), place(2)), "here", "token", 4.0, ("host", 29500))
    assert Duty.from_json(duty.to_json()) == duty
