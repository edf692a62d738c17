"""Seconds of running layers: sums over a range, kept per GPU type, dtype and micro-batch size."""

from functools import lru_cache
from itertools import accumulate

from zorse_ds.core.plan import Dtype
from zorse_ds.core.recompute import KEPT, Recomputed
from zorse_ds.cost.setting import Setting
from zorse_ds.ranges import Range

BEST_OF_SIZES = range(1, 17)
"""Micro-batch sizes that the ceiling looks at."""


class ComputeTimes:
    """Running sums over a model's layers, so that any range costs two look-ups."""

    def __init__(self, setting: Setting) -> None:
        self._setting = setting
        self._sums: dict[tuple[str, Dtype, int], LayerSums] = {}

    def sums(self, gpu_type: str, dtype: Dtype, size: int) -> "LayerSums":
        """The running sums for micro-batches of `size` samples on a type."""
        key = (gpu_type, dtype, size)
        found = self._sums.get(key)
        if found is None:
            found = self._sums[key] = LayerSums(self._setting, gpu_type, dtype, size)
        return found


class LayerSums:
    """Seconds of layers 0 … i, in lists with a leading 0."""

    def __init__(self, setting: Setting, gpu_type: str, dtype: Dtype, size: int) -> None:
        model = setting.model
        times = {
            kind: setting.timer(gpu_type, kind, shape, dtype, setting.seq_len, size)
            for kind, shape in model.kinds.items()
        }
        forward = [times[kind].forward_s for kind in model.layers]
        again = [
            seconds if setting.recomputes(layer) else 0.0 for layer, seconds in enumerate(forward)
        ]
        self.forward = [0.0, *accumulate(forward)]
        self.backward = [0.0, *accumulate(times[kind].backward_s for kind in model.layers)]
        self.again = [0.0, *accumulate(again)]
        """Of the forward passes that recompute repeats."""
        self.measured = all(times[kind].source == "measured" for kind in set(model.layers))

    def forward_s(self, layers: Range) -> float:
        """One micro-batch forward through `layers`."""
        return self.forward[layers.stop] - self.forward[layers.start]

    def backward_s(self, layers: Range, recomputed: Recomputed = KEPT) -> float:
        """One micro-batch backward through `layers`, of which some run forward once more."""
        again = recomputed.layers.intersect(layers)
        seconds = self.backward[layers.stop] - self.backward[layers.start]
        return seconds + self.again[again.stop] - self.again[again.start]


@lru_cache(maxsize=8)
def compute_times(setting: Setting) -> ComputeTimes:
    """The one `ComputeTimes` of a setting."""
    return ComputeTimes(setting)


def forward_s(
    setting: Setting, rank: int, layers: Range, size: int, dtype: Dtype | None = None
) -> float:
    """Seconds of `size` samples forward through `layers` on a rank; `dtype`: of its group."""
    kind = setting.cluster.gpus[rank].type.name
    return compute_times(setting).sums(kind, dtype or setting.dtype, size).forward_s(layers)


def backward_s(
    setting: Setting,
    rank: int,
    layers: Range,
    size: int,
    recomputed: Recomputed = KEPT,
    dtype: Dtype | None = None,
) -> float:
    """Seconds of `size` samples backward through `layers` on a rank; `dtype`: of its group."""
    kind = setting.cluster.gpus[rank].type.name
    sums = compute_times(setting).sums(kind, dtype or setting.dtype, size)
    return sums.backward_s(layers, recomputed)


@lru_cache(maxsize=1024)
def best_samples_per_s(setting: Setting, gpu_type: str, dtype: Dtype) -> float:
    """What one GPU alone would do with all the layers, full recompute and memory without end.

    That is 1 / (2·forward + backward) of a sample, at the best micro-batch size of 1 to 16.
    """
    whole = Range(0, setting.model.num_layers)
    times = compute_times(setting)

    def seconds(size: int) -> float:
        sums = times.sums(gpu_type, dtype, size)
        return 2 * sums.forward_s(whole) + sums.backward_s(whole)

    return max(size / seconds(size) for size in BEST_OF_SIZES)
