"""A rank that becomes slow hands micro-batches over, and training does not notice."""

from __future__ import annotations

import csv
import logging
import time
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from tests.ranks.engine_cases import Case, Result, check, make_engine, run_reference, train
from tests.ranks.engine_models import batches_of, plan_of, vectors
from tests.ranks.harness import run_ranks
from zorse_ds import Plan
from zorse_ds.core.checkpoint.folder import MANIFEST_NAME
from zorse_ds.core.checkpoint.manifest import Manifest

SIZE, STEPS, SLOW_FROM = 12, 14, 4
PLAN = plan_of([[[2] * 6], [[1] * 6, [2] * 3]], [0, 3, 6])
"""One rank feeds two, which share the batch in micro-batches of one and of two samples."""


class Throttle:
    """What makes a device slow: each sample waits, as often as the layer is asked."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def __call__(self, module: nn.Module, inputs: Any, output: Tensor) -> None:
        time.sleep(self.seconds * len(output))


def case_of(adapt: Any, folder: Path | None = None) -> Case:
    batches = batches_of(vectors(SIZE * STEPS), [SIZE] * STEPS)
    config: dict[str, Any] = {"zorse": {"adapt_shares": adapt}} if adapt is not None else {}
    if folder is not None:
        config["csv_monitor"] = {"enabled": True, "output_path": str(folder), "job_name": "job"}
    return Case("adapting", PLAN, batches, config=config)


def slowed(rank: int, adapt: Any, folder: Path | None = None) -> dict[str, Any]:
    """Rank 2 is as quick as rank 1 until it becomes three times as slow."""
    case = case_of(adapt, folder)
    engine = make_engine(case)
    throttle = Throttle()
    for model in engine.module.stage_models.values():
        next(m for m in model.modules() if isinstance(m, nn.Linear)).register_forward_hook(throttle)
    records: list[str] = []
    logging.getLogger("DeepSpeed").addFilter(lambda r: records.append(r.getMessage()) or True)
    batches, counts, results = iter(map(list, case.batches)), [], []
    for step in range(1, STEPS + 1):
        usual = 0.015 if rank else 0.0
        throttle.seconds = 0.045 if rank == 2 and step >= SLOW_FROM else usual
        results.append(train(engine, 1, batches))
        own = engine.parts.traces.plan.group_of_rank(rank).gpus
        counts.append([len(gpu.micro_batches) for gpu in own])
    if folder is not None:
        engine.save_checkpoint(str(folder / "ckpt"))
    engine.destroy()
    lines = [text for text in records if "shares move" in text]
    return {"result": joined(results), "counts": counts, "lines": lines}


def joined(steps: list[Result]) -> Result:
    """One result of many steps."""
    parts = zip(*((own.losses, own.norms, own.rates) for own in steps), strict=True)
    losses, norms, rates = ([each for own in part for each in own] for part in parts)
    return Result(losses, norms, rates, steps[-1].skipped_steps, steps[-1].weights)


def test_shares_move_and_the_losses_stay_those_of_one_process(tmp_path: Path) -> None:
    results = run_ranks(3, slowed, {"window": 3, "least_gain": 0.15}, tmp_path, timeout_s=120)
    check([own["result"] for own in results], run_reference(case_of(None)))
    counts = results[1]["counts"]
    assert results[2]["counts"] == counts, "all ranks decide alike"
    assert results[0]["counts"] == [[6]] * STEPS
    assert counts[0] == [6, 3]
    assert counts[-1] in ([8, 2], [10, 1]), "two of one sample for each of two"
    told = results[0]["lines"]
    assert told and not results[1]["lines"]
    assert "group 'g1': rank 1 (" in told[0] and "predicted step" in told[0]
    curves = {name: curve(tmp_path, name) for name in ("moved_samples", "samples_rank_1")}
    ran = [[6, 3], *counts[:-1]]
    assert curves["samples_rank_1"] == [own[0] for own in ran]
    assert curves["moved_samples"] == [
        abs(after[0] - before[0]) for before, after in zip(ran, counts, strict=True)
    ]
    # The first rank does nothing but wait for the gradients of the others.
    assert max(curve(tmp_path, "busy_share_rank_0")[1:]) < 0.3
    assert curve(tmp_path, "busy_share_rank_2")[SLOW_FROM] > 0.6
    resumed = run_ranks(3, resume, str(tmp_path / "ckpt"), timeout_s=60)
    assert resumed == [STEPS + 1] * 3


def curve(folder: Path, name: str) -> list[float]:
    with open(folder / "job" / f"Train_Samples_{name}.csv", newline="") as file:
        _, *rows = csv.reader(file)
    return [float(value) for _, value in rows]


def resume(rank: int, folder: str) -> int:
    """The given plan, which is the saved one, goes on from where moved shares ended."""
    engine = make_engine(case_of(None))
    path, _ = engine.load_checkpoint(folder)
    assert path is not None and engine.global_steps == STEPS
    text = (Path(path) / MANIFEST_NAME).read_text()
    manifest = Manifest.from_json(text, path)
    assert Plan.from_dict(manifest.plan) == engine.plan == Plan.from_dict(PLAN)
    assert engine.parts.traces.plan == engine.plan
    float(engine.train_batch(iter([vectors(SIZE)])))
    engine.destroy()
    return int(engine.global_steps)


def test_nothing_moves_unless_asked() -> None:
    results = run_ranks(3, slowed, None, timeout_s=120)
    assert all(own["counts"] == results[i]["counts"][:1] * STEPS for i, own in enumerate(results))
