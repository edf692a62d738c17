"""SIGTERM to `zorse run`: the job saves at its step's end, whatever its launcher would do."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.ranks.checkpoint_jobs import PLANS, world_size
from tests.ranks.harness import run_ranks
from tests.ranks.launched import environment, free_port
from tests.ranks.restarted_job import STEPS
from tests.ranks.test_run import JOB, PLAN, losses_in, uninterrupted
from tests.ranks.two_hosts import ranks_of
from zorse_ds.core.handover import EXIT_SAVED

TOLD_AFTER = 3
LAUNCHERS = {
    "deepspeed": ["deepspeed", "--num_accelerators", "3"],
    "torchrun": ["torchrun", "--nproc_per_node", "3"],
}


def command(launcher: str, port: str, pause_s: float) -> list[str]:
    program, *options = LAUNCHERS[launcher]
    words = [sys.executable, "-m", "zorse_ds.cli", "run", "--plan", f"{PLAN}.json", "--json", "--"]
    words += [str(Path(sys.executable).with_name(program)), *options, "--master_port", port]
    return [*words, str(JOB), ".", "--pause", str(pause_s)]


def ended(folder: Path, launcher: str, *, is_told: bool) -> tuple[int, dict[str, Any], str]:
    """Exit code, what it printed for machines, and all else; nothing is left of the job."""
    (folder / f"{PLAN}.json").write_text(json.dumps(PLANS[PLAN]))
    losses, port = folder / "losses", free_port()
    process = subprocess.Popen(
        command(launcher, port, 0.4 if is_told else 0.0),
        cwd=folder,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        if is_told:
            until = time.monotonic() + 120
            while not losses.exists() or losses.read_text().count("\n") < TOLD_AFTER:
                assert process.poll() is None and time.monotonic() < until
                time.sleep(0.02)
            process.send_signal(signal.SIGTERM)
        text = process.communicate(timeout=150)[0]
    finally:
        process.kill()
        process.wait()
    assert not list(ranks_of(port))
    told = next(line for line in reversed(text.splitlines()) if line.startswith("{"))
    return process.returncode, json.loads(told), text


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_it_saves_ends_and_goes_on_when_started_again(launcher: str, tmp_path: Path) -> None:
    whole = run_ranks(world_size(PLAN), uninterrupted, PLAN)[0]
    code, told, text = ended(tmp_path, launcher, is_told=True)
    assert code == told["exit_code"] == EXIT_SAVED, text
    (attempt,) = told["attempts"]
    last = attempt["last_step"]
    assert TOLD_AFTER <= last < STEPS
    assert f"zorse: SIGTERM; saved ckpt/global_step{last} after step {last} in" in text
    assert (tmp_path / "ckpt" / "latest").read_text().strip() == f"global_step{last}"
    code, told, text = ended(tmp_path, launcher, is_told=False)
    assert code == 0 and told["attempts"][0]["first_step"] == last + 1, text
    # The script never sees the loss of the step after which all ranks end.
    found = losses_in(tmp_path, but_for=last)
    assert found == {step: loss for step, loss in enumerate(whole, 1) if step in found}
