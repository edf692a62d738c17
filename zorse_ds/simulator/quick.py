"""How long a step takes and nothing else, as quickly as it can be told without an error."""

from zorse_ds.core.plan import Plan
from zorse_ds.cost.setting import Setting
from zorse_ds.schedule.garbage import collector_paused
from zorse_ds.simulator.durations import Durations
from zorse_ds.simulator.run import Run
from zorse_ds.simulator.script import Prepared, script_of_plan


def quick_step_s(
    plan: Plan, setting: Setting, *, interleaved: bool = False, prepared: Prepared | None = None
) -> float:
    """Seconds of a step: exactly those of `simulate(compile_trace(plan, …), setting)`.

    Quicker, because no instructions are made for messages. Raises `PlanError` if the plan does not
    fit the cluster or the model. `prepared`: what the caller has of the plan already.
    """
    with collector_paused():
        script = script_of_plan(
            plan, setting.model.tied_layers, interleaved=interleaved, prepared=prepared
        )
        run = Run(script, Durations(plan, script.layout, setting), record=False)
        run.run()
        return max(run.now_s)
