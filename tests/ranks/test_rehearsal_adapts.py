"""A virtual GPU becomes slow: with adaptive shares the step is soon as short as it can be.

The best static plan is found without the adapter: the simulator tries every split of the group's
samples at the new speeds, and the real engine rehearses the best one.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.ranks.launched import environment
from tests.tired import MODEL, plan_of, setting_of, splits
from zorse_ds.core.plan import Plan
from zorse_ds.cost.setting import Setting
from zorse_ds.errors import RehearsalError
from zorse_ds.integrations.deepspeed.rehearsal_plan import PlanRun, RankRun, rehearse_rank
from zorse_ds.rehearsal.clock import Pace
from zorse_ds.rehearsal.processes import run_processes
from zorse_ds.rehearsal.slowdowns import Slowdown, factor_at
from zorse_ds.simulator.quick import quick_step_s

SLOW_AT, STEPS_AFTER = 4, 10


@dataclass(frozen=True)
class Case:
    """One A10G before a group of T4s, of which one becomes slow."""

    schedule: str
    stages: Sequence[tuple[str, int]]
    sizes: Sequence[int]
    """Of the micro-batches of each rank of the group."""
    counts: tuple[int, ...]
    slowdown: Slowdown
    zero_level: int = 2

    def plan(self, counts: Sequence[int]) -> Plan:
        return plan_of(self.schedule, self.stages, self.sizes, counts, self.zero_level)

    def setting(self) -> Setting:
        return setting_of(len(self.sizes))


CASES = {
    "1f1b": Case("1f1b", [("fast", 3), ("slow", 3)], (1, 1), (8, 8), Slowdown(2, 2.0, SLOW_AT)),
    "unlike-sizes": Case(
        "1f1b", [("fast", 3), ("slow", 3)], (2, 1, 1), (3, 5, 5), Slowdown(1, 2.0, SLOW_AT)
    ),
    "ministage": Case(
        "ministage",
        [("fast", 2), ("slow", 1), ("fast", 1), ("slow", 2)],
        (1, 1),
        (8, 8),
        Slowdown(1, 2.0, SLOW_AT),
        zero_level=3,
    ),
}


def rehearsed(case: Case, counts: Sequence[int], steps: int, **options: Any) -> list[RankRun]:
    run = PlanRun(case.plan(counts), case.setting(), Pace(0), steps, **options)
    return run_processes(1 + len(counts), partial(rehearse_rank, run))


def step_s(runs: Sequence[RankRun], step: int) -> float:
    return max(own.steps[step - 1].virtual_s for own in runs)


@pytest.mark.parametrize("name", CASES)
def test_soon_no_static_plan_is_much_better(name: str) -> None:
    case = CASES[name]
    setting = setting_of(len(case.sizes), case.slowdown.rank, case.slowdown.factor)
    simulated = {
        counts: quick_step_s(case.plan(counts), setting) for counts in splits(16, case.sizes)
    }
    assert len(simulated) >= 7
    best = min(simulated, key=lambda counts: simulated[counts])
    from_start = replace(case.slowdown, step=1)
    static = step_s(rehearsed(case, best, 2, slowdowns=(from_start,)), 2)
    assert static == pytest.approx(simulated[best], rel=0.05), "the best is what it seems"
    last = SLOW_AT + STEPS_AFTER - 1
    adapted = rehearsed(case, case.counts, last, slowdowns=(case.slowdown,), adapts=True)
    assert adapted[0].counts[: SLOW_AT - 1] == ((8, *case.counts),) * (SLOW_AT - 1)
    assert step_s(adapted, SLOW_AT) > 1.15 * static, "the case is not trivial"
    assert step_s(adapted, last) <= 1.10 * static, (adapted[0].counts[-1], best)


def test_shares_stay_where_speeds_do() -> None:
    runs = rehearsed(CASES["1f1b"], (8, 8), 9, adapts=True)
    assert set(runs[0].counts) == {(8, 8, 8)}
    bare = rehearsed(CASES["1f1b"], (8, 8), 9)
    assert runs[0].losses == bare[0].losses
    assert [step_s(runs, i) for i in range(1, 10)] == [step_s(bare, i) for i in range(1, 10)]


def test_the_command_tells_each_step(tmp_path: Path) -> None:
    case = CASES["1f1b"]
    case.plan(case.counts).save(tmp_path / "plan.json")
    case.setting().cluster.save(tmp_path / "cluster.json")
    MODEL.save(tmp_path / "shape.json")
    command = [sys.executable, "-m", "zorse_ds.cli", "rehearse", "plan.json", "--json"]
    command += ["--cluster", "cluster.json", "--shape", "shape.json", "--seq-len", "1024"]
    command += ["--dtype", "float16", "--time-scale", "0", "--steps", "4", "--slow", "2:2@3"]
    result = subprocess.run(
        command, cwd=tmp_path, env=environment(), capture_output=True, text=True, timeout=240,
        check=False,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    steps = json.loads(result.stdout)["steps"]
    assert [step["micro_batches"] for step in steps] == [[8, 8, 8]] * 4
    quick, slow = steps[1], steps[2]
    assert slow["step_s"] > 1.3 * quick["step_s"]
    assert slow["busy_s"][2] == pytest.approx(2 * quick["busy_s"][2], rel=0.01)
    assert slow["busy_s"][1] == pytest.approx(quick["busy_s"][1])


def test_what_slow_means() -> None:
    slow = [Slowdown.parse(text, 3, 9) for text in ("2:2@5", "2:1@7", "0:.5@1")]
    assert slow == [Slowdown(2, 2.0, 5), Slowdown(2, 1.0, 7), Slowdown(0, 0.5, 1)]
    assert [factor_at(slow, 2, step) for step in (4, 5, 6, 7)] == [1.0, 2.0, 2.0, 1.0]
    assert factor_at(slow, 0, 1) == 0.5 and factor_at(slow, 1, 9) == 1.0
    for text, expected in {
        "2:2": "expected RANK:FACTOR@STEP",
        "3:2@1": "names rank 3; expected one of 0 to 2",
        "1:2@10": "begins with step 10; expected one of the steps 1 to 9",
        "1:0@1": "has factor 0; expected one from 0.01 to 100",
    }.items():
        with pytest.raises(RehearsalError, match=expected):
            Slowdown.parse(text, 3, 9)
