"""One training run, killed again and again: where it was hit, and whether it went on rightly."""

from __future__ import annotations

import math
import os
import random
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.chaos import job
from tests.chaos.job import SAVED_EVERY, STEPS, trail_path
from tests.ranks.checkpoint_jobs import PLANS, world_size
from tests.ranks.scripts import Ended, outcome, start
from zorse_ds import Plan
from zorse_ds.core.checkpoint.folder import CheckpointFolder

START_S, GONE_S = 120.0, 20.0
ROOM = STEPS // 2
"""Steps from which on nobody is killed, so that the last attempt has something to show."""
LOSS_TOLERANCE = 1e-6
"""Relative, in float32, once a run has had another plan; until then nothing."""

Trail = dict[int, tuple[float, tuple[int, ...]]]
"""Loss and sorted sample ids of each step."""


@dataclass(frozen=True)
class Kill:
    """What became of one killed attempt."""

    plan: str
    ranks: tuple[int, ...]
    while_saving: bool
    """A checkpoint was being written."""
    steps_done: int
    resumed_at: int
    """The step of the checkpoint that the next attempt goes on from."""
    gone_after_s: float


def read_trail(folder: Path, attempt: int, plan: str) -> Trail:
    """What the ranks of the first stage read, and the first rank's losses."""
    ranks = Plan.from_dict(PLANS[plan]).group_of_stage(0).ranks
    trail: Trail = {}
    lines = [_whole_lines(trail_path(folder, attempt, rank)) for rank in ranks]
    for parts in zip(*lines, strict=False):
        ids = {int(i) for _, _, read in parts for i in read.split(",") if i}
        trail[int(parts[0][0])] = float.fromhex(parts[0][1]), tuple(sorted(ids))
    return trail


def _whole_lines(path: Path) -> list[list[str]]:
    if not path.exists():
        return []
    *lines, _ = path.read_text().split("\n")
    return [line.split(" ") for line in lines]


def uninterrupted(folder: Path, plan: str) -> Trail:
    """The run that all others must equal."""
    folder.mkdir(parents=True)
    _to_the_end(folder, 0, plan, "sync")
    return read_trail(folder, 0, plan)


def killed_run(
    folder: Path, plans: Sequence[str], mode: str, num_kills: int, seed: int
) -> tuple[list[Kill], list[tuple[str, Trail]]]:
    """A run under the plans in turn, killed `num_kills` times; all trails, with their plans."""
    folder.mkdir(parents=True)
    chance = random.Random(seed)
    kills: list[Kill] = []
    trails = []
    for attempt in range(num_kills):
        plan = plans[attempt % len(plans)]
        kills.append(_killed_attempt(folder, attempt, plan, mode, chance, num_kills))
        trails.append((plan, read_trail(folder, attempt, plan)))
    plan = plans[num_kills % len(plans)]
    _to_the_end(folder, num_kills, plan, mode)
    return kills, [*trails, (plan, read_trail(folder, num_kills, plan))]


def check(
    kills: Sequence[Kill], trails: Sequence[tuple[str, Trail]], whole: Trail, plan: str
) -> None:
    """Every step of every attempt is that of `whole`, which ran under `plan`; little was lost."""
    for number, (own_plan, trail) in enumerate(trails):
        is_same = all(each == plan for each, _ in trails[: number + 1])
        tolerance = 0.0 if is_same else LOSS_TOLERANCE
        assert trail, f"attempt {number} made no step"
        first = kills[number - 1].resumed_at + 1 if number else 1
        assert list(trail) == list(range(first, first + len(trail))), f"attempt {number}"
        for step, (loss, ids) in trail.items():
            expected_loss, expected_ids = whole[step]
            assert ids == expected_ids, f"attempt {number} under {own_plan} step {step}: {ids}"
            assert math.isclose(loss, expected_loss, rel_tol=tolerance), (
                f"attempt {number} under {own_plan} step {step}: {loss}, expected {expected_loss}"
            )
    assert max(trails[-1][1]) == STEPS
    for kill in kills:
        # The one that was being written, and the step that was being made.
        assert kill.steps_done - kill.resumed_at <= 2 * SAVED_EVERY, kill
        assert kill.gone_after_s < GONE_S, kill


def _to_the_end(folder: Path, attempt: int, plan: str, mode: str) -> None:
    ranks = start(job.main, [str(folder), str(attempt), plan, mode], world_size(plan), folder)
    ended = outcome(ranks, folder, timeout_s=START_S)
    assert [each.code for each in ended] == [0] * len(ended), "\n".join(e.output for e in ended)


def _killed_attempt(
    folder: Path, attempt: int, plan: str, mode: str, chance: random.Random, num_kills: int
) -> Kill:
    """Start, wait for a random instant, kill, wait until all have gone."""
    size = world_size(plan)
    begun_at = _latest_step(folder)
    target = begun_at + chance.randint(1, max(1, (STEPS - ROOM // 2) // num_kills))
    victims = tuple(chance.sample(range(size), chance.choice((1, 1, size))))
    in_save, delay_s = chance.random() < 0.5, chance.uniform(0.0, 0.02)
    ranks = start(job.main, [str(folder), str(attempt), plan, mode], size, folder)
    _wait_for_instant(folder, attempt, target, in_save)
    time.sleep(delay_s)
    while_saving = any((folder / "ckpt").glob(".*.incomplete"))
    killed_at = time.time()
    for rank in victims:
        os.kill(ranks[rank].pid, signal.SIGKILL)
    ended: Sequence[Ended] = outcome(ranks, folder, timeout_s=60)
    assert all(each.code not in (None, 0) for each in ended), [each.code for each in ended]
    return Kill(
        plan=plan,
        ranks=victims,
        while_saving=while_saving,
        steps_done=_steps_done(folder, attempt) or begun_at,
        resumed_at=_latest_step(folder),
        gone_after_s=max(each.ended_at for each in ended) - killed_at,
    )


def _wait_for_instant(folder: Path, attempt: int, target: int, in_save: bool) -> None:
    """Until `target` steps are done and, if so wanted, a checkpoint is being written."""
    until = time.monotonic() + START_S
    while _steps_done(folder, attempt) < target:
        assert time.monotonic() < until, f"attempt {attempt} did not reach step {target}"
        time.sleep(0.002)
    while in_save and not any((folder / "ckpt").glob(".*.incomplete")):
        assert time.monotonic() < until, f"attempt {attempt} saved nothing after step {target}"
        time.sleep(0.0005)


def _steps_done(folder: Path, attempt: int) -> int:
    lines = _whole_lines(trail_path(folder, attempt, 0))
    return int(lines[-1][0]) if lines else 0


def _latest_step(folder: Path) -> int:
    tag = CheckpointFolder(folder / "ckpt").latest()
    return 0 if tag is None else int(tag.removeprefix("global_step"))
