"""What DeepSpeed's monitors are told of a step besides its loss and learning rate.

Everything is told by rank 0, at DeepSpeed's own step of its curves: the samples seen so far.
"""

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from zorse_ds.core.cluster import Cluster
from zorse_ds.core.gpus import GIB
from zorse_ds.core.plan import Plan
from zorse_ds.errors import ConfigError
from zorse_ds.integrations.deepspeed.agreement import together
from zorse_ds.integrations.deepspeed.config import MonitorSettings, ZorseSettings
from zorse_ds.integrations.deepspeed.data import PlacedBatch
from zorse_ds.integrations.deepspeed.wandb_run import WandbRun
from zorse_ds.runtime.dist_world import DistWorld
from zorse_ds.runtime.host_room import peak_resident_bytes
from zorse_ds.runtime.ledger import allocator_peak_bytes
from zorse_ds.runtime.stopwatch import Measured
from zorse_ds.simulator.timeline import Timeline

_SECTIONS = ("tensorboard", "wandb", "csv_monitor", "comet")
PREFIX = "Train/Samples/"


class RankStep(NamedTuple):
    """What one rank says of a step."""

    step_s: float
    busy_s: float
    peak_bytes: int
    num_tokens: int
    """Of the samples that it loaded."""
    timeline: Timeline | None
    """Where a picture is due."""


class Monitoring:
    """Gathers facts of all ranks after each step, when rank 0 has a monitor to tell them to.

    Starts W&B's run before DeepSpeed would, so that a missing key or network does not stop
    training. Raises `ConfigError` where something that is asked for is not installed.
    Collective: every rank constructs it, and calls `after_step`.
    """

    def __init__(
        self,
        world: DistWorld,
        plan: Plan,
        config: dict[str, Any],
        settings: ZorseSettings,
        device: torch.device,
    ) -> None:
        self._world, self._device = world, device
        self._settings = settings.monitor
        wanted = {key for key in _SECTIONS if (config.get(key) or {}).get("enabled")}
        facts: list[Any] = world.gather_objects((bool(wanted), _own_type(device)))
        self.is_on: bool = facts[0][0]
        self.gpu_types = _types(self._settings, plan, [own for _, own in facts])
        self._wandb: WandbRun | None = None
        with together("starting the monitors"):
            if world.rank == 0 and "wandb" in wanted:
                self._wandb = WandbRun(config["wandb"], self._settings.folder)
                self._wandb.describe(plan, config, self._settings, self.gpu_types)

    def after_step(self, engine: Any, batch: PlacedBatch, measured: Measured | None) -> None:
        """Tell what the step did with `batch`. Collective."""
        if not self.is_on or engine.report is None or measured is None:
            return
        every = self._settings.picture_every
        draws = every is not None and engine.global_steps % every == 0
        timeline = engine.report.timeline
        own = RankStep(
            timeline.step_s,
            measured.busy_s,
            _peak_bytes(engine.report, self._device),
            batch.num_tokens,
            timeline if draws else None,
        )
        ranks: list[Any] = self._world.gather_objects(own)
        if self._world.rank == 0:
            self._tell(engine, ranks, batch.num_samples)
        if draws:
            # The others wait here for the picture, or it would count as theirs of the next step.
            self._world.gather_objects(None)

    def _tell(self, engine: Any, ranks: Sequence[RankStep], num_samples: int) -> None:
        at = engine.global_samples
        adapting = engine.parts.adapting
        values = dict(self._values(engine.report, ranks, num_samples, adapting.ran))
        values |= adapting.values()
        engine.monitor.write_events([(PREFIX + name, value, at) for name, value in values.items()])
        timelines = [rank.timeline for rank in ranks if rank.timeline is not None]
        if timelines:
            self._draw(engine, timelines)

    def close(self) -> None:
        """End W&B's run, whose history is written then."""
        if self._wandb is not None:
            self._wandb.close()

    def _values(
        self, report: Any, ranks: Sequence[RankStep], num_samples: int, plan: Plan
    ) -> Iterator[tuple[str, float]]:
        step_s = max(rank.step_s for rank in ranks)
        yield "perplexity", math.exp(report.loss) if report.loss < 700 else math.inf
        yield "grad_norm", report.grad_norm
        yield "step_s", step_s
        yield "samples_per_s", num_samples / step_s
        predicted_s = self._settings.predicted_step_s
        if predicted_s is not None:
            yield "predicted_step_s", predicted_s
            yield "step_s_over_predicted", step_s / predicted_s
        first = plan.group_of_stage(0).ranks
        tokens_per_s = sum(ranks[rank].num_tokens for rank in first) / step_s
        if tokens_per_s:
            yield "tokens_per_s", tokens_per_s
            for name, share in work_shares(plan, self.gpu_types).items():
                yield f"tokens_per_s/{name}", tokens_per_s * share
        for number, rank in enumerate(ranks):
            yield f"busy_share/rank_{number}", rank.busy_s / step_s
            yield f"peak_memory_gib/rank_{number}", rank.peak_bytes / GIB

    def _draw(self, engine: Any, timelines: Sequence[Timeline]) -> None:
        """A picture in the folder, in W&B and in TensorBoard."""
        from zorse_ds.integrations.picture import draw_timeline

        folder = Path(self._settings.folder or ".") / "timelines"
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"step_{engine.global_steps}.png"
        labels = [f"rank {rank} {name}" for rank, name in enumerate(self.gpu_types)]
        draw_timeline(Timeline.joined(timelines), Timeline(()), labels, path)
        at = engine.global_samples
        if self._wandb is not None:
            self._wandb.show("timeline", path, at)
        tensorboard = engine.monitor.tb_monitor
        if tensorboard is not None and tensorboard.enabled:
            from matplotlib import pyplot

            pixels = pyplot.imread(path)
            tensorboard.summary_writer.add_image("timeline", pixels, at, dataformats="HWC")


def work_shares(plan: Plan, gpu_types: Sequence[str]) -> dict[str, float]:
    """The share of a step's work (samples times pipeline layers) that each GPU type does.

    They sum to 1, so that tokens a second by type sum to those of the whole model.
    """
    shares: dict[str, float] = defaultdict(float)
    for group in plan.groups:
        layers = sum(stage.layers.size for stage in plan.stages if stage.group == group.name)
        for gpu in group.gpus:
            done = gpu.num_samples * layers
            shares[gpu_types[gpu.rank]] += done / (plan.global_batch_size * plan.num_layers)
    return dict(shares)


def _types(settings: MonitorSettings, plan: Plan, found: list[str]) -> list[str]:
    """Names of the ranks' GPUs: the cluster's, or what the devices say of themselves."""
    if settings.cluster is None:
        return found
    gpus = Cluster.from_dict(settings.cluster).gpus
    if len(gpus) < plan.world_size:
        raise ConfigError(
            f"zorse.monitor.cluster has {len(gpus)} GPUs, but the plan {plan.world_size} ranks; "
            "expected the plan's cluster"
        )
    return [gpus[rank].type.name for rank in range(plan.world_size)]


def _own_type(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def _peak_bytes(report: Any, device: torch.device) -> int:
    """Of the device's memory in the step; on the CPU of the process, ever."""
    if report.memory is not None and report.memory.allocator_peak_bytes is not None:
        return int(report.memory.allocator_peak_bytes)
    peak = allocator_peak_bytes(device)
    if peak is not None:
        return peak
    return peak_resident_bytes()
