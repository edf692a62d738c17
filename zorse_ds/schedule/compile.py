"""From a plan to a trace: a list of passes, each a plain call on its own line."""

from collections.abc import Iterable, Sequence

from zorse_ds.core.layout import lay_out
from zorse_ds.core.plan import Plan
from zorse_ds.errors import ScheduleError
from zorse_ds.schedule.inflight import all_in_flight, in_flight_limits
from zorse_ds.schedule.orders import compute_order
from zorse_ds.schedule.passes import (
    add_loads_and_transfers,
    add_optimizer_steps,
    add_reductions,
    add_target_count,
)
from zorse_ds.schedule.trace import Trace, ties_between_stages


def compile_trace(plan: Plan, tied_layers: Iterable[Sequence[int]] = ()) -> Trace:
    """The training step of a plan, for the whole cluster.

    `tied_layers`: for each set of parameters used by several pipeline layers, those layers.
    Raises `ScheduleError` for a schedule that cannot be compiled.
    """
    if plan.schedule == "ministage":
        raise ScheduleError(
            "schedule is 'ministage', which this version cannot run; expected '1f1b' or 'gpipe'"
        )
    layout = lay_out(plan)
    limits = (in_flight_limits if plan.schedule == "1f1b" else all_in_flight)(layout)
    ties = ties_between_stages(plan, tied_layers)
    order = compute_order(layout, limits, plan.schedule)
    trace = add_loads_and_transfers(order, layout)
    trace = add_target_count(trace, plan)
    trace = add_reductions(trace, plan, layout, ties)
    trace = add_optimizer_steps(trace, plan, ties)
    return Trace(plan, layout, limits, ties, tuple(order), tuple(trace))


def compile_forward(plan: Plan) -> Trace:
    """The evaluation of one batch: forward passes and their transfers alone."""
    layout = lay_out(plan)
    limits = all_in_flight(layout)
    order = compute_order(layout, limits, "forward")
    trace = add_loads_and_transfers(order, layout)
    return Trace(plan, layout, limits, (), tuple(order), tuple(trace))
