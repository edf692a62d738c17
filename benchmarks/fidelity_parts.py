"""What `benchmarks.fidelity_cpu` gives the simulator: this machine, measured part by part.

Seconds of layers and optimizer, memory bandwidth, and messages over gloo, by the runtime's own
parts, while both ranks do the same.
"""

import time
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from benchmarks.llama_layers import Block, Head, TokenLoss, llama_config
from zorse_ds.core.cluster import Cluster
from zorse_ds.core.gpus import TypeFigures
from zorse_ds.core.layout import Transfer
from zorse_ds.core.model import ModelShape
from zorse_ds.core.profile import Profile
from zorse_ds.core.shards import shard_layout
from zorse_ds.cost.dtypes import MASTER_BYTES
from zorse_ds.cost.optimizer import reduction_s as modelled_reduction_s
from zorse_ds.ranges import Range
from zorse_ds.runtime.channels import GlooChannel
from zorse_ds.runtime.dist_transport import DistTransport, all_gloo
from zorse_ds.runtime.process_groups import TorchProcessGroup
from zorse_ds.runtime.stage import StageRunner
from zorse_ds.runtime.transport import Receive
from zorse_ds.runtime.values import Message
from zorse_ds.schedule.instructions import RecvActivation

MODEL = llama_config(blocks=8, vocabulary=4096)
LENGTH = 128
SIZES = (1, 2, 3, 4)
STACK = 4
"""Blocks that are timed together: one alone would find its weights in the cache."""
MESSAGE_BYTES = (1 << 12, 1 << 24)
REDUCED_NUMEL = 1 << 24
Pick = Callable[[Iterable[float]], float]
"""What stands for several measurements of one thing."""


def model_shape() -> ModelShape:
    """The shape of the layer list."""
    return ModelShape.llama(
        "layers",
        MODEL.num_hidden_layers,
        MODEL.hidden_size,
        MODEL.intermediate_size,
        MODEL.num_attention_heads,
        vocab=MODEL.vocab_size,
    )


def measure_parts(rank: int, repeats: int, pick: Pick) -> dict[str, Any]:
    """Layers, optimizer, memory and messages, while both ranks do the same."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    return {
        "layers": _time_layers(repeats, pick),
        "step_s_per_param": _time_step(repeats, pick),
        "reduction_s": _time_reduction(rank, repeats, pick),
        "messages_s": _time_messages(rank, repeats, pick),
    }


def _time_layers(repeats: int, pick: Pick) -> dict[str, list[tuple[float, float]]]:
    """Forward and backward seconds of one layer, by kind and size.

    All sizes of all kinds in turns, so that what else the machine does hits them alike.
    """
    stacks = {
        "embedding": nn.Sequential(nn.Embedding(MODEL.vocab_size, MODEL.hidden_size)),
        "block": nn.Sequential(*(Block(MODEL, i) for i in range(STACK))),
        "head": nn.Sequential(Head(MODEL)),
    }
    for stack in stacks.values():
        for parameter in stack.parameters():
            parameter.grad = torch.zeros_like(parameter)
    seconds: dict[tuple[str, int], list[tuple[float, float]]] = {
        (kind, size): [] for kind in stacks for size in SIZES
    }
    for _ in range(repeats + 1):
        for (kind, size), own in seconds.items():
            dist.barrier()
            own.append(_time_pass(StageRunner(stacks[kind]), kind, size))
    picked: dict[str, list[tuple[float, float]]] = {kind: [] for kind in stacks}
    for (kind, _), own in seconds.items():
        forward, backward = zip(*own[1:], strict=True)
        layers = len(stacks[kind])
        picked[kind].append((pick(forward) / layers, pick(backward) / layers))
    return picked


def _time_pass(runner: StageRunner, kind: str, size: int) -> tuple[float, float]:
    labels = torch.randint(MODEL.vocab_size, (size, LENGTH))
    hidden = torch.randn(size, LENGTH, MODEL.hidden_size)
    value: Any = labels if kind == "embedding" else hidden.requires_grad_()
    start = time.perf_counter()
    runner.enter_first(0, size, LENGTH)
    output = runner.forward(0, value)
    loss = TokenLoss()(output, labels)[0] if kind == "head" else None
    middle = time.perf_counter()
    if loss is not None:
        runner.backward_from_loss(0, loss)
    else:
        gradient = Message("*", [torch.randn_like(output)], [True], [False])
        runner.backward(0, [(Range(0, size), gradient)])
    stop = time.perf_counter()
    runner.release(0)
    return middle - start, stop - middle


def _time_step(repeats: int, pick: Pick) -> float:
    master = nn.Parameter(torch.randn(1 << 24))
    optimizer = torch.optim.AdamW([master], lr=1e-4)
    master.grad = torch.randn(1 << 24)

    def step() -> None:
        assert master.grad is not None
        float(torch.linalg.vector_norm(master.grad).double().square())
        master.grad.mul_(1.0)
        optimizer.step()

    return _picked_s(step, repeats, pick) / master.numel()


def _time_reduction(rank: int, repeats: int, pick: Pick) -> float:
    """Seconds of the sum of a vector over both ranks, each keeping half."""
    group = TorchProcessGroup(rank, (0, 1), dist.group.WORLD)
    layout = shard_layout(REDUCED_NUMEL, (0, 1), (1, 1))
    flat = torch.randn(REDUCED_NUMEL)
    return _picked_s(lambda: group.reduce_shards(flat, layout), repeats, pick)


def _picked_s(function: Callable[[], Any], repeats: int, pick: Pick) -> float:
    seconds = []
    for _ in range(repeats + 1):
        dist.barrier()
        start = time.perf_counter()
        function()
        seconds.append(time.perf_counter() - start)
    return pick(seconds[1:])


def _time_messages(rank: int, repeats: int, pick: Pick) -> list[float]:
    """Seconds from a send to the end of the take, by size, over the engine's transport."""
    channel = GlooChannel(None, 60.0)
    transport = DistTransport(rank, channel, all_gloo(channel), 60.0)
    found = [_time_message(transport, rank, n, repeats, pick) for n in MESSAGE_BYTES]
    transport.close()
    return found


def _time_message(
    transport: DistTransport, rank: int, num_bytes: int, repeats: int, pick: Pick
) -> float:
    peer, rounds = 1 - rank, 2 * repeats
    transfer = Transfer(0, 0, 0, 0, peer, rank, Range(0, 1))
    own = [2 * i + (1 - rank) for i in range(rounds)]
    transport.begin([Receive(0, peer, tag, RecvActivation(rank, transfer)) for tag in own])
    message = Message("*", [torch.zeros(num_bytes // 4)], [True], [False])
    seconds = []
    for i in range(rounds):
        start = time.perf_counter()
        if rank == 0:
            transport.send(0, peer, 2 * i, message)
        transport.reached()
        transport.take(own[i])
        if rank == 1:
            transport.send(0, peer, 2 * i + 1, message)
        seconds.append((time.perf_counter() - start) / 2)
    transport.end()
    return pick(seconds)


def profile_of(parts: list[list[dict[str, Any]]], pick: Pick) -> Profile:
    """The profile of all measurements (one a round, of all ranks)."""
    every = [own for ranks in parts for own in ranks]
    times = []
    for kind in ("embedding", "block", "head"):
        by_size = [
            [pick(own["layers"][kind][i][way] for own in every) for way in (0, 1)]
            for i in range(len(SIZES))
        ]
        times.append(
            {
                "gpu_type": "CPU",
                "kind": kind,
                "dtype": "float32",
                "seq_len": LENGTH,
                "micro_batches": list(SIZES),
                "forward_s": [forward for forward, _ in by_size],
                "backward_s": [backward for _, backward in by_size],
            }
        )
    step = pick(own["step_s_per_param"] for own in every)
    return Profile.from_dict(
        {
            "model": model_shape().model_dump(mode="json"),
            "times": times,
            "optimizer": [{"gpu_type": "CPU", "step_s_per_param": step}],
            "versions": {"torch": torch.__version__},
        }
    )


def cluster_of(parts: list[list[dict[str, Any]]], pick: Pick) -> Cluster:
    """This machine as a cluster of two CPU ranks."""
    every = [own for ranks in parts for own in ranks]
    short, long = (pick(own["messages_s"][i] for own in every) for i in (0, 1))
    s_per_byte = (long - short) / (MESSAGE_BYTES[1] - MESSAGE_BYTES[0])
    latency_s = max(0.0, short - MESSAGE_BYTES[0] * s_per_byte)
    reduction_s = pick(own["reduction_s"] for own in every)
    # What the wire does not explain is memory: `reduction_s` counts the bytes that are touched.
    on_the_wire_s = REDUCED_NUMEL / 2 * MASTER_BYTES * s_per_byte
    probe = TypeFigures(fp32_tflops=1.0, memory_gib=1.0, memory_gb_per_s=1.0).as_type("probe")
    touched_gb = modelled_reduction_s(probe, "float32", REDUCED_NUMEL, 0.5, 2)
    memory_gb_per_s = touched_gb / (reduction_s - on_the_wire_s)
    cpu = {"fp32_tflops": 0.1, "memory_gib": 64.0, "memory_gb_per_s": memory_gb_per_s, "bf16": True}
    node = {
        "gpu_type": "CPU",
        "num_gpus": 2,
        "intra_gb_per_s": 1e-9 / s_per_byte,
        "intra_latency_us": latency_s * 1e6,
        "nic_gb_per_s": 1e-9 / s_per_byte,
    }
    return Cluster.from_dict({"link_figures": "measured", "types": {"CPU": cpu}, "nodes": [node]})
