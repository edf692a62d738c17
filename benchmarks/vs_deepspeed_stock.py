"""Every way in which stock DeepSpeed can use a cluster, and a rank of each on virtual GPUs."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import deepspeed
import torch
from deepspeed.pipe import LayerSpec, PipelineModule
from deepspeed.runtime import utils
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

from zorse_ds.core.plan import Dtype
from zorse_ds.core.recompute import KEPT, Recomputed, first_of
from zorse_ds.cost.activations import activation_table
from zorse_ds.cost.collectives import gather, reduce_scatter
from zorse_ds.cost.compute import compute_times
from zorse_ds.cost.dtypes import DTYPE_BYTES, usable_dtype
from zorse_ds.cost.network import network_of
from zorse_ds.cost.setting import Setting
from zorse_ds.integrations.deepspeed.module import init_distributed
from zorse_ds.integrations.deepspeed.rehearsal_plan import RankRun, optimizer
from zorse_ds.integrations.deepspeed.rehearsal_stock import Sends, attach_stock
from zorse_ds.ranges import Range
from zorse_ds.rehearsal.clock import Pace
from zorse_ds.rehearsal.gpu import VirtualGpu
from zorse_ds.rehearsal.layers import MiniBlock
from zorse_ds.rehearsal.links import equal_shards

BUCKETS = {
    "reduce_bucket_size": 5e8,
    "allgather_bucket_size": 5e8,
    "stage3_prefetch_bucket_size": 5e7,
    "stage3_param_persistence_threshold": 1e5,
    "stage3_max_live_parameters": 1e9,
    "stage3_max_reuse_distance": 1e9,
}
"""DeepSpeed's defaults, in elements; a miniature's are smaller by its ratio, and even."""


@dataclass(frozen=True, slots=True)
class Stock:
    """One configuration on all GPUs of a cluster; `pipes` 0 is plain data parallelism."""

    pipes: int
    width: int
    size: int
    accumulated: int
    zero_level: int
    recompute: bool
    method: str = ""

    @property
    def name(self) -> str:
        """For people."""
        what = f"pipeline {self.pipes}×{self.width}, {self.method}" if self.pipes else "data"
        again = ", recompute" if self.recompute else ""
        return f"{what}, ZeRO-{self.zero_level}, micro-batches of {self.size}{again}"


def configurations(setting: Setting, batch: int) -> Iterator[Stock]:
    """All that DeepSpeed accepts: equal widths, equal micro-batches, equal counts."""
    world = len(setting.cluster.gpus)
    for recompute in (False, True):
        for size, accumulated in _cuts(batch, world):
            for level in (1, 2, 3):
                yield Stock(0, world, size, accumulated, level, recompute)
        for pipes in range(2, min(world, setting.model.num_layers) + 1):
            if world % pipes:
                continue
            width = world // pipes
            for size, accumulated in _cuts(batch, width):
                for method in ("uniform", "parameters"):
                    yield Stock(pipes, width, size, accumulated, 1, recompute, method)


def _cuts(batch: int, width: int) -> list[tuple[int, int]]:
    """Micro-batch sizes, with how many of them a rank accumulates."""
    own, rest = divmod(batch, width)
    return [] if rest else [(size, own // size) for size in range(1, own + 1) if not own % size]


def dtype_for(setting: Setting) -> Dtype:
    """What all GPUs of the cluster compute in: stock has one dtype for all."""
    found = {usable_dtype(setting.dtype, gpu.type) for gpu in setting.cluster.gpus}
    return found.pop() if len(found) == 1 else "float16"


def least_s(stock: Stock, setting: Setting) -> float:
    """Seconds that no step of it can beat, by the formula of its own schedule.

    Of a pipeline: all micro-batches on a stage, and the first one's way there and back. Of data
    parallelism: compute, or what its ZeRO level sends at least, which may run beside it.
    """
    whole = Range(0, setting.model.num_layers)
    if not stock.pipes:
        ranks = range(stock.width)
        slowest = max(_pass_s(stock, setting, rank, whole) for rank in ranks)
        return max(stock.accumulated * slowest, _sent_s(stock, setting))
    before, most = 0.0, 0.0
    for pipe, layers in enumerate(_parts(stock, setting)):
        ranks = range(pipe * stock.width, (pipe + 1) * stock.width)
        slowest = max(_pass_s(stock, setting, rank, layers) for rank in ranks)
        most = max(most, before + stock.accumulated * slowest)
        before += min(_pass_s(stock, setting, rank, layers) for rank in ranks)
    return most


def _sent_s(stock: Stock, setting: Setting) -> float:
    """Sums of gradients and gathers of parameters: a step's, or (from some level) a pass's each."""
    ranks = tuple(range(stock.width))
    num_bytes = setting.model.num_params * DTYPE_BYTES[dtype_for(setting)]
    shards = equal_shards(ranks, num_bytes)
    sums = reduce_scatter(network_of(setting), ranks, shards).seconds
    gathers = gather(network_of(setting), ranks, shards).seconds
    often = stock.accumulated
    return sums * (often if stock.zero_level > 1 else 1) + gathers * (
        often if stock.zero_level > 2 else 1
    )


def _pass_s(stock: Stock, setting: Setting, rank: int, layers: Range) -> float:
    """A micro-batch forward and backward through layers."""
    name = setting.cluster.gpus[rank].type.name
    sums = compute_times(setting).sums(name, dtype_for(setting), stock.size)
    return sums.forward_s(layers) + sums.backward_s(layers, _recomputed(stock, layers))


def _recomputed(stock: Stock, layers: Range) -> Recomputed:
    return first_of(layers) if stock.recompute else KEPT


def least_bytes_missing(stock: Stock, setting: Setting) -> float:
    """By how much what a rank holds at least does not fit, 0 where it does.

    That is parameters, gradients, optimizer state, and what micro-batches in flight keep.
    """
    w = stock.width
    per_param = {1: 4 + 12 / w, 2: 2 + 14 / w, 3: 16 / w}[stock.zero_level]
    table, dtype = activation_table(setting), dtype_for(setting)
    missing = 0.0
    for pipe, layers in enumerate(_parts(stock, setting)):
        shapes = setting.model.shapes[layers.as_slice()]
        kept = table.of(layers, dtype, _recomputed(stock, layers)).kept_per_sample
        in_flight = min(max(1, stock.pipes - pipe), stock.accumulated) * stock.size
        held = per_param * sum(shape.num_params for shape in shapes) + kept * in_flight
        for rank in range(pipe * w, (pipe + 1) * w):
            has = setting.cluster.gpus[rank].usable_bytes - setting.reserve_bytes
            missing = max(missing, held - has)
    return missing


def _parts(stock: Stock, setting: Setting) -> list[Range]:
    """How `PipelineModule` cuts the layers; all of them for plain data parallelism."""
    count = setting.model.num_layers
    if not stock.pipes:
        return [Range(0, count)]
    if stock.method == "uniform":
        cuts = utils.partition_uniform(count, stock.pipes)
    else:
        weights = [shape.num_params for shape in setting.model.shapes]
        cuts = utils.partition_balanced(weights, stock.pipes)
    return [Range(a, b) for a, b in pairwise(cuts)]


class PlainModel(nn.Module):
    """All layers and the loss in one module, for DeepSpeed's engine without a pipeline."""

    def __init__(self, layers: list[nn.Module], loss: Callable[..., Tensor], again: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)
        self.loss, self.again = loss, again

    def forward(self, ids: Tensor, targets: Tensor) -> Tensor:
        """Mean loss of a micro-batch."""
        value = ids
        for layer in self.layers:
            value = self._call(layer, value)
        return self.loss(value, targets)

    def _call(self, layer: nn.Module, value: Tensor) -> Tensor:
        if not (self.again and type(layer) is MiniBlock):
            output: Tensor = layer(value)
            return output
        with set_checkpoint_early_stop(False):
            output = checkpoint(layer, value, use_reentrant=False)
            return output


def run_rank(
    stock: Stock,
    setting: Setting,
    sends: Sends,
    pace: Pace,
    steps: int,
    rank: int,
    tell: Callable[[Any], None],
) -> RankRun:
    """Some steps of one rank. Collective."""
    torch.set_num_threads(1)
    init_distributed()
    gpu = VirtualGpu(setting, rank, dtype_for(setting), pace)
    with gpu.building():
        engine, step = (_pipeline if stock.pipes else _plain)(stock, gpu)
        attach_stock(engine, gpu, sends)
    figures = []
    for done in range(steps):
        figures.append(gpu.step(step))
        tell(done + 1)
    return RankRun(tuple(figures), (), ())


def _pipeline(stock: Stock, gpu: VirtualGpu) -> tuple[Any, Callable[[], Any]]:
    mini = gpu.miniature
    module = PipelineModule(
        [LayerSpec(kind, *made) for kind, made in mini.layers(gpu.dtype)],
        num_stages=stock.pipes,
        loss_fn=mini.loss(gpu.dtype).mean,
        partition_method=stock.method,
        activation_checkpoint_interval=int(stock.recompute),
        # Its re-entrant checkpoints need an input with a gradient, which an embedding has not.
        checkpointable_layers=[MiniBlock.__name__],
    )
    config = _config(stock, mini.ratio)
    engine = deepspeed.initialize(model=module, optimizer=optimizer, config=config)[0]
    batches = list(_micro_batches(stock, mini.samples(stock.size * stock.accumulated)))
    return engine, lambda: engine.train_batch(iter(batches))


def _plain(stock: Stock, gpu: VirtualGpu) -> tuple[Any, Callable[[], Any]]:
    mini = gpu.miniature
    layers = [kind(*made) for kind, made in mini.layers(gpu.dtype)]
    model = PlainModel(layers, mini.loss(gpu.dtype).mean, stock.recompute)
    config = _config(stock, mini.ratio)
    engine = deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0]
    data = mini.samples(stock.size * stock.accumulated * stock.width)[gpu.rank :: stock.width]

    def step() -> None:
        for ids, targets in _micro_batches(stock, data):
            loss = engine(ids, targets)
            engine.backward(loss)
            engine.step()

    return engine, step


def _micro_batches(
    stock: Stock, data: Sequence[tuple[Tensor, Tensor]]
) -> Iterator[tuple[Tensor, Tensor]]:
    for start in range(0, len(data), stock.size):
        ids, targets = zip(*data[start : start + stock.size], strict=True)
        yield torch.stack(ids), torch.stack(targets)


def _config(stock: Stock, ratio: float) -> dict[str, Any]:
    buckets = {key: 2 * max(1, int(count / ratio / 2)) for key, count in BUCKETS.items()}
    return {
        "train_micro_batch_size_per_gpu": stock.size,
        "gradient_accumulation_steps": stock.accumulated,
        "gradient_clipping": 0.0,
        "steps_per_print": 10**9,
        "bf16": {"enabled": True},
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {"stage": stock.zero_level, **buckets},
    }
