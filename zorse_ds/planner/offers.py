"""Phase 2, settings: for every number of layers, the best settings of a group that fit its memory.

A closed form of seconds and bytes, for all micro-batch sizes, recompute patterns, ZeRO levels and
offloads at once. Its bytes are close to those of `cost.memory`, which has the last word.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import product

import numpy as np
from numpy.typing import NDArray

from zorse_ds.cost.dtypes import DTYPE_BYTES, MASTER_BYTES
from zorse_ds.cost.optimizer import step_s
from zorse_ds.cost.setting import Setting
from zorse_ds.planner.counts import Array, counts_of
from zorse_ds.planner.draft import ROUNDING, GroupDraft, Offload, ZeroLevel
from zorse_ds.planner.layers import Pace
from zorse_ds.planner.seats import Members, Seat
from zorse_ds.planner.settings import SPARE_SHARE, levels_of, offloads_of, patterns_of, sizes_of
from zorse_ds.planner.units import Unit

Flags = NDArray[np.bool_]
MESSAGES = 3
"""On their way to a rank at once."""
MOST = 3.0
"""Times its share of the layers that a group may have."""
AMPLE = 2
"""Times its likely layers that a group needs room for before host memory is left out of account."""


@dataclass(frozen=True, slots=True)
class Option:
    """Settings of a group."""

    size: int
    recompute: tuple[float, ...]
    zero_level: ZeroLevel
    offload: Offload

    def group(self, units: tuple[Unit, ...], seat: Seat) -> GroupDraft:
        """The group that does so."""
        return GroupDraft(
            units, self.size, seat.dtype, self.zero_level, self.recompute, self.offload
        )


@dataclass(frozen=True)
class Offers:
    """The options of a seat."""

    options: list[Option]
    merit: Array
    """(option, count): seconds of a step that it accounts for; infinite where it does not fit."""
    seconds: Array
    """(option, count): that the group is busy in a step."""

    def best(self, count: int) -> Option | None:
        """The option of the least merit with which `count` layers fit, if any."""
        if count >= self.merit.shape[1]:
            return None
        row = int(self.merit[:, count].argmin())
        return self.options[row] if np.isfinite(self.merit[row, count]) else None

    def pace(self, count: int) -> Pace:
        """What layers cost with the best option for `count` of them, which is two at least."""
        row = int(self.merit[:, count].argmin())
        seconds, fitting = self.seconds[row], np.isfinite(self.merit.min(axis=0))
        layer_s = float(seconds[count] - seconds[count - 1])
        return Pace(layer_s, float(seconds[count]) - count * layer_s, int(fitting.nonzero()[0][-1]))

    def ranked(self, count: int) -> list[Option]:
        """All options with which `count` layers fit, the best first."""
        if count >= self.merit.shape[1]:
            return []
        column = self.merit[:, count]
        rows = np.argsort(column, kind="stable")
        return [self.options[row] for row in rows if np.isfinite(column[row])]

    @property
    def costs(self) -> Array:
        """For each count the seconds of the best option; infinite where none fits."""
        rows = self.merit.argmin(axis=0)
        columns = np.arange(len(rows))
        fits = np.isfinite(self.merit[rows, columns])
        return np.where(fits, self.seconds[rows, columns], np.inf)


def offers_of(seat: Seat, setting: Setting, likely: float) -> Offers:
    """What a seat offers; nothing costly where plain settings have room for many more layers.

    Without it, host memory and gathered parameters are offered too. `likely`: layers.
    """
    plain = _offers(seat, setting, False)
    enough = min(int(AMPLE * likely) + 2, plain.merit.shape[1] - 1)
    least = min(seat.visits, enough)
    if np.isfinite(plain.costs[least : enough + 1]).all():
        return plain
    return _offers(seat, setting, True)


@lru_cache(maxsize=16384)
def _offers(seat: Seat, setting: Setting, every: bool) -> Offers:
    alike = replace(seat, held=0.0, tightness=1.0)
    return _form(alike, setting, every).offers(seat.held, seat.tightness)


@lru_cache(maxsize=2048)
def _form(seat: Seat, setting: Setting, every: bool) -> "_Form":
    return _Form(seat, setting, every)


class _Form:
    """The arrays; axes are size, recompute pattern, ZeRO level, offload and number of layers.

    Of the seat, what is in flight and the tightness come later, for they change most often.
    """

    def __init__(self, seat: Seat, setting: Setting, every: bool) -> None:
        self.seat, self.setting = seat, setting
        self.counts = counts_of(setting, seat.place)
        self.most = min(
            self.counts.most, int(MOST * seat.weight * self.counts.most) + seat.visits + 4
        )
        """Layers of the group: many more than its share are not looked at."""
        self.sizes = sizes_of(seat.width, setting, seat.batch)
        self.patterns = patterns_of(seat.visits)
        self.shares = [
            np.mean([self.counts.again(share) for share in pattern], axis=0)
            for pattern in self.patterns
        ]
        """Of the blocks that recompute, over counts."""
        self.levels = levels_of(seat.width, seat.visits)
        self.offloads = offloads_of(setting)
        if not every:
            self.levels, self.offloads = self.levels[:1], self.offloads[:1]
        self.options = [
            Option(*choice)
            for choice in product(self.sizes, self.patterns, self.levels, self.offloads)
        ]
        self._set_seconds()
        self._set_bytes()

    def _set_seconds(self) -> None:
        members = self.seat.members
        each_s = [self._sample_s(own) for own in members]
        speed = sum(own.number / s for own, s in zip(members, each_s, strict=True))
        self.samples = [self.seat.batch / (s * speed) for s in each_s]
        """Of the batch that a rank of each type runs."""
        busy = self.seat.batch / speed + np.minimum.reduce(each_s) / 2
        self.seconds = busy + self._update_s()
        fill = np.maximum.reduce(each_s) * self._axis(self.sizes, 0) / self.seat.visits
        self.merit = self.seat.weight * self.seconds + fill

    def _set_bytes(self) -> None:
        """What every rank needs where the pipeline turns around, and at the last reduction."""
        self.sharded = self._sharded()
        self.waiting, self.turning = self._kept()
        # A rank goes on while the gradients of its stage before wait for others of the group.
        opened = 2 if self.seat.width > 1 and self.seat.visits > 1 else 1
        self.early = self._parameters(1) + self._passing(-1)
        self.late = self._parameters(opened) + self._passing(0)

    def offers(self, held: float, tightness: float) -> Offers:
        """All options, with infinite merit where they do not fit."""
        fits = self._fits(held, tightness)
        fits[..., : self.seat.visits] = False
        merit = np.where(fits, self.merit, np.inf)
        seconds = np.broadcast_to(self.seconds, merit.shape)
        flat = (len(self.options), -1)
        return Offers(self.options, merit.reshape(flat), seconds.reshape(flat))

    def _fits(self, held: float, tightness: float) -> Flags:
        free_turning = np.zeros(1)
        free_ending = np.zeros(1)
        fits = np.ones(1, dtype=bool)
        sizes, batch = self._axis(self.sizes, 0), self.seat.batch
        for own, samples in zip(self.seat.members, self.samples, strict=True):
            room = (1 - SPARE_SHARE) * own.usable_bytes - self.setting.reserve_bytes
            room = room / tightness
            flying = sizes * np.ceil(held / batch * samples / sizes - ROUNDING)
            kept = self.waiting * samples
            early = room - self.early - kept - self.turning * np.minimum(samples, flying)
            late = room - self.late - kept / max(1, self.seat.visits - 1)
            fits = fits & (early >= 0) & (late >= 0)
            free_turning = free_turning + own.number * np.maximum(early, 0.0)
            free_ending = free_ending + own.number * np.maximum(late, 0.0)
        turning, ending = self.sharded
        found: Flags = fits & (free_turning >= turning) & (free_ending >= ending)
        return found

    def _axis(self, values: Sequence[float], axis: int) -> Array:
        """One value an entry of an axis."""
        shape = [1] * 5
        shape[axis] = len(values)
        return np.array(values, dtype=float).reshape(shape)

    def _grid(self, axes: tuple[int, ...], arrays: list[Array]) -> Array:
        """Arrays over counts, one for each combination of entries of some axes."""
        lengths = (len(self.sizes), len(self.patterns), len(self.levels), len(self.offloads))
        shape = [length if axis in axes else 1 for axis, length in enumerate(lengths)]
        return np.stack([array[: self.most + 1] for array in arrays]).reshape(*shape, -1)

    def _sample_s(self, own: Members) -> Array:
        """Seconds of one sample on a type, its copies to and from host memory included."""
        found = [self.counts.seconds(own.gpu_type, self.seat.dtype, size) for size in self.sizes]
        seconds = self._grid((0,), [plain for plain, _ in found])
        seconds = seconds + self._grid((1,), self.shares) * self._grid((0,), [a for _, a in found])
        if len(self.offloads) > 1:
            seconds = seconds + 2 * self._hosted() / own.host_bytes_per_s
        found_s: Array = np.maximum(seconds, 1e-12)
        return found_s

    def _hosted(self) -> Array:
        """Bytes of a sample in host memory."""
        rows = []
        for pattern, offload in product(self.patterns, self.offloads):
            kept = [self.counts.kept(self.seat.dtype, share, True)[1] for share in pattern]
            hosted = np.mean(kept, axis=0)
            rows.append(hosted if offload == "params+activations" else 0.0 * hosted)
        return self._grid((1, 3), rows)

    def _update_s(self) -> Array:
        """Reductions, gathers, copies and steps in host memory of a step."""
        params = self.counts.params
        pace, element = self.seat.pace, DTYPE_BYTES[self.seat.dtype]
        slowest = min(self.seat.members, key=lambda own: own.host_bytes_per_s)
        kind = self.setting.cluster.known_types[slowest.gpu_type]
        one = step_s(self.setting, kind, self.seat.dtype, 1.0, on_host=True)
        one += 2 * MASTER_BYTES / slowest.host_bytes_per_s
        rows = []
        for level, offload in product(self.levels, self.offloads):
            seconds = pace * element * params.owned
            if level:
                seconds = seconds + pace * element * params.held
            if offload != "none":
                seconds = seconds + params.owned / self.seat.width * one
            rows.append(seconds)
        return self._grid((2, 3), rows)

    def _sharded(self) -> tuple[Array, Array]:
        """Bytes of state that are cut over the ranks: at the turn, and at the last reduction."""
        params = self.counts.params
        element = DTYPE_BYTES[self.seat.dtype]
        master = MASTER_BYTES if element != MASTER_BYTES else 0
        turning, ending = [], []
        for level, offload in product(self.levels, self.offloads):
            if offload == "none":
                state = (self.setting.optimizer_bytes + master) * params.owned
                state = state + (element * params.held if level == 3 else 0.0)
                reduced = MASTER_BYTES * params.owned if level else 0.0 * params.owned
            else:
                state = reduced = 0.0 * params.owned
            turning.append(state)
            ending.append(state + reduced + MASTER_BYTES * self._widest(params.owned))
        return self._grid((2, 3), turning), self._grid((2, 3), ending)

    def _kept(self) -> tuple[Array, Array]:
        """Bytes of a sample: in the stages where it waits, and in the one where it turns."""
        waiting, turning = [], []
        for pattern, offload in product(self.patterns, self.offloads):
            hosted = offload == "params+activations"
            kept = self.counts.kept(self.seat.dtype, pattern[0], hosted)[0]
            waiting.append(kept - self._turning(kept))
            turning.append(self._turning(self.counts.kept(self.seat.dtype, pattern[-1], hosted)[0]))
        return self._grid((1, 3), waiting), self._grid((1, 3), turning)

    def _turning(self, values: Array) -> Array:
        return self.counts.turning(values, self.seat.visits)

    def _widest(self, values: Array) -> Array:
        return self.counts.widest(values, self.seat.visits)

    def _parameters(self, num_opened: int) -> Array:
        """Whole or gathered parameters, and the gradients of so many stages."""
        params = self.counts.params
        element = DTYPE_BYTES[self.seat.dtype]
        gathered = np.minimum(params.held, 2 * self._widest(params.held))
        rows = []
        for level in self.levels:
            whole = params.held if level < 3 else gathered
            opened = num_opened * self._widest(params.trained) if level >= 2 else params.trained
            rows.append(element * whole + MASTER_BYTES * opened)
        return self._grid((2,), rows)

    def _passing(self, visit: int) -> Array:
        """What a pass of a visit adds, and messages."""
        dtype, every = self.seat.dtype, np.ones(self.counts.most + 1)
        message = MESSAGES * self.counts.message(dtype)
        rows = []
        for size, pattern, offload in product(self.sizes, self.patterns, self.offloads):
            hosted = offload == "params+activations"
            extra = self.counts.extra(dtype, pattern[visit], hosted, size)
            rows.append(every * (message * size + extra))
        return self._grid((0, 1, 3), rows)
