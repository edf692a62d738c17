"""What the first, some middle or the last n layers of a model take, for every n at once."""

from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np
from numpy.typing import NDArray

from zorse_ds.core.plan import Dtype
from zorse_ds.core.recompute import KEPT, first_of
from zorse_ds.cost.activations import activation_table
from zorse_ds.cost.compute import compute_times
from zorse_ds.cost.setting import Setting
from zorse_ds.cost.state import StageParams, params_of
from zorse_ds.planner.draft import ROUNDING
from zorse_ds.ranges import Range

Array = NDArray[np.float64]
"""Entry n is about n layers, 0 … all of them."""


@dataclass(frozen=True)
class Place:
    """Where a group stands in the pipeline."""

    first: bool
    last: bool


@dataclass(frozen=True)
class ParamCounts:
    """Parameters over counts."""

    held: Array
    owned: Array
    trained: Array


class Counts:
    """Figures over the number of layers of a group at a place.

    The first group has the embedding, the last the head; one between them is taken to have blocks
    from the model's first on, and at least one block is left out of what it may have.
    """

    def __init__(self, setting: Setting, place: Place) -> None:
        self.setting, self.place = setting, place
        self.most = setting.model.num_layers
        """Of layers; `place` may leave fewer, which is the caller's to know."""
        self._seconds: dict[tuple[str, Dtype, int], tuple[Array, Array]] = {}
        self._again: dict[float, Array] = {}
        self._bytes: dict[tuple[Dtype, float, bool], tuple[Array, Array]] = {}
        self._extra: dict[tuple[Dtype, bool, bool, int], float] = {}

    def layers(self, number: int) -> Range:
        """The layers that `number` of them stand for."""
        if self.place.first:
            return Range(0, number)
        if self.place.last:
            return Range(self.most - number, self.most)
        return Range(1, min(1 + number, self.most))

    @cached_property
    def params(self) -> ParamCounts:
        """Parameters, as `cost.state.params_of` counts them."""
        found = [StageParams(0, 0)]
        found += [params_of(self.setting.model, self.layers(n)) for n in range(1, self.most + 1)]
        return ParamCounts(
            np.array([each.held for each in found], dtype=float),
            np.array([each.owned for each in found], dtype=float),
            np.array([each.trained for each in found], dtype=float),
        )

    def seconds(self, gpu_type: str, dtype: Dtype, size: int) -> tuple[Array, Array]:
        """Of one sample in micro-batches of `size`: both passes, and what recompute repeats."""
        key = (gpu_type, dtype, size)
        if key not in self._seconds:
            sums = compute_times(self.setting).sums(gpu_type, dtype, size)
            plain = np.array(sums.forward) + np.array(sums.backward)
            self._seconds[key] = (
                self._over_counts(plain) / size,
                self._over_counts(np.array(sums.again)) / size,
            )
        return self._seconds[key]

    def again(self, share: float) -> Array:
        """The share of blocks that is recomputed if a share of a stage is: whole blocks."""
        if share not in self._again:
            blocks = np.maximum(self._blocks, 1.0)
            self._again[share] = np.ceil(share * blocks - ROUNDING) / blocks
        return self._again[share]

    @cached_property
    def _blocks(self) -> Array:
        counts = [self.setting.recomputes(layer) for layer in range(self.most)]
        return self._over_counts(np.cumsum([0.0, *counts]))

    def kept(self, dtype: Dtype, share: float, offloaded: bool) -> tuple[Array, Array]:
        """Bytes that a sample in flight keeps: on the device and in host memory."""
        key = (dtype, share, offloaded)
        if key not in self._bytes:
            part = self.again(share)
            some, none = (self._all_kept(dtype, every, offloaded) for every in (True, False))
            device, host = (part * a + (1 - part) * b for a, b in zip(some, none, strict=True))
            self._bytes[key] = device, host
        return self._bytes[key]

    def _all_kept(self, dtype: Dtype, again: bool, offloaded: bool) -> tuple[Array, Array]:
        """The same where all blocks are recomputed, or none is."""
        table = activation_table(self.setting)
        each = [
            table.of(one, dtype, first_of(one) if again else KEPT, offloaded)
            for one in (Range(layer, layer + 1) for layer in range(self.most))
        ]
        device = np.cumsum([0.0, *(one.kept_per_sample for one in each)])
        host = np.cumsum([0.0, *(one.host_per_sample for one in each)])
        return self._over_counts(device), self._over_counts(host)

    def extra(self, dtype: Dtype, share: float, offloaded: bool, size: int) -> float:
        """Bytes that a pass adds at its widest layer."""
        key = (dtype, share > 0, offloaded, size)
        if key not in self._extra:
            some = self.layers(min(2, self.most))
            again = first_of(some) if share else KEPT
            table = activation_table(self.setting)
            self._extra[key] = table.of(some, dtype, again, offloaded).extra_bytes(size)
        return self._extra[key]

    def turning(self, values: Array, visits: int) -> Array:
        """Of figures over counts, the part of the stage where the pipeline turns around."""
        numbers = np.arange(self.most + 1)
        if not self.place.last:
            found: Array = values[-(-numbers // visits)]
        elif self.place.first:
            found = values - values[numbers - numbers // visits]
        else:
            found = values[numbers // visits]
        return found

    def widest(self, values: Array, visits: int) -> Array:
        """Of figures over counts, the part of the stage that has most."""
        sizes = -(-np.arange(self.most + 1) // visits)
        if self.place.first or not self.place.last:
            earlier = values[sizes]
        else:
            earlier = values[np.minimum(sizes + 1, self.most)] - values[1]
        found: Array = np.maximum(earlier, self.turning(values, visits))
        return found

    def message(self, dtype: Dtype) -> float:
        """Bytes of a sample on its way between two stages."""
        return activation_table(self.setting).boundary_per_sample(0, dtype)

    def _over_counts(self, sums: Array) -> Array:
        """From running sums over the model to sums over counts at this place."""
        ranges = [self.layers(n) for n in range(self.most + 1)]
        starts = np.array([layers.start for layers in ranges])
        stops = np.array([layers.stop for layers in ranges])
        found: Array = sums[stops] - sums[starts]
        return found


@lru_cache(maxsize=64)
def counts_of(setting: Setting, place: Place) -> Counts:
    """The one `Counts` of a setting and place."""
    return Counts(setting, place)
