"""The traces of a plan for batches of any size."""

from typing import Any

from zorse_ds.core.plan import Plan
from zorse_ds.schedule.checks import check_trace
from zorse_ds.schedule.compile import compile_forward, compile_trace
from zorse_ds.schedule.trace import Trace


class Traces:
    """Compiled traces by batch size: short batches and evaluation use the plan cut anew."""

    def __init__(self, plan: Plan, tied_layers: Any, interleaved: bool) -> None:
        self.plan, self._tied_layers, self._interleaved = plan, tied_layers, interleaved
        self._training: dict[int, Trace] = {}
        self._evaluation: dict[int, Trace] = {}

    def use(self, plan: Plan) -> None:
        """From now on run this plan, which differs in the micro-batches of ranks alone."""
        self.plan = plan
        self._training.clear()
        self._evaluation.clear()

    def training(self, batch_size: int) -> Trace:
        """The training step for a batch of this size, proved to run through."""
        if batch_size not in self._training:
            plan = self.plan.resized(batch_size)
            trace = compile_trace(plan, self._tied_layers, interleaved=self._interleaved)
            check_trace(trace)
            self._training[batch_size] = trace
        return self._training[batch_size]

    def evaluation(self, batch_size: int) -> Trace:
        """The forward-only run for a batch of this size."""
        if batch_size not in self._evaluation:
            self._evaluation[batch_size] = compile_forward(self.plan.resized(batch_size))
        return self._evaluation[batch_size]
