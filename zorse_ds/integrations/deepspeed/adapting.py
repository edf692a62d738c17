"""`zorse.adapt_shares`: micro-batches move between ranks of a group when their speeds change."""

from collections.abc import Iterator
from typing import Any

from deepspeed.utils import logger

from zorse_ds.core.lots import moved_samples
from zorse_ds.core.plan import Plan
from zorse_ds.errors import WorldError
from zorse_ds.integrations.deepspeed.config import AdaptSettings
from zorse_ds.integrations.deepspeed.traces import Traces
from zorse_ds.planner.adapting import RankFacts, ShareChange, ShareDecider, ShareRule
from zorse_ds.planner.levelling import may_move
from zorse_ds.runtime.dist_world import DistWorld
from zorse_ds.runtime.stopwatch import Measured
from zorse_ds.schedule.paced import Pace


class Adapting:
    """Measures each step, and puts another trace in force for the next where that pays.

    The plan that was given stays the one that is saved and that others resume under. Off unless
    asked for. Collective: every rank constructs it, and calls `after_step`.
    """

    def __init__(
        self,
        world: DistWorld,
        plan: Plan,
        traces: Traces,
        settings: AdaptSettings | None,
    ) -> None:
        self._world, self._traces = world, traces
        self._decider: ShareDecider | None = None
        self._steps, self._told_of_memory = 0, False
        self.ran = plan
        """What the last step ran."""
        self.last: ShareChange | None = None
        """What it led to."""
        if settings is None:
            return
        if not any(map(may_move, plan.groups)):
            self._tell("zorse.adapt_shares has no effect: no group has two ranks to move between")
            return
        rule = ShareRule(settings.window, settings.least_gain, settings.most_moved)
        self._decider = ShareDecider(plan, rule)

    @property
    def is_on(self) -> bool:
        """It wants to know what steps measured."""
        return self._decider is not None

    def after_step(self, number: int, num_samples: int, measured: Measured | None) -> None:
        """Collective: decide from what all ranks measured of step `number`."""
        self.last, self.ran = None, self._traces.plan
        decider = self._decider
        # The first step of a process warms up; a short batch is cut in another way.
        self._steps += 1
        if decider is None or measured is None or self._steps == 1:
            return
        if num_samples != decider.given.global_batch_size:
            return
        own = _facts(measured, decider.current, self._world.rank)
        facts: list[Any] = self._world.gather_objects(own)
        self.last = decider.observe(facts)
        if decider.is_held_back and not self._told_of_memory:
            self._told_of_memory = True
            self._tell(
                f"after step {number} shares stay although speeds differ: quicker ranks are not "
                "known to have memory for more micro-batches"
            )
        if self.last is not None:
            self._traces.use(decider.current)
            self._agree(self._traces.training(num_samples).digest)
            self._tell(f"after step {number} shares move: {self.last}")

    def values(self) -> Iterator[tuple[str, float]]:
        """What monitors are told of a step."""
        if self._decider is None:
            return
        moved = 0 if self.last is None else moved_samples(self.last.before, self.last.plan)
        yield "moved_samples", moved
        if self.last is not None:
            yield "predicted_gain_share", self.last.gain_share
        for group in self.ran.groups:
            for gpu in group.gpus:
                yield f"samples/rank_{gpu.rank}", gpu.num_samples

    def _tell(self, text: str) -> None:
        if self._world.rank == 0:
            logger.warning(text)

    def _agree(self, digest: str) -> None:
        """Collective: raise `WorldError` if a rank came to another decision."""
        found = self._world.gather_objects(digest)
        odd = [rank for rank, own in enumerate(found) if own != found[0]]
        if odd:
            raise WorldError(
                f"adapt_shares gave ranks {odd} another trace than rank 0; expected the same "
                "decision from the same numbers"
            )


def _facts(measured: Measured, plan: Plan, rank: int) -> RankFacts:
    """Seconds a sample, for a rank that runs some."""
    share = next(gpu for gpu in plan.group_of_rank(rank).gpus if gpu.rank == rank)
    paces: dict[int, Pace] = {}
    if share.num_samples:
        for stage in plan.stages_of_rank(rank):
            forward, backward = (
                measured.passes_s.get((stage, way), 0.0) / share.num_samples
                for way in ("forward", "backward")
            )
            paces[stage] = Pace(forward, backward)
    return RankFacts(measured.step_s, paces, measured.grown_bytes, measured.room_bytes)
