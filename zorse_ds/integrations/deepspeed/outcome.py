"""What people hear of a step that was not as it should be."""

import math

from deepspeed.utils import logger

from zorse_ds.errors import DataError
from zorse_ds.runtime.worker import StepReport


def look_at(report: StepReport, step: int, rank: int) -> None:
    """Warn of what made no update; raise `DataError`, on every rank, where nothing can be learnt.

    A loss that is not finite in the very first step will not become so later.
    """
    if step == 1 and report.num_targets and not math.isfinite(report.loss):
        raise DataError(
            f"the loss of the first step is {report.loss} over {report.num_targets:g} targets; "
            "expected a finite number: look at the weights the model was given, for labels it has "
            "no class for, and whether its dtype is too narrow"
        )
    if rank != 0:
        return
    if report.skipped:
        logger.warning(f"step {step} made no update: {report.skipped}")
    elif report.not_finite:
        stages = ", ".join(map(str, report.not_finite))
        logger.warning(f"step {step} left out stages {stages}: overflow")
