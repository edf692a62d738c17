"""Bytes of activations of a stage: what each sample in flight keeps, and what a pass adds."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial

from zorse_ds.core.plan import Dtype
from zorse_ds.core.recompute import KEPT, Recomputed
from zorse_ds.cost.dtypes import DTYPE_BYTES, MASTER_BYTES
from zorse_ds.cost.layer_bytes import LayerBytesFigures, bytes_of
from zorse_ds.cost.setting import Setting
from zorse_ds.ranges import Range

PER = 64
"""Samples of the micro-batch that bytes a sample are read from: rounding falls away."""


@dataclass(frozen=True, slots=True)
class StageActivations:
    """Activations of a run of layers; bytes a sample are for samples of the setting's length."""

    kept_per_sample: float
    """Of a sample between its forward and the end of its backward, on the device."""
    host_per_sample: float
    """The same, in host memory."""
    input_per_sample: float
    """Of the message that brings a sample in (0 at the first layer)."""
    output_per_sample: float
    """Of the message that takes it out (0 at the last layer)."""
    segments: tuple["Segment", ...]
    workspaces: Callable[[int], Sequence[int]]
    """Micro-batch size → workspace of each pipeline layer of the model."""

    def extra_bytes(self, size: int, beside: Callable[[Range], float] = lambda _: 0.0) -> float:
        """The most that a pass of `size` samples holds beside what the samples keep.

        In forward and in backward the layers beyond the current one hold nothing (any more).
        `beside`: what else is there while the pass is at some layers.
        """
        workspaces = self.workspaces(size)
        most = later = 0.0
        for segment in reversed(self.segments):
            workspace = max(workspaces[segment.layers.as_slice()]) + beside(segment.layers)
            most = max(most, workspace + segment.moving_per_sample * size - later)
            later += segment.kept_per_sample * size
        return most


@dataclass(frozen=True, slots=True)
class Segment:
    """Layers that recompute takes together, or a single layer."""

    layers: Range
    kept_per_sample: float
    moving_per_sample: float
    """While it runs: what recompute makes anew, and the gradients of its input and output."""


class ActivationTable:
    """Answers for all ranges of one setting's model, each made once."""

    def __init__(self, setting: Setting) -> None:
        self._setting = setting
        self._bytes_of = bytes_of(setting.profile)
        self._figures: dict[Dtype, list[LayerBytesFigures]] = {}
        self._workspaces: dict[tuple[Dtype, int], list[int]] = {}
        self._found: dict[tuple[Range, Dtype, Recomputed, bool], StageActivations] = {}

    def of(
        self,
        layers: Range,
        dtype: Dtype,
        recomputed: Recomputed = KEPT,
        offloaded: bool = False,
    ) -> StageActivations:
        """Activations of `layers`; `offloaded`: what autograd saves goes to host memory."""
        key = (layers, dtype, recomputed, offloaded)
        found = self._found.get(key)
        if found is None:
            found = self._found[key] = self._made(layers, dtype, recomputed, offloaded)
        return found

    def boundary_per_sample(self, layer: int, dtype: Dtype) -> float:
        """What leaves a layer, in bytes a sample."""
        return self._of_dtype(dtype)[layer].boundary / PER

    def _made(
        self, layers: Range, dtype: Dtype, recomputed: Recomputed, offloaded: bool
    ) -> StageActivations:
        runs = recomputed.runs(layers, self._setting.recomputes)
        segments = [self._segment(run, again, dtype, offloaded) for run, again in runs]
        first, last = layers.start > 0, layers.stop < self._setting.model.num_layers
        arriving = self.boundary_per_sample(layers.start - 1, dtype) if first else 0.0
        leaving = self.boundary_per_sample(layers.stop - 1, dtype) if last else 0.0
        kept = sum(segment.kept_per_sample for segment in segments)
        host = 0.0
        if offloaded:
            plain = self.of(layers, dtype, recomputed)
            host = plain.kept_per_sample - kept
        workspaces = partial(self._workspaces_at, dtype)
        return StageActivations(kept, host, arriving, leaving, tuple(segments), workspaces)

    def _segment(self, run: Range, again: bool, dtype: Dtype, offloaded: bool) -> Segment:
        figures = self._of_dtype(dtype)[run.as_slice()]
        saved = sum(each.saved for each in figures) / PER
        entry = self.boundary_per_sample(run.start - 1, dtype) if run.start else 0.0
        last = self._setting.model.shapes[run.stop - 1]
        # The loss runs behind the layers: nothing recomputes or offloads what it saves.
        loss = MASTER_BYTES * last.vocab * self._setting.seq_len if last.role == "head" else 0.0
        if again:
            kept = entry + loss
            # Of what is made anew, a float32 norm saves the very input that is kept.
            made = saved - loss - (entry if dtype == "float32" else 0.0)
        else:
            kept, made = saved, 0.0
        if offloaded:
            made += entry if again else self._operands(run.start, dtype)
            kept = loss
        return Segment(run, kept, made + entry + figures[-1].boundary / PER)

    def _operands(self, layer: int, dtype: Dtype) -> float:
        """Bytes a sample that come back from the host at once: two operands of one operation."""
        shape = self._setting.model.shapes[layer]
        widest = max(shape.ffn, 2 * shape.hidden) if shape.role == "block" else shape.hidden
        return 2.0 * DTYPE_BYTES[dtype] * widest * self._setting.seq_len

    def _of_dtype(self, dtype: Dtype) -> list[LayerBytesFigures]:
        found = self._figures.get(dtype)
        if found is None:
            found = self._figures[dtype] = self._per_layer(dtype, PER)
        return found

    def _workspaces_at(self, dtype: Dtype, size: int) -> Sequence[int]:
        found = self._workspaces.get((dtype, size))
        if found is None:
            figures = self._per_layer(dtype, size)
            found = self._workspaces[dtype, size] = [each.workspace for each in figures]
        return found

    def _per_layer(self, dtype: Dtype, size: int) -> list[LayerBytesFigures]:
        model, length = self._setting.model, self._setting.seq_len
        by_kind = {
            kind: self._bytes_of(kind, shape, dtype, length, size)
            for kind, shape in model.kinds.items()
        }
        return [by_kind[kind] for kind in model.layers]


@lru_cache(maxsize=8)
def activation_table(setting: Setting) -> ActivationTable:
    """The one `ActivationTable` of a setting."""
    return ActivationTable(setting)
