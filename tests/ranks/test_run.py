"""`zorse run`: a job that lost a rank goes on, under a smaller plan where fewer GPUs answer."""

from __future__ import annotations

import json
import math
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.ranks.checkpoint_jobs import PLANS, make_engine, train, world_size
from tests.ranks.harness import run_ranks
from tests.ranks.launched import environment, free_port
from tests.ranks.restarted_job import STEPS

JOB = Path(__file__).with_name("restarted_job.py")
PLAN, SMALLER = "3 ranks", "2 ranks"
KILLED_IN = 4
KILL = ["--kill", str(KILLED_IN), "1"]


def uninterrupted(rank: int, name: str) -> list[float]:
    engine = make_engine(name)
    losses = train(engine, STEPS).losses
    engine.destroy()
    return losses


def zorse_run(folder: Path, *words: str) -> tuple[dict[str, Any], str]:
    """What it printed for machines, and all else."""
    for name in PLANS:
        (folder / f"{name}.json").write_text(json.dumps(PLANS[name]))
    ended = subprocess.run(
        [sys.executable, "-m", "zorse_ds.cli", "run", "--plan", f"{PLAN}.json", "--json", *words],
        cwd=folder,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    *_, last = ended.stdout.splitlines()
    return json.loads(last), ended.stdout + ended.stderr


def losses_in(folder: Path, but_for: int | None = None) -> dict[int, float]:
    lines = [line.split() for line in (folder / "losses").read_text().splitlines()]
    steps = {int(line[0]) for line in lines}
    assert sorted(steps | {but_for or 1}) == list(range(1, STEPS + 1))
    return {int(line[0]): float.fromhex(line[1]) for line in lines}


def deepspeed(number: int) -> list[str]:
    program = str(Path(sys.executable).with_name("deepspeed"))
    return [program, "--num_accelerators", str(number), "--master_port", free_port()]


def test_fewer_gpus_answer_so_a_smaller_plan_goes_on(tmp_path: Path) -> None:
    whole = run_ranks(world_size(PLAN), uninterrupted, PLAN)[0]
    options = ["--fallback-plan", "1 rank.json", "--fallback-plan", f"{SMALLER}.json"]
    # The third GPU, say, fell off the bus.
    told, text = zorse_run(
        tmp_path, *options, "--check", "echo 0 1", "--", *deepspeed(3), str(JOB), ".", *KILL
    )
    first, second = told["attempts"]
    assert told["exit_code"] == 0 and first["exit_code"] != 0, text
    assert (first["ranks"], second["ranks"]) == (3, 2)
    assert (first["last_step"], second["first_step"]) == (KILLED_IN - 1, KILLED_IN), text
    assert "rank 1 (stage 0, CPU of" in text and "2 of 3 GPUs answer" in text
    told_s = re.search(rf"step {KILLED_IN} was made ([\d.]+) s after step {KILLED_IN - 1}", text)
    assert told_s and math.isclose(float(told_s[1]), second["seconds_lost"], abs_tol=0.1)
    losses = losses_in(tmp_path)
    for step, expected in enumerate(whole, start=1):
        tolerance = 0.0 if step < KILLED_IN else 1e-6
        assert math.isclose(losses[step], expected, rel_tol=tolerance), f"step {step}"


def test_all_answer_so_torchrun_starts_the_same_plan(tmp_path: Path) -> None:
    whole = run_ranks(world_size(PLAN), uninterrupted, PLAN)[0]
    launcher = [str(Path(sys.executable).with_name("torchrun")), "--nproc_per_node", "3"]
    port = ["--master_port", free_port()]
    told, text = zorse_run(tmp_path, "--", *launcher, *port, str(JOB), ".", *KILL)
    assert told["exit_code"] == 0, text
    assert [attempt["ranks"] for attempt in told["attempts"]] == [3, 3]
    assert list(losses_in(tmp_path).values()) == whole


def test_what_fails_before_its_first_step_is_not_repeated(tmp_path: Path) -> None:
    told, text = zorse_run(tmp_path, "--", *deepspeed(3), str(JOB), "--no-such-option")
    assert told["exit_code"] != 0 and len(told["attempts"]) == 1, text
    assert "zorse: no step was made and all is as before, so it is not started again" in text
