"""Starting the ranks of `zorse probe` through DeepSpeed's launcher, and reading what rank 0 found.

The result comes back as lines of its output: rank 0 may be on another host, whose files are out of
reach, and launchers put the host's name before each line.
"""

import json
import re
import subprocess
import sys
from collections import deque
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from zorse_ds.core.hostfile import check_slots
from zorse_ds.errors import WorldError

PROGRESS = "zorse probe: "
_LINE = re.compile(r"zorse-probed (\d+)/(\d+) (.*)")
_LINE_CHARACTERS = 1000
_KEPT_LINES = 5
"""Of the launcher's output, shown when it fails."""


def print_in_lines(text: str) -> None:
    """Print `text` as numbered lines that `launched_probe` finds among others."""
    starts = range(0, len(text), _LINE_CHARACTERS)
    for number, start in enumerate(starts, start=1):
        piece = text[start : start + _LINE_CHARACTERS]
        print(f"zorse-probed {number}/{len(starts)} {piece}", flush=True)


def launched_probe(hostfile: Path | None, num_ranks: int | None) -> dict[str, Any]:
    """What the ranks found that DeepSpeed's launcher started.

    Raises `ClusterError` for a hostfile with mistakes, `WorldError` when a rank failed.
    """
    if hostfile is not None:
        check_slots(hostfile)
    process = subprocess.Popen(
        _command(hostfile, num_ranks), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    assert process.stdout is not None
    try:
        text, others = _read(process.stdout)
        code = process.wait()
    finally:
        # Nothing to end when all went well; after Ctrl-C nobody else ends the launcher.
        process.terminate()
    if code != 0 or text is None:
        told = " | ".join(others) or "nothing"
        raise WorldError(f"the launcher of the ranks ended with exit code {code}; it wrote: {told}")
    found: dict[str, Any] = json.loads(text)
    return found


def _command(hostfile: Path | None, num_ranks: int | None) -> list[str]:
    command = [sys.executable, "-m", "deepspeed.launcher.runner", "--no_local_rank"]
    if hostfile is not None:
        command += ["--hostfile", str(hostfile)]
    else:
        command += ["--master_port", str(_free_port())]
    if num_ranks is not None:
        command += ["--num_accelerators", str(num_ranks)]
    return [*command, "--module", "zorse_ds.cli", "probe", "--lines"]


def _free_port() -> int:
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _read(lines: Iterable[str]) -> tuple[str | None, deque[str]]:
    """The text that was printed in lines, or None, and the last other lines. Shows progress."""
    pieces: dict[int, str] = {}
    expected = -1
    others: deque[str] = deque(maxlen=_KEPT_LINES)
    for line in lines:
        match = _LINE.search(line)
        if match:
            pieces[int(match[1])] = match[3]
            expected = int(match[2])
        elif PROGRESS in line:
            print(line[line.index(PROGRESS) :], end="", file=sys.stderr, flush=True)
        elif line.strip():
            others.append(line.strip())
    whole = len(pieces) == expected
    return ("".join(pieces[i] for i in sorted(pieces)) if whole else None), others
