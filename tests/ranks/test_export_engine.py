"""What a trained Hugging Face model's checkpoint exports is what the engine itself saves."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf

import zorse_ds
from tests.ranks.harness import run_ranks
from tests.ranks.test_engine_ministage_saving import PLAN, make_model, samples
from zorse_ds.core.plan import Plan
from zorse_ds.integrations.huggingface.export import export, find_checkpoint

OTHER = Plan.from_dict(
    {
        "global_batch_size": 6,
        "groups": [
            {"name": "a", "zero_level": 1, "gpus": [{"rank": 0, "micro_batches": [6]}]},
            {
                "name": "b",
                "zero_level": 2,
                "gpus": [{"rank": r, "micro_batches": [3], "shard_weight": r} for r in (1, 2)],
            },
        ],
        "stages": [{"group": "a", "layers": [0, 4]}, {"group": "b", "layers": [4, 7]}],
    }
)
CONFIG: dict[str, Any] = {
    "optimizer": {"type": "AdamW", "params": {"lr": 0.01, "torch_adam": True}},
    "steps_per_print": None,
}


def make_engine(folder: Path, plan: Plan) -> zorse_ds.ZorseEngine:
    model = zorse_ds.from_pretrained(folder / "model", plan=plan)
    engine, *_ = zorse_ds.initialize(model=model, config=CONFIG)
    data = samples()
    engine.set_dataiterator(iter([data[i : i + 6] for i in range(0, len(data), 6)]))
    return engine


def work(rank: int, folder: Path) -> tuple[list[float], list[float]]:
    """Ministages train and save; another plan goes on."""
    engine = make_engine(folder, PLAN)
    engine.train_batch()
    engine.save_checkpoint(str(folder / "ckpt"))
    engine.save_pretrained(str(folder / "saved"))
    whole = [float(engine.train_batch()) for _ in range(2)]
    engine.destroy()
    engine = make_engine(folder, OTHER)
    engine.load_checkpoint(str(folder / "ckpt"))
    next(engine.data_iterator)
    resumed = [float(engine.train_batch()) for _ in range(2)]
    engine.destroy()
    return whole, resumed


@pytest.mark.parametrize("tied", [False, True])
def test_the_export_is_what_the_engine_saves(tied: bool, tmp_path: Path) -> None:
    make_model(tmp_path / "model", tied)
    for whole, resumed in run_ranks(3, work, tmp_path, timeout_s=120):
        assert resumed == pytest.approx(whole, abs=1e-6)
    export(find_checkpoint(tmp_path / "ckpt"), tmp_path / "out")
    saved = hf.AutoModelForCausalLM.from_pretrained(tmp_path / "saved").state_dict()
    found = hf.AutoModelForCausalLM.from_pretrained(tmp_path / "out").state_dict()
    assert found.keys() == saved.keys()
    assert all(torch.equal(found[key], value) for key, value in saved.items())
    first = hf.AutoModelForCausalLM.from_pretrained(tmp_path / "model").state_dict()
    assert not torch.equal(first["lm_head.weight"], saved["lm_head.weight"])
