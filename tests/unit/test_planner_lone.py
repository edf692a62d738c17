"""Plain data parallelism over all GPUs, and planning without host memory."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.exhaustive_plans import peak_timer
from zorse_ds.core.cluster import Cluster
from zorse_ds.core.model import ModelShape
from zorse_ds.cost.memory import memory_of
from zorse_ds.cost.setting import Setting
from zorse_ds.errors import PlannerError
from zorse_ds.planner.effort import Effort
from zorse_ds.planner.lone import lone_drafts
from zorse_ds.planner.search import search

QUICK = Effort(events=100_000)


def setting_of(gpu_type: str, count: int, nic_gb_per_s: float, blocks: int) -> Setting:
    """GPUs of one type in nodes of their own, and a model that fills them."""
    node = {"gpu_type": gpu_type, "num_gpus": 1, "intra_gb_per_s": 16, "nic_gb_per_s": nic_gb_per_s}
    cluster = Cluster.from_dict({"nodes": [node] * count})
    model = ModelShape.llama("model", blocks, 2048, 5632, 16)
    return Setting(cluster, model, peak_timer, 1024, dtype="float16")


def test_equal_gpus_with_fast_links_sum_after_every_micro_batch() -> None:
    setting = setting_of("A10G", 4, 16.0, 24)
    best = search(setting, 64, QUICK).best
    (group,) = best.plan.groups
    assert (group.reduce_after, group.zero_level, len(best.plan.stages)) == ("micro_batch", 2, 1)
    assert all(own.fits for own in memory_of(best.plan, setting).values())
    largest = max(draft.groups[0].size for draft in lone_drafts(setting, 64))
    assert max(group.gpus[0].micro_batches) <= largest


def test_with_slow_links_they_do_not() -> None:
    best = search(setting_of("A10G", 4, 0.2, 24), 64, QUICK).best
    assert all(group.reduce_after == "step" for group in best.plan.groups)


def test_without_host_memory_nobody_offloads() -> None:
    setting = setting_of("T4", 2, 1.0, 40)
    best = search(setting, 8, QUICK).best
    assert any(group.offload != "none" for group in best.plan.groups)
    with pytest.raises(PlannerError):
        search(replace(setting, may_offload=False), 8, QUICK)
