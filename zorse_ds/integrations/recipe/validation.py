"""The loss on data that is not trained on."""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch.distributed as dist
from tqdm import tqdm  # type: ignore[import-untyped]

from zorse_ds.integrations.deepspeed.engine import ZorseEngine

LOSS, PERPLEXITY = "Validation/loss", "Validation/perplexity"


class Measured(NamedTuple):
    """Mean loss over all target tokens, after some step."""

    step: int
    loss: float

    @property
    def perplexity(self) -> float:
        return math.exp(self.loss) if self.loss < 700 else math.inf

    def __str__(self) -> str:
        return f"validation loss {self.loss:.4f}, perplexity {self.perplexity:.2f}"


def measure(engine: ZorseEngine, dataset: Sequence[Any]) -> Measured:
    """The loss on all samples, told to the monitors. Collective: every rank calls this."""
    batch_size = engine.plan.global_batch_size
    starts = range(0, len(dataset), batch_size)
    loss_sum = num_targets = 0.0
    is_first = dist.get_rank() == 0
    for start in tqdm(starts, desc="validation", leave=False, disable=not is_first):
        batch = [dataset[i] for i in range(start, min(start + batch_size, len(dataset)))]
        engine.eval_batch(iter([batch]))
        report = engine.report
        assert report is not None, "a batch was evaluated"
        if report.num_targets:
            loss_sum += report.loss * report.num_targets
            num_targets += report.num_targets
    found = Measured(engine.global_steps, loss_sum / num_targets if num_targets else math.nan)
    if is_first and engine.monitor.enabled:
        at = engine.global_samples
        events = [(LOSS, found.loss, at), (PERPLEXITY, found.perplexity, at)]
        engine.monitor.write_events(events)
    return found
