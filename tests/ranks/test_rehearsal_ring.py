"""The ring is true: stock's own schedule, a virtual T4's layer, links of 1 GB/s, idle sleepers."""

from __future__ import annotations

import time
from typing import Any

import deepspeed
import pytest
import torch
import torch.distributed as dist
from deepspeed import comm as deepspeed_comm
from deepspeed.pipe import LayerSpec, PipelineModule
from torch import Tensor

from tests.ranks.harness import run_ranks
from zorse_ds.core.cluster import Cluster
from zorse_ds.core.model import ModelShape, llama_block
from zorse_ds.core.profile import Profile
from zorse_ds.cost.layer_times import timer_of
from zorse_ds.cost.setting import Setting
from zorse_ds.integrations.deepspeed.module import init_distributed
from zorse_ds.integrations.deepspeed.rehearsal_stock import Sends, StockLinks, attach_stock
from zorse_ds.rehearsal.clock import Pace
from zorse_ds.rehearsal.gpu import VirtualGpu

SCALE = 1.5
FORWARD_S, BACKWARD_S, STEP_S_PER_PARAM = 0.020, 0.041, 2e-11
STAGES, MICRO_BATCHES = 4, 8
BLOCK = llama_block(1024, 2816, 16)
MODEL = ModelShape(name="blocks", kinds={"block": BLOCK}, layers=("block",) * 8)
PER_STAGE = len(MODEL.layers) // STAGES
PROFILE = Profile.from_dict(
    {
        "model": MODEL.model_dump(mode="json"),
        "times": [
            {
                "gpu_type": "T4",
                "kind": "block",
                "dtype": "float16",
                "seq_len": 512,
                "micro_batches": [1, 2],
                "forward_s": [FORWARD_S, 1.9 * FORWARD_S],
                "backward_s": [BACKWARD_S, 1.9 * BACKWARD_S],
            }
        ],
        "optimizer": [{"gpu_type": "T4", "step_s_per_param": STEP_S_PER_PARAM}],
    }
)
NODE = {"gpu_type": "T4", "num_gpus": 4, "intra_gb_per_s": 1, "nic_gb_per_s": 1}


def setting_of(gb_per_s: float) -> Setting:
    node = {**NODE, "intra_gb_per_s": gb_per_s, "intra_latency_us": 0}
    cluster = Cluster.from_dict({"nodes": [node]})
    return Setting(cluster, MODEL, timer_of(PROFILE), 512, dtype="float16", profile=PROFILE)


def started(rank: int, setting: Setting, scale: float) -> VirtualGpu:
    torch.set_num_threads(1)
    init_distributed()
    return VirtualGpu(setting, rank, "float16", Pace(scale))


def pipeline_step(rank: int, sends: Sends, scale: float) -> list[dict[str, Any]]:
    gpu = started(rank, setting_of(1000), scale)
    mini = gpu.miniature
    with gpu.building():
        module = PipelineModule(
            [LayerSpec(kind, *made) for kind, made in mini.layers("float16")],
            num_stages=STAGES,
            loss_fn=mini.loss("float16").mean,
            partition_method="uniform",
            activation_checkpoint_interval=0,
        )
        config = {
            "train_micro_batch_size_per_gpu": 1,
            "gradient_accumulation_steps": MICRO_BATCHES,
            "gradient_clipping": 0.0,
            "steps_per_print": 10**9,
        }
        data = [(torch.randn(1, mini.width), torch.rand(1, 1)) for _ in range(MICRO_BATCHES)]
        engine = deepspeed.initialize(
            model=module,
            config=config,
            optimizer=lambda params: torch.optim.AdamW(params, lr=1e-3, fused=True),
        )[0]
        attach_stock(engine, gpu, sends)
    found = []
    for _ in range(4):
        cpu = time.process_time()
        figures = gpu.step(lambda: engine.train_batch(iter(data)))
        found.append({"figures": figures, "cpu_s": time.process_time() - cpu})
    return found


WANTED_S = (MICRO_BATCHES + STAGES - 1) * PER_STAGE * (
    FORWARD_S + BACKWARD_S
) + PER_STAGE * BLOCK.num_params * STEP_S_PER_PARAM
"""A step of stock's 1F1B, by its own formula."""


def test_stock_with_free_sends_takes_the_same_on_equal_gpus() -> None:
    results = run_ranks(STAGES, pipeline_step, "free", 0.0, timeout_s=240)
    assert max(own[-1]["figures"].virtual_s for own in results) == pytest.approx(WANTED_S, rel=0.03)


def test_stock_on_equal_gpus_takes_what_its_schedule_says() -> None:
    results = run_ranks(STAGES, pipeline_step, "held", SCALE, timeout_s=240)
    steps = [[own[i] for own in results] for i in (1, 2, 3)]
    best = min(steps, key=lambda ranks: max(own["figures"].wall_s for own in ranks))
    wall_s = max(own["figures"].wall_s for own in best)
    assert wall_s == pytest.approx(WANTED_S, rel=0.03)
    for own in best:
        busy = MICRO_BATCHES * PER_STAGE * (FORWARD_S + BACKWARD_S)
        assert own["figures"].busy_s == pytest.approx(busy, rel=1e-6)
        # Four ranks sleep most of the time: together they need less than two cores have.
        assert own["cpu_s"] < 0.4 * wall_s * SCALE


def layer_seconds(rank: int, size: int, count: int) -> tuple[float, float]:
    gpu = started(rank, setting_of(1), 1.0)
    kind, made = gpu.miniature.layers("float16")[0]
    layer = kind(*made)
    gpu.watch(layer)
    value = torch.randn(size, gpu.miniature.width, requires_grad=True)
    seconds: list[tuple[float, float]] = []

    def passes() -> None:
        marks = [time.monotonic()]
        outputs = [layer(value) for _ in range(count)]
        marks.append(time.monotonic())
        for output in outputs:
            output.sum().backward()
        marks.append(time.monotonic())
        seconds.append((marks[1] - marks[0], marks[2] - marks[1]))

    for _ in range(3):
        gpu.step(passes)
    # The first is slow, and deadlines are absolute: who is late forward has a short backward.
    forward_s, backward_s = min(seconds[1:], key=sum)
    return forward_s / count, backward_s / count


def test_a_virtual_t4_takes_the_profiles_time() -> None:
    for size, factor in ((1, 1.0), (2, 1.9)):
        ((forward_s, backward_s),) = run_ranks(1, layer_seconds, size, 12, timeout_s=120)
        assert forward_s == pytest.approx(factor * FORWARD_S, rel=0.02)
        assert backward_s == pytest.approx(factor * BACKWARD_S, rel=0.02)


def link_seconds(rank: int) -> dict[str, float]:
    gpu = started(rank, setting_of(1), 1.0)
    StockLinks(deepspeed_comm.comm.cdb, gpu).impose()
    tensor = torch.zeros(int(0.4e9 / gpu.miniature.ratio / 4))
    found: dict[str, float] = {"bytes": gpu.virtual_bytes(tensor)}

    def timed(name: str, run: Any) -> None:
        found[name] = min(gpu.step(run).wall_s for _ in range(3))

    def message() -> None:
        if rank == 0:
            deepspeed_comm.send(tensor, 1)
        elif rank == 1:
            deepspeed_comm.recv(tensor, 0)

    def crowd() -> None:
        """Two messages into one GPU share its way in."""
        if rank == 2:
            deepspeed_comm.recv(tensor, 0)
            deepspeed_comm.recv(tensor, 1)
        elif rank < 2:
            deepspeed_comm.send(tensor, 2)

    timed("message", message)
    timed("crowd", crowd)
    timed("all_reduce", lambda: wait_for_sum(tensor))
    return found


def wait_for_sum(tensor: Tensor) -> None:
    """Gradient sums run beside other work until something waits for them."""
    deepspeed_comm.all_reduce(tensor)
    deepspeed_comm.all_reduce(torch.zeros(1))


def test_messages_and_sums_take_bytes_over_bandwidth() -> None:
    results = run_ranks(4, link_seconds, timeout_s=120)
    seconds = results[0]["bytes"] / 1e9
    assert results[1]["message"] == pytest.approx(seconds, rel=0.05)
    assert results[2]["crowd"] == pytest.approx(2 * seconds, rel=0.05)
    for own in results:
        assert own["all_reduce"] == pytest.approx(2 * 3 / 4 * seconds, rel=0.05)
    assert not dist.is_initialized()
