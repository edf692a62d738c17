"""Layer times of a profile where it has them, estimated ones elsewhere."""

from bisect import bisect_left
from collections.abc import Mapping, Sequence

from zorse_ds.core.gpus import GpuType
from zorse_ds.core.model import LayerShape
from zorse_ds.core.plan import Dtype
from zorse_ds.core.profile import LayerTimes, Profile
from zorse_ds.cost.estimate import EstimatedTimes
from zorse_ds.cost.setting import LayerTimer, PassTimes
from zorse_ds.errors import ProfileError

_Key = tuple[str, str, Dtype]


def timer_of(profile: Profile | None, types: Mapping[str, GpuType] | None = None) -> LayerTimer:
    """A timer in which measured beats estimated, entry by entry.

    `types` (default: the catalogue) are what can be estimated; a type that the profile has may be
    missing there.
    """
    estimated = EstimatedTimes(types)
    return estimated if profile is None or not profile.times else ProfiledTimes(profile, estimated)


class ProfiledTimes:
    """A `LayerTimer` over a profile's entries.

    An entry of the same type, kind and dtype is needed. At its length, sizes between the measured
    ones lie on a straight line and those beyond on the last one carried on. At another length the
    estimate is scaled by measured over estimated at the nearest length; where the type cannot be
    estimated, the entry by FLOPs.
    """

    def __init__(self, profile: Profile, estimated: LayerTimer) -> None:
        self._estimated = estimated
        self._entries: dict[_Key, dict[int, LayerTimes]] = {}
        for entry in profile.times:
            lengths = self._entries.setdefault((entry.gpu_type, entry.kind, entry.dtype), {})
            lengths.setdefault(entry.seq_len, entry)
        self._found: dict[tuple[_Key, LayerShape, int, int], PassTimes] = {}

    def __call__(
        self, gpu_type: str, kind: str, shape: LayerShape, dtype: Dtype, seq_len: int, size: int
    ) -> PassTimes:
        """See `LayerTimer`. Raises `ProfileError` where nothing is measured or can be estimated."""
        key = ((gpu_type, kind, dtype), shape, seq_len, size)
        found = self._found.get(key)
        if found is None:
            found = self._found[key] = self._looked_up(*key)
        return found

    def _looked_up(self, key: _Key, shape: LayerShape, seq_len: int, size: int) -> PassTimes:
        lengths = self._entries.get(key)
        if not lengths:
            return self._without_entry(key, shape, seq_len, size)
        nearest = min(lengths, key=lambda each: (abs(each - seq_len), each))
        if nearest == seq_len:
            return _measured(lengths[seq_len], size)
        return self._scaled(lengths[nearest], shape, seq_len, size)

    def _without_entry(self, key: _Key, shape: LayerShape, seq_len: int, size: int) -> PassTimes:
        try:
            return self._estimated(*key[:2], shape, key[2], seq_len, size)
        except ProfileError as problem:
            measured = sorted(
                {f"{each[1]} in {each[2]}" for each in self._entries if each[0] == key[0]}
            )
            if not measured:
                raise
            raise ProfileError(
                f"the profile has no times of {key[1]} in {key[2]} on {key[0]}, a type that cannot "
                f"be estimated; expected them beside {', '.join(measured)}"
            ) from problem

    def _scaled(self, entry: LayerTimes, shape: LayerShape, seq_len: int, size: int) -> PassTimes:
        measured = _measured(entry, size)

        def estimate(length: int) -> PassTimes:
            return self._estimated(entry.gpu_type, entry.kind, shape, entry.dtype, length, size)

        try:
            here, there = estimate(seq_len), estimate(entry.seq_len)
        except ProfileError:
            work = _work(shape, seq_len) / _work(shape, entry.seq_len)
            return PassTimes(measured.forward_s * work, measured.backward_s * work, "interpolated")
        return PassTimes(
            measured.forward_s * here.forward_s / there.forward_s,
            measured.backward_s * here.backward_s / there.backward_s,
            "interpolated",
        )


def _measured(entry: LayerTimes, size: int) -> PassTimes:
    sizes = entry.micro_batches
    return PassTimes(
        _on_lines(sizes, entry.forward_s, size),
        _on_lines(sizes, entry.backward_s, size),
        "measured" if size in sizes else "interpolated",
    )


def _on_lines(sizes: Sequence[int], seconds: Sequence[float], size: int) -> float:
    """On the line through the two neighbours; with one size in proportion."""
    if len(sizes) == 1:
        return seconds[0] * size / sizes[0]
    right = min(max(bisect_left(sizes, size), 1), len(sizes) - 1)
    low, high = sizes[right - 1], sizes[right]
    slope = (seconds[right] - seconds[right - 1]) / (high - low)
    value = seconds[right - 1] + slope * (size - low)
    # A steep line must not make a smaller or larger micro-batch free.
    nearest = seconds[0] / sizes[0] if size < low else seconds[-1] / sizes[-1]
    return value if low <= size <= high else max(value, 0.5 * nearest * size)


def _work(shape: LayerShape, seq_len: int) -> float:
    """FLOPs, or tokens where there are none."""
    return shape.forward_flops(seq_len) or float(seq_len)
