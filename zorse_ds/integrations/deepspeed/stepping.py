"""When each stage makes its update: at once, or when all stages are done."""

from dataclasses import dataclass
from typing import Any, Literal

from zorse_ds.core.plan import Plan
from zorse_ds.errors import ConfigError
from zorse_ds.integrations.deepspeed.precision import has_float16

StepChoice = Literal["auto", "interleaved", "delayed"]


@dataclass(frozen=True, slots=True)
class Stepping:
    """The decision and the reason that people are told."""

    interleaved: bool
    reason: str

    def __str__(self) -> str:
        kind = "as soon as its backward ends" if self.interleaved else "after all stages are done"
        return f"each stage steps {kind}: {self.reason}"


def stepping_of(choice: StepChoice, config: dict[str, Any], plan: Plan, loss_fn: Any) -> Stepping:
    """Interleaved (Zorse §3) needs nothing global; raises `ConfigError` if asked for in vain.

    Both give the same update. They differ when a gradient is not finite: delayed, no stage steps;
    interleaved, the others have stepped already.
    """
    obstacle = _obstacle(config, plan, loss_fn)
    if choice == "delayed":
        return Stepping(False, "zorse.optimizer_step is 'delayed'")
    if choice == "interleaved":
        if obstacle:
            raise ConfigError(
                f"zorse.optimizer_step is 'interleaved', but {obstacle}; expected 'delayed' "
                "or 'auto'"
            )
        return Stepping(True, "zorse.optimizer_step is 'interleaved'")
    if obstacle:
        return Stepping(False, obstacle)
    if plan.schedule != "ministage":
        return Stepping(
            False, "with one stage a group there is nothing to gain by stepping earlier"
        )
    return Stepping(True, "nothing global is needed")


def _obstacle(config: dict[str, Any], plan: Plan, loss_fn: Any) -> str | None:
    if config.get("gradient_clipping", 1.0):
        return "gradient_clipping needs the norm of all gradients"
    if has_float16(plan, config):
        return "the loss scale of float16 needs to know of every overflow"
    if getattr(loss_fn, "count_targets", None) is None:
        return "the loss function has no count_targets, so its divisor is known at the end alone"
    return None
