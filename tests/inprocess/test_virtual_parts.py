"""The parts of a virtual GPU, each alone: miniature, pool, lanes, clock, timeline."""

from __future__ import annotations

import time

import pytest
import torch

from zorse_ds.core.cluster import Cluster
from zorse_ds.core.model import ModelShape
from zorse_ds.cost.layer_bytes import counted_bytes
from zorse_ds.cost.layer_times import timer_of
from zorse_ds.cost.setting import Setting
from zorse_ds.errors import RehearsalError
from zorse_ds.rehearsal.clock import Pace, VirtualClock, Work
from zorse_ds.rehearsal.figures import StepFigures, check_kept_up, timeline_of
from zorse_ds.rehearsal.miniature import Miniature
from zorse_ds.rehearsal.pool import VirtualMemoryError, VirtualPool
from zorse_ds.simulator.timeline import Timeline

CLUSTER = Cluster.from_dict(
    {
        "nodes": [
            {"gpu_type": "T4", "num_gpus": 2, "intra_gb_per_s": 10, "nic_gb_per_s": 1},
            {"gpu_type": "A10G", "num_gpus": 1, "intra_gb_per_s": 10, "nic_gb_per_s": 1},
        ]
    }
)
MODEL = ModelShape.llama("seven", 2, 4096, 11008, 32)
SETTING = Setting(CLUSTER, MODEL, timer_of(None), 1024, dtype="float16")


def built(dtype: str) -> list[torch.nn.Module]:
    real = torch.float32 if dtype == "float32" else torch.bfloat16
    return [kind(*made).to(real) for kind, made in Miniature(SETTING).layers(dtype)]  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_a_layer_in_small_has_its_share_of_parameters_and_activations(dtype: str) -> None:
    mini = Miniature(SETTING)
    embedding, block, *_ = built(dtype)
    for layer, kind in ((embedding, "embedding"), (block, "block")):
        numel = sum(parameter.numel() for parameter in layer.parameters())
        assert numel * mini.ratio == pytest.approx(MODEL.kinds[kind].num_params, rel=1e-3)
    size = 3
    hidden = embedding(torch.randint(1 << 20, (size, 2)))
    assert hidden.nbytes * mini.ratio == size * 1024 * 4096 * hidden.element_size()
    saved: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        if not isinstance(tensor, torch.nn.Parameter):
            saved[tensor.untyped_storage()._cdata] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        output = block(hidden.detach().requires_grad_())
    wanted = counted_bytes("block", MODEL.kinds["block"], dtype, 1024, size)  # type: ignore[arg-type]
    assert sum(saved.values()) * mini.ratio == pytest.approx(wanted.saved, rel=0.01)
    assert output.shape == hidden.shape


def test_gradients_of_a_layer_in_small_are_those_of_its_forward() -> None:
    torch.manual_seed(0)
    for index, layer in enumerate(built("float32")[:2]):
        layer.double()
        inputs = torch.randint(1 << 20, (2, 2)) if index == 0 else torch.randn(2, 512).double()
        weight = next(iter(layer.parameters()))
        layer(inputs).square().sum().backward()
        assert weight.grad is not None
        for element in (0, weight.numel() // 2, weight.numel() - 1):
            values = []
            for step in (1e-6, -1e-6):
                with torch.no_grad():
                    weight[element] += step
                    values.append(float(layer(inputs).square().sum()))
                    weight[element] -= step
            slope = (values[0] - values[1]) / 2e-6
            assert float(weight.grad[element]) == pytest.approx(slope, rel=1e-4, abs=1e-6)


def test_a_pool_says_who_has_no_memory_left_and_what_holds_it() -> None:
    weights = torch.zeros(1 << 20)
    pool = VirtualPool("rank 3 (T4)", 1024, 12 << 30, 1 << 30, lambda: [("parameters", weights)])
    with pool.counting():
        fits = torch.zeros(1 << 20)
        assert pool.peak_bytes == 9 << 30
        with pytest.raises(torch.OutOfMemoryError) as error:
            torch.zeros(1 << 20)
    text = str(error.value)
    assert isinstance(error.value, VirtualMemoryError)
    assert "out of memory" in text and "rank 3 (T4)" in text
    assert "allocate 4.00 GiB" in text and "of 12.00 GiB" in text
    assert "parameters 4.00 GiB" in text and "reserve 1.00 GiB" in text
    assert fits.nbytes == 1 << 22


def test_a_clock_sleeps_and_its_errors_do_not_add_up() -> None:
    clock = VirtualClock(Pace(0.5))
    clock.begin(time.monotonic())
    begun, cpu = time.monotonic(), time.process_time()
    for _ in range(50):
        clock.work("ForwardPass", 0.02)
        clock.wait_until(clock.now_s - 1.0)
    assert clock.now_s == pytest.approx(1.0)
    assert 0.5 <= time.monotonic() - begun < 0.6
    assert time.process_time() - cpu < 0.1


def test_works_of_one_instruction_are_one_span() -> None:
    first, second = object(), object()
    works = [
        Work("ForwardPass", 0.0, 1.0, first),
        Work("ForwardPass", 1.0, 2.0, first),
        Work("ForwardPass", 2.0, 3.0, second),
        Work("BackwardPass", 5.0, 6.0, None),
        Work("BackwardPass", 7.0, 8.0, None),
    ]
    spans = timeline_of(4, works).spans
    assert [(span.start_s, span.stop_s) for span in spans] == [(0, 2), (2, 3), (5, 6), (7, 8)]
    assert {span.rank for span in spans} == {4}


def test_too_few_cores_are_refused_with_a_time_scale_that_would_do() -> None:
    late = StepFigures(2, 3.0, 1.5, 1.6, 0.0, {}, Timeline(()))
    prompt = StepFigures(1, 1.51, 1.5, 0.2, 0.0, {}, Timeline(()))
    check_kept_up([prompt], 1.0, 2)
    with pytest.raises(RehearsalError, match=r"took 3, for 2 cores .* time scale 1; .* least 3$"):
        check_kept_up([prompt, late], 1.0, 2)
