"""Measuring a model's layers on one device: seconds against micro-batch size and length, and bytes.

What a layer is comes from outside (`LayerSource`): real ones are those that the engine runs.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch

from zorse_ds.core.model import ModelShape
from zorse_ds.core.plan import Dtype
from zorse_ds.core.profile import LayerBytes, LayerTimes, OptimizerTimes, Profile
from zorse_ds.errors import ProfileError
from zorse_ds.profiler.timing import Budget, median_seconds

_OPTIMIZER_ELEMENTS = 1 << 22


class LayerRun(Protocol):
    """Layers of one kind with the inputs of one micro-batch; `forward` and `backward` alternate."""

    @property
    def num_layers(self) -> int:
        """How many layers run behind each other: what is measured is theirs together."""

    def forward(self) -> None:
        """One forward pass, with all that backward needs kept."""

    def backward(self) -> None:
        """The backward pass of the last forward pass; gradients are added to the parameters'."""

    def measured_bytes(self) -> tuple[int, int, int]:
        """Saved (of all layers), boundary and workspace bytes of the micro-batch."""


class LayerSource(Protocol):
    """Builds real layers of each kind of a model."""

    def run(self, kind: str, dtype: Dtype, seq_len: int, size: int) -> LayerRun:
        """Layers of a kind, about to run `size` samples of `seq_len` tokens."""


@dataclass(frozen=True, slots=True)
class Points:
    """What is measured."""

    dtypes: tuple[Dtype, ...]
    seq_lens: tuple[int, ...]
    sizes: tuple[int, ...]
    """Micro-batch sizes, ascending."""

    def of(self, model: ModelShape) -> list[tuple[str, Dtype, int]]:
        """Kind, dtype and length of each row of points."""
        return [
            (kind, dtype, seq_len)
            for dtype in self.dtypes
            for kind in model.kinds
            for seq_len in self.seq_lens
        ]


Report = Callable[[str], None]
"""Told what is about to be measured, once a point (`num_points`)."""


def num_points(model: ModelShape, points: Points) -> int:
    """How often `measure_layers` reports."""
    return len(points.of(model)) * len(points.sizes) + 1


def measure_layers(
    model: ModelShape,
    gpu_type: str,
    source: LayerSource,
    device: torch.device,
    points: Points,
    budget: Budget,
    report: Report,
) -> Profile:
    """All about one GPU type. Raises `ProfileError` when not even the smallest point fits."""
    times: list[LayerTimes] = []
    figures: list[LayerBytes] = []
    for kind, dtype, seq_len in points.of(model):
        row = _Row(gpu_type, kind, dtype, seq_len)
        found = _measured_row(row, source, device, points.sizes, budget, report)
        times.append(found[0])
        figures.append(found[1])
    report("optimizer")
    optimizer = OptimizerTimes(
        gpu_type=gpu_type, step_s_per_param=_optimizer_s_per_param(device, budget)
    )
    return Profile(model=model, times=tuple(times), bytes=tuple(figures), optimizer=(optimizer,))


@dataclass(frozen=True, slots=True)
class _Row:
    gpu_type: str
    kind: str
    dtype: Dtype
    seq_len: int

    def times(self, sizes: Sequence[int], seconds: Sequence[tuple[float, float]]) -> LayerTimes:
        forward, backward = zip(*seconds, strict=True)
        return LayerTimes(
            gpu_type=self.gpu_type,
            kind=self.kind,
            dtype=self.dtype,
            seq_len=self.seq_len,
            micro_batches=tuple(sizes),
            forward_s=forward,
            backward_s=backward,
        )

    def bytes(self, largest: LayerRun, size: int) -> LayerBytes:
        """Per sample, as the largest micro-batch shows it: what is shared weighs least there."""
        saved, boundary, workspace = largest.measured_bytes()
        return LayerBytes(
            kind=self.kind,
            dtype=self.dtype,
            seq_len=self.seq_len,
            saved_bytes=round(saved / largest.num_layers / size),
            boundary_bytes=round(boundary / size),
            workspace_bytes=round(workspace / size),
        )


def _measured_row(
    row: _Row,
    source: LayerSource,
    device: torch.device,
    sizes: Sequence[int],
    budget: Budget,
    report: Report,
) -> tuple[LayerTimes, LayerBytes]:
    """All sizes that fit, in turn, so that a disturbance does not meet one of them alone."""
    runs = _fitting(row, source, sizes, report)
    parts = [part for run in runs for part in (run.forward, run.backward)]
    seconds = median_seconds(parts, device, replace(budget, seconds=budget.seconds * len(runs)))
    layers = runs[0].num_layers
    pairs = [(f / layers, b / layers) for f, b in zip(seconds[::2], seconds[1::2], strict=True)]
    fitting = sizes[: len(runs)]
    return row.times(fitting, pairs), row.bytes(runs[-1], fitting[-1])


def _fitting(
    row: _Row, source: LayerSource, sizes: Sequence[int], report: Report
) -> list[LayerRun]:
    """Runs of the sizes, smallest first, as far as the device's memory goes."""
    runs: list[LayerRun] = []
    for i, size in enumerate(sizes):
        report(f"{row.kind}, {row.dtype}, {row.seq_len} tokens, micro-batch {size}")
        try:
            run = source.run(row.kind, row.dtype, row.seq_len, size)
            run.forward()
            run.backward()
        except torch.OutOfMemoryError as problem:
            if not runs:
                raise ProfileError(
                    f"{row.kind} in {row.dtype} with a micro-batch of {size} × {row.seq_len} "
                    f"tokens does not fit on {row.gpu_type}; expected shorter or fewer samples"
                ) from problem
            for _ in sizes[i + 1 :]:
                report(f"{row.kind}: larger micro-batches do not fit")
            break
        runs.append(run)
    return runs


def _optimizer_s_per_param(device: torch.device, budget: Budget) -> float:
    """A step of AdamW on float32 masters, with the norm and the scaling of gradients before it."""
    master = torch.nn.Parameter(torch.zeros(_OPTIMIZER_ELEMENTS, device=device))
    gradient = torch.ones_like(master)
    master.grad = gradient
    optimizer = torch.optim.AdamW([master], lr=1e-6, fused=device.type == "cuda" or None)

    def step() -> None:
        torch.linalg.vector_norm(gradient)
        gradient.mul_(1.0)
        optimizer.step()

    (seconds,) = median_seconds((step,), device, budget)
    return seconds / _OPTIMIZER_ELEMENTS


def joined(profiles: Sequence[Profile]) -> Profile:
    """One profile of several GPU types; bytes are those of the first, for they are alike."""
    first = profiles[0]
    return Profile(
        model=first.model,
        times=tuple(entry for each in profiles for entry in each.times),
        bytes=_first_of_each([entry for each in profiles for entry in each.bytes]),
        optimizer=tuple(entry for each in profiles for entry in each.optimizer),
        versions=first.versions,
    )


def _first_of_each(entries: Sequence[LayerBytes]) -> tuple[LayerBytes, ...]:
    found: dict[tuple[str, Dtype, int], LayerBytes] = {}
    for entry in entries:
        found.setdefault((entry.kind, entry.dtype, entry.seq_len), entry)
    return tuple(found.values())
