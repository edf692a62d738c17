"""Runs commands beside two network namespaces, which `launch/two_hosts.sh` makes and takes down."""

from __future__ import annotations

import functools
import re
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from tests.ranks.launched import ROOT, environment

SCRIPT = str(ROOT / "launch" / "two_hosts.sh")
FIRST_ADDRESS = "10.77.0.1"


@functools.cache
def why_not() -> str:
    """Why there can be no two hosts here; empty when there can."""
    try:
        tried = subprocess.run(
            ["bash", SCRIPT, "--", "ssh", "h1", "hostname"],
            capture_output=True,
            text=True,
            timeout=30,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as problem:
        return f"no network namespaces: {problem}"
    if tried.returncode == 0 and tried.stdout.strip() == "h1":
        return ""
    said = (tried.stderr or tried.stdout).strip().splitlines()
    return f"no network namespaces: {said[-1] if said else tried.returncode}"


def run_beside(
    folder: Path,
    slots: str,
    command: Sequence[str],
    until: Callable[[], bool],
    then: Callable[[], None],
    timeout_s: float,
) -> tuple[int, str]:
    """Exit code and output of the command; `then` is called once `until` is true."""
    words = ["bash", SCRIPT, "--slots", slots, "--state", str(folder / "hosts"), "--", *command]
    with (folder / "output").open("w") as output:
        process = subprocess.Popen(
            words,
            cwd=folder,
            env=environment(),
            stdout=output,
            stderr=subprocess.STDOUT,
        )
        try:
            _wait(lambda: until() or process.poll() is not None, timeout_s)
            then()
            code = process.wait(timeout=timeout_s)
        finally:
            process.terminate()
            process.wait(timeout=60)
    return code, (folder / "output").read_text()


def lose(folder: Path, host: str) -> None:
    """All at once: the wire is cut, the processes end."""
    subprocess.run(["bash", SCRIPT, "lose", str(folder / "hosts"), host], check=True, timeout=30)


def wait_until_gone(port: str, timeout_s: float) -> float:
    """Seconds until no rank with this master port is left, and nothing that one started."""
    begun = time.monotonic()
    _wait(lambda: not any(ranks_of(port)), timeout_s)
    return time.monotonic() - begun


def ranks_of(port: str) -> Iterator[str]:
    """Command lines of the ranks of a job, and of what they started."""
    wanted = f"MASTER_PORT={port}".encode()
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            words = (process / "environ").read_bytes().split(b"\0")
            if wanted in words and any(re.match(rb"RANK=\d", word) for word in words):
                yield (process / "cmdline").read_bytes().replace(b"\0", b" ").decode()


def _wait(what: Callable[[], bool], timeout_s: float) -> None:
    until = time.monotonic() + timeout_s
    while not what():
        assert time.monotonic() < until, f"nothing happened in {timeout_s:g} s"
        time.sleep(0.05)
