"""What a rank measures of its step: passes without waiting, memory of the host."""

from __future__ import annotations

import os
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from zorse_ds.runtime import host_room
from zorse_ds.runtime.stopwatch import HostStopwatch, TimedRunner

MIB = 2**20


class Slow(torch.autograd.Function):
    """The identity, which takes its time both ways."""

    @staticmethod
    def forward(ctx: Any, value: Tensor) -> Tensor:
        time.sleep(0.02)
        return value.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        time.sleep(0.05)
        return grads[0]


def test_passes_are_counted_by_stage_and_waiting_is_not() -> None:
    watch = HostStopwatch()
    runners = [TimedRunner(stage, watch, Slow.apply, nullcontext) for stage in (2, 5)]
    for _ in range(2):
        watch.begin()
        for runner in runners:
            for micro_batch in range(1 + (runner.stage == 5)):
                value = torch.ones(3, requires_grad=True)
                runner.enter_first(micro_batch, 3, 0)
                output = runner.forward(micro_batch, value)
                time.sleep(0.1)
                runner.backward_from_loss(micro_batch, output.sum())
                runner.release(micro_batch)
        found = watch.read()
    expected = {(2, "forward"): 0.02, (2, "backward"): 0.05}
    expected |= {(5, "forward"): 0.04, (5, "backward"): 0.1}
    assert found.passes_s.keys() == expected.keys()
    for at, seconds in expected.items():
        assert seconds <= found.passes_s[at] < 3 * seconds + 0.05
    assert found.busy_s == sum(found.passes_s.values())
    assert found.step_s >= found.busy_s + 0.3


def test_a_process_grows_by_what_it_holds() -> None:
    before = host_room.resident_bytes()
    held = torch.ones(128 * MIB // 4)
    assert 100 * MIB < host_room.resident_bytes() - before < 256 * MIB
    assert host_room.peak_resident_bytes() >= before + 100 * MIB
    del held
    whole = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    free = host_room.free_bytes()
    assert free is not None and 0 <= free < whole
    ours, shared = HostStopwatch().read().room_bytes, HostStopwatch(4).read().room_bytes
    assert ours is not None and shared is not None and shared < 0.5 * ours + 64 * MIB


@pytest.mark.parametrize(("limit", "left"), [("1000\n", 400.0), ("500\n", 0.0), ("max\n", None)])
def test_a_container_has_its_own_limit(
    limit: str, left: float | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host_room, "_CGROUP", tmp_path)
    bare = host_room.free_bytes()
    (tmp_path / "memory.max").write_text(limit)
    (tmp_path / "memory.current").write_text("600\n")
    found = host_room.free_bytes()
    assert bare is not None and found is not None
    assert found == left if left is not None else found > 1000
