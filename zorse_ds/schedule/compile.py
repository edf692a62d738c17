"""From a plan to a trace: a list of passes, each a plain call on its own line."""

from collections.abc import Iterable, Sequence

from zorse_ds.core.layout import Layout, lay_out
from zorse_ds.core.plan import Plan
from zorse_ds.schedule.garbage import collector_paused
from zorse_ds.schedule.inflight import (
    InFlightLimits,
    all_in_flight,
    further_ahead,
    in_flight_limits,
)
from zorse_ds.schedule.orders import compute_order
from zorse_ds.schedule.passes import (
    add_delayed_steps,
    add_interleaved_steps,
    add_loads_and_transfers,
    add_reductions,
    add_target_count,
)
from zorse_ds.schedule.residency import add_residency
from zorse_ds.schedule.trace import Trace, ties_between_stages
from zorse_ds.schedule.visits import turning_tail


def compile_trace(
    plan: Plan, tied_layers: Iterable[Sequence[int]] = (), *, interleaved: bool = False
) -> Trace:
    """The training step of a plan, for the whole cluster.

    `tied_layers`: for each set of parameters used by several pipeline layers, those layers.
    `interleaved`: each stage steps as soon as its backward ends; else all wait for the norm.
    """
    with collector_paused():
        layout = lay_out(plan)
        limits = limits_of(plan, layout)
        ties = ties_between_stages(plan, tied_layers)
        order = compute_order(plan, layout, limits, plan.schedule)
        trace = add_loads_and_transfers(order, layout)
        trace = add_residency(trace, order, plan, plan.schedule)
        trace = add_target_count(trace, plan, interleaved)
        trace = add_reductions(trace, plan, layout, ties)
        add_steps = add_interleaved_steps if interleaved else add_delayed_steps
        trace = add_steps(trace, plan, ties)
        return Trace(plan, layout, limits, ties, tuple(order), tuple(trace), interleaved)


def compile_forward(plan: Plan) -> Trace:
    """The evaluation of one batch: forward passes and their transfers alone."""
    layout = lay_out(plan)
    limits = all_in_flight(layout)
    order = compute_order(plan, layout, limits, "forward")
    trace = add_loads_and_transfers(order, layout)
    trace = add_residency(trace, order, plan, "forward")
    return Trace(plan, layout, limits, (), tuple(order), tuple(trace))


def limits_of(plan: Plan, layout: Layout) -> InFlightLimits:
    """In-flight limits of a plan's own schedule: bounded only where stages turn around."""
    limits = all_in_flight(layout)
    tail = turning_tail(plan, plan.schedule)
    if tail:
        bounded = in_flight_limits(layout)
        further = further_ahead(layout, plan.ahead)
        limits |= {
            key: min(limits[key], most + further[key])
            for key, most in bounded.items()
            if key[1] in tail
        }
    return limits
