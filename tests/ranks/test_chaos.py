"""The short version of `python -m tests.chaos`: three kills, in both ways of saving."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.chaos.series import check, killed_run, uninterrupted

PLAN = "3 ranks"


@pytest.mark.parametrize(
    ("mode", "plans", "num_kills"),
    [("sync", (PLAN, "2 ranks"), 1), ("async", (PLAN,), 2)],
    ids=["sync-seed5", "async-seed5"],
)
def test_a_run_that_is_killed_goes_on_as_if_nothing_had_happened(
    mode: str, plans: tuple[str, ...], num_kills: int, tmp_path: Path
) -> None:
    whole = uninterrupted(tmp_path / "whole", PLAN)
    kills, trails = killed_run(tmp_path / "killed", plans, mode, num_kills, seed=5)
    check(kills, trails, whole, PLAN)
