"""Which lots make the ranks of a group end together, at measured paces."""

from collections.abc import Iterator, Mapping
from functools import cached_property

from zorse_ds.core.lots import Lot, lot_between, moved_samples, with_group, with_lot
from zorse_ds.core.plan import GpuGroup, Plan
from zorse_ds.schedule.paced import Paces

LOTS = (1, 2, 4)
"""How many are tried at once: a pipeline may gain by the second what the first alone does not."""


def may_move(group: GpuGroup) -> bool:
    """Whether shares of a group can move at all: between two ranks that have some.

    Where gradients are summed after every micro-batch, ranks go in step: all wait for the slowest
    in every round, so more rounds for the others would gain nothing.
    """
    return group.reduce_after == "step" and sum(bool(gpu.micro_batches) for gpu in group.gpus) > 1


class Levelling:
    """Lots by group that would level a plan. `most_moved`: share of a group's samples (0–1)."""

    def __init__(self, plan: Plan, paces: Paces, most_moved: float) -> None:
        self.plan, self.paces = plan, paces
        self._most_moved = most_moved
        self._seconds: dict[int, float] = {}
        for (rank, _), pace in paces.items():
            self._seconds[rank] = self._seconds.get(rank, 0.0) + pace.both_s
        self._lots = {
            group.name: list(self._level(group)) if may_move(group) else [] for group in plan.groups
        }

    @cached_property
    def names(self) -> list[str]:
        """Groups that are not level, the one first that has most to save."""
        uneven = [group for group in self.plan.groups if self._lots[group.name]]
        saved_s = {group.name: self._saved_s(group) for group in uneven}
        return sorted(saved_s, key=lambda name: (-saved_s[name], name))

    @property
    def most_saved_s(self) -> float:
        """By how much some group's busiest rank would be less busy."""
        return self._saved_s(self.plan.group_named(self.names[0])) if self.names else 0.0

    def after(self, parts: Mapping[str, float]) -> Plan:
        """The plan when these parts (0–1) of the lots of these groups have moved."""
        plan = self.plan
        for name, part in parts.items():
            number = round(part * len(self._lots[name]))
            plan = with_group(plan, self._moved(plan.group_named(name), number))
        return plan

    def neighbours(self, plan: Plan) -> Iterator[Plan]:
        """Some lots more from a group's busiest rank to the least busy, or as many back to it."""
        for group in filter(may_move, plan.groups):
            busy_s = self._busy_s(group)
            ranks = [gpu.rank for gpu in group.gpus if gpu.micro_batches]
            by_end = sorted(ranks, key=lambda rank: (-busy_s[rank], rank))
            first, last = by_end[0], by_end[-1]
            for number in LOTS:
                for giver, taker in ((first, last), (last, first)):
                    changed = _with_lots(group, giver, taker, number)
                    if changed is not None and self._is_little(changed):
                        yield with_group(plan, changed)

    def _is_little(self, changed: GpuGroup) -> bool:
        """What has moved in a group so far is within the bound."""
        plan, before = self.plan, self.plan.group_named(changed.name)
        moved = moved_samples(plan, with_group(plan, changed))
        lots = (lot_between(a, b) for a in before.gpus for b in before.gpus if a.rank != b.rank)
        least = min((lot.num_samples for lot in lots if lot is not None), default=0)
        return moved <= max(least, self._most_moved * plan.global_batch_size)

    def _moved(self, group: GpuGroup, number: int) -> GpuGroup:
        for lot in self._lots[group.name][:number]:
            group = with_lot(group, lot)
        return group

    def _saved_s(self, group: GpuGroup) -> float:
        level = self._moved(group, len(self._lots[group.name]))
        return max(self._busy_s(group).values()) - max(self._busy_s(level).values())

    def _level(self, group: GpuGroup) -> Iterator[Lot]:
        """Lots, one after the other, each of which makes the busiest rank less busy."""
        left = self._most_moved * sum(gpu.num_samples for gpu in group.gpus)
        is_first = True
        while True:
            lots = [lot for lot in self._lots_of(group) if is_first or lot.num_samples <= left]
            busy_s = self._busy_s(group)
            ends = [(self._end_s(busy_s, lot), lot.num_samples, lot.taker, lot) for lot in lots]
            if not ends or min(ends)[0] >= max(busy_s.values()):
                return
            lot = min(ends)[-1]
            yield lot
            group, left, is_first = with_lot(group, lot), left - lot.num_samples, False

    def _end_s(self, busy_s: Mapping[int, float], lot: Lot) -> float:
        """When the later of the two ends after a lot has moved."""
        giver = busy_s[lot.giver] - lot.num_samples * self._seconds[lot.giver]
        return max(giver, busy_s[lot.taker] + lot.num_samples * self._seconds[lot.taker])

    def _busy_s(self, group: GpuGroup) -> dict[int, float]:
        return {gpu.rank: gpu.num_samples * self._seconds.get(gpu.rank, 0.0) for gpu in group.gpus}

    def _lots_of(self, group: GpuGroup) -> list[Lot]:
        """From the busiest rank to any other."""
        busy_s = self._busy_s(group)
        giver = max(group.gpus, key=lambda gpu: (busy_s[gpu.rank], -gpu.rank))
        found = (lot_between(giver, gpu) for gpu in group.gpus if gpu.rank != giver.rank)
        return [lot for lot in found if lot is not None]


def _with_lots(group: GpuGroup, giver: int, taker: int, number: int) -> GpuGroup | None:
    """The group after so many lots have moved; None if it has not so many."""
    for _ in range(number):
        gpus = {gpu.rank: gpu for gpu in group.gpus}
        lot = lot_between(gpus[giver], gpus[taker])
        if lot is None:
            return None
        group = with_lot(group, lot)
    return group
