"""Masters are the truth: bf16, fp16 and float32 runs load what the others saved, bit for bit."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.inprocess.checkpoint_cases import PLANS, SAVED_AT, STEPS, differ, job, loading, saving
from tests.inprocess.exact_cases import CountedTokenSum
from tests.inprocess.local_job import Job, Outcome, Rank, Values, run
from zorse_ds.core.plan import Plan
from zorse_ds.runtime.optimizer import ShardedOptimizer


class FloatTokenSum(CountedTokenSum):
    """The loss itself in float32."""

    def __call__(self, logits: Tensor, labels: Tensor) -> tuple[Tensor, int]:
        return super().__call__(logits.float(), labels)


def job_in(dtype: torch.dtype | None) -> Job:
    """The job with parameters cast to `dtype`."""
    return job(loss_fn=FloatTokenSum(), dtype=dtype)


def with_dtypes(plan: Plan, *dtypes: str | None) -> Plan:
    """The plan with a dtype of its own for each group, in turns."""
    data = plan.to_dict()
    for group, dtype in zip(data["groups"], itertools.cycle(dtypes), strict=False):
        if dtype is not None:
            group["dtype"] = dtype
    return Plan.from_dict(data)


MIXED = with_dtypes(PLANS["1-3"], "bfloat16", "float32")
RUNS: dict[str, tuple[torch.dtype | None, Plan]] = {
    "float32": (None, PLANS["abab"]),
    "bf16": (torch.bfloat16, PLANS["2-1-2"]),
    "bf16, offloaded": (torch.bfloat16, PLANS["abaca"]),
    "fp16": (torch.float16, PLANS["3-1"]),
    "mixed groups": (None, MIXED),
}


class Masters:
    """An `after` hook that joins the masters of all ranks."""

    def __init__(self) -> None:
        self.parts: Values = {}

    def __call__(self, rank: Rank, optimizer: ShardedOptimizer) -> None:
        self.parts.update(rank.masters(optimizer))

    def whole(self) -> Values:
        """Flat masters by name, in float32."""
        found: dict[str, list[tuple[int, Tensor]]] = {}
        for key, part in self.parts.items():
            name, _, window = key.rpartition("[")
            found.setdefault(name, []).append((int(window.split(":")[0]), part))
        joined: Values = {}
        for name, parts in found.items():
            values: list[Tensor] = []
            for start, part in sorted(parts, key=lambda item: item[0]):
                if start == sum(map(len, values)):
                    values.append(part)
            joined[name] = torch.cat(values)
        return joined


def both(*hooks: Callable[..., None]) -> Callable[[Rank, ShardedOptimizer], None]:
    """One hook after the other."""

    def hook(rank: Rank, optimizer: ShardedOptimizer) -> None:
        for each in hooks:
            each(rank, optimizer)

    return hook


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Values]]:
    """A checkpoint of each run, and the masters at that moment."""
    root, masters = tmp_path_factory.mktemp("checkpoints"), {}
    for name, (dtype, plan) in RUNS.items():
        after = Masters()
        run(job_in(dtype), plan, STEPS[:SAVED_AT], after=both(saving(root / name), after))
        masters[name] = after.whole()
    return root, masters


@pytest.mark.parametrize("loaded_by", RUNS)
@pytest.mark.parametrize("saved_by", RUNS)
def test_masters_survive_every_change_of_precision(
    saved_by: str, loaded_by: str, saved: tuple[Path, dict[str, Values]], tmp_path: Path
) -> None:
    root, masters = saved
    dtype, plan = RUNS[loaded_by]
    again, back = Masters(), Masters()
    hook = both(loading(root / saved_by), again, saving(tmp_path))
    run(job_in(dtype), plan, [], before=hook)
    first_dtype, first_plan = RUNS[saved_by]
    run(job_in(first_dtype), first_plan, [], before=both(loading(tmp_path), back))
    for found in (again.whole(), back.whole()):
        assert found.keys() == masters[saved_by].keys()
        for name, master in masters[saved_by].items():
            assert torch.equal(found[name], master), name


@pytest.mark.parametrize("name", RUNS)
def test_the_same_plan_goes_on_bit_for_bit(
    name: str, saved: tuple[Path, dict[str, Values]]
) -> None:
    dtype, plan = RUNS[name]
    expected: Outcome = run(job_in(dtype), plan, STEPS)
    resumed = run(job_in(dtype), plan, STEPS[SAVED_AT:], before=loading(saved[0] / name))
    assert resumed.losses == expected.losses[SAVED_AT:]
    for key, value in expected.values[-1].items():
        assert torch.equal(resumed.values[-1][key], value), key


@pytest.mark.parametrize("loaded_by", RUNS)
def test_a_run_in_another_precision_is_close(
    loaded_by: str, saved: tuple[Path, dict[str, Values]]
) -> None:
    """Parameters take the loaded masters' values, not those the run began with."""
    dtype, plan = RUNS[loaded_by]
    expected = run(job_in(None), PLANS["abab"], STEPS)
    resumed = run(job_in(dtype), plan, STEPS[SAVED_AT:], before=loading(saved[0] / "float32"))
    assert differ(resumed.losses, expected.losses[SAVED_AT:]) < 2e-2
    fresh: Any = run(job_in(dtype), plan, STEPS[SAVED_AT:])
    assert differ(fresh.losses, expected.losses[SAVED_AT:]) > 3e-2
