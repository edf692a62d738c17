"""The contest with stock DeepSpeed: its formulas are lower bounds, and who does not fit is told."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks import vs_deepspeed
from benchmarks.vs_deepspeed_plans import effort_of, planned
from benchmarks.vs_deepspeed_runs import (
    Tried,
    measured,
    plan_runner,
    stock_runner,
    summary,
    try_stock,
)
from benchmarks.vs_deepspeed_stock import Stock, configurations, least_s
from zorse_ds.core.cluster import Cluster
from zorse_ds.core.model import ModelShape
from zorse_ds.cost.compute import compute_times
from zorse_ds.cost.layer_times import timer_of
from zorse_ds.cost.setting import Setting
from zorse_ds.ranges import Range
from zorse_ds.rehearsal.clock import Pace
from zorse_ds.rehearsal.pool import VirtualMemoryError

BATCH = 8
PAIR = {"gpu_type": "A10G", "num_gpus": 2, "intra_gb_per_s": 16, "nic_gb_per_s": 6}
CLUSTER = Cluster.from_dict({"nodes": [PAIR]})
MODEL = ModelShape.llama("small", 4, 1024, 2816, 16)
SETTING = Setting(CLUSTER, MODEL, timer_of(None), 512, dtype="float16", may_offload=False)


def quiet(what: str) -> None:
    """Nobody listens."""


def test_no_step_of_stock_beats_its_formula_and_ours_is_measured_beside() -> None:
    tried = try_stock(SETTING, (), BATCH, 2, "held", quiet, quiet)
    assert len(tried.seconds) + len(tried.out_of_memory) + tried.not_run == sum(
        1 for _ in configurations(SETTING, BATCH)
    )
    assert 1 <= len(tried.seconds) <= 2
    for stock, seconds in tried.seconds.items():
        assert least_s(stock, SETTING) <= seconds * (1 + 1e-9), stock.name
    plan = planned(SETTING, BATCH, effort_of(1), quiet)
    runs, failed = measured({"ours": plan_runner(plan, SETTING)}, Pace(0), 2, quiet)
    assert not failed
    first, again = summary(runs["ours"], BATCH * 512)["seconds"]
    assert first == again


def test_stock_recomputes_for_more_time() -> None:
    tried = Tried(SETTING, (), "held")
    seconds = []
    for recompute in (False, True):
        figures = stock_runner(Stock(0, 2, 1, 2, 2, recompute), tried)(Pace(0), quiet)
        seconds.append(max(own.virtual_s for own in figures))
    blocks, layers = Range(1, 5), Range(0, 6)
    sums = compute_times(SETTING).sums("A10G", "float16", 1)
    again = 2 * sums.forward_s(blocks)
    assert seconds[1] - seconds[0] == pytest.approx(again, rel=0.02)
    assert seconds[0] > 2 * (sums.forward_s(layers) + sums.backward_s(layers))


def test_who_runs_out_of_memory_is_a_row(capsys: pytest.CaptureFixture[str]) -> None:
    def full(pace: Pace, tell: Any) -> Any:
        raise VirtualMemoryError("no room")

    runs, failed = measured({vs_deepspeed.OURS: full}, Pace(0), 2, quiet)
    facts = vs_deepspeed._told_runs(runs, 1)
    assert (facts, failed) == ({}, {vs_deepspeed.OURS: "no room"})
    vs_deepspeed.show(
        {"ceiling_tokens_per_s": 1.0, "runs": facts, "stock": [], "out_of_memory": failed}
    )
    said = capsys.readouterr().out
    assert "zorse_ds" in said and "out of memory" in said and "no room" in said
