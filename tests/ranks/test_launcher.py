"""A job as a user starts it: with the `deepspeed` command and a JSON that names the plan."""

from __future__ import annotations

import sys
from pathlib import Path

from tests.ranks.engine_cases import assert_close
from tests.ranks.launched import (
    JOB,
    environment,
    free_port,
    reference_losses,
    results_in,
    run_to_end,
    write_inputs,
)


def test_the_launcher_trains_the_plan_of_the_config(tmp_path: Path) -> None:
    arguments = write_inputs(tmp_path)
    launcher = [str(Path(sys.executable).with_name("deepspeed")), "--num_accelerators", "2"]
    command = [*launcher, "--master_port", free_port(), str(JOB), *arguments]
    run_to_end([(command, environment())], tmp_path, timeout_s=120)
    first, second = (result["ours"] for result in results_in(tmp_path))
    assert first["engine"] == second["engine"] == "ZorseEngine"
    assert_close(first["losses"], reference_losses(), "losses")
    assert first["losses"] == second["losses"]
    assert set(first["weights"]) == {"0.weight", "0.bias"}
    assert len(second["weights"]) == 6
