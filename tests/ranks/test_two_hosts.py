"""Failures over two hosts, by DeepSpeed's multi-node launcher; losing one under `zorse run`."""

from __future__ import annotations

import json
import math
import re
import sys
import time
from pathlib import Path

import pytest

from tests.ranks import failing_job
from tests.ranks.checkpoint_jobs import PLANS, world_size
from tests.ranks.failing_job import FAILS_AT, TIMEOUT_S
from tests.ranks.harness import run_ranks
from tests.ranks.launched import free_port
from tests.ranks.restarted_job import STEPS
from tests.ranks.test_run import JOB, PLAN, SMALLER, losses_in, uninterrupted
from tests.ranks.two_hosts import FIRST_ADDRESS, lose, run_beside, wait_until_gone, why_not
from zorse_ds.core.checkpoint.folder import CheckpointFolder

pytestmark = pytest.mark.skipif(bool(why_not()), reason=why_not() or "there are two hosts")
ALL_GONE_S = 20.0
HANGING_GONE_S = TIMEOUT_S + 5.0
HOST_OF = ("h0", "h0", "h1", "h1")
STAGES = (0, 0, 1, 2)


def launcher(folder: Path, port: str) -> list[str]:
    program = str(Path(sys.executable).with_name("deepspeed"))
    address = ["--master_addr", FIRST_ADDRESS, "--master_port", port]
    return [program, "--hostfile", str(folder / "hosts" / "hostfile"), *address]


@pytest.mark.parametrize(
    ("way", "rank"), [("layer", 0), ("loss", 3), ("kill", 0), ("kill", 2), ("stop", 0), ("stop", 3)]
)
def test_a_failure_on_one_host_ends_the_ranks_of_both(way: str, rank: int, tmp_path: Path) -> None:
    port = free_port()
    script = ["--no_local_rank", failing_job.__file__, str(tmp_path), way, str(rank)]
    gone: list[float] = []

    def watch() -> None:
        late_s = time.time() - (tmp_path / "failed").stat().st_mtime
        gone.append(late_s + wait_until_gone(port, timeout_s=60))

    code, text = run_beside(
        tmp_path,
        "2,2",
        [*launcher(tmp_path, port), *script],
        until=(tmp_path / "failed").exists,
        then=watch,
        timeout_s=120,
    )
    assert code != 0, text
    who = rf"rank {rank} \(stage {STAGES[rank]}, CPU of {HOST_OF[rank]}\)"
    said = {
        "layer": rf"{who} failed at .* of step {FAILS_AT}",
        "loss": rf"{who} failed at .* of step {FAILS_AT}",
        "kill": f"{who} is gone: its process ended without a word",
        "stop": f"{who} stopped answering: no progress for",
    }
    assert re.search(said[way], text), text
    assert text.count("Traceback (most recent call last)") == (way in ("layer", "loss")), text
    assert CheckpointFolder(tmp_path / "ckpt").latest() == f"global_step{FAILS_AT - 1}"
    assert gone[0] < (HANGING_GONE_S if way == "stop" else ALL_GONE_S), f"{gone[0]:.1f} s: {text}"


def test_losing_a_host_goes_on_with_the_other_under_a_new_plan(tmp_path: Path) -> None:
    whole = run_ranks(world_size(PLAN), uninterrupted, PLAN)[0]
    for name in (PLAN, SMALLER):
        (tmp_path / f"{name}.json").write_text(json.dumps(PLANS[name]))
    options = ["--plan", f"{PLAN}.json", "--fallback-plan", f"{SMALLER}.json", "--check"]
    run = [sys.executable, "-m", "zorse_ds.cli", "run", *options, "ssh {host} true", "--json"]
    losses, lost_in = tmp_path / "losses", 3
    code, text = run_beside(
        tmp_path,
        "2,1",
        [*run, "--", *launcher(tmp_path, free_port()), str(JOB), ".", "--pause", "0.5"],
        until=lambda: losses.exists() and losses.read_text().count("\n") >= lost_in,
        then=lambda: lose(tmp_path, "h1"),
        timeout_s=200,
    )
    assert code == 0, text
    told = json.loads(next(line for line in text.splitlines() if line.startswith("{")))
    first, second = told["attempts"]
    assert (first["ranks"], second["ranks"], first["lost_hosts"]) == (3, 2, ["h1"]), text
    assert second["first_step"] in (first["last_step"], first["last_step"] + 1)
    assert re.search(r"zorse: step \d+ was made [\d.]+ s after step \d+, the last before", text)
    assert second["seconds_lost"] > 0
    values = losses_in(tmp_path)
    for step in range(1, STEPS + 1):
        assert math.isclose(values[step], whole[step - 1], rel_tol=1e-6), f"step {step}"
