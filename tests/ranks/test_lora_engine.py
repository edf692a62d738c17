"""LoRA in a pipeline: what is trained, saved, resumed and merged is what `peft` would have."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers as hf
from peft import LoraConfig, PeftModel, get_peft_model
from torch import Tensor

import zorse_ds
from tests.inprocess.hf_models import save_checkpoint
from tests.ranks.harness import note, run_ranks
from tools.tiny_configs import CONFIGS
from zorse_ds.core.plan import Plan
from zorse_ds.integrations.huggingface.export import export

LORA = {"r": 3, "lora_alpha": 6, "target_modules": "all-linear"}
LENGTHS = (7, 5, 7, 6)
STEPS = 3


def plan(level: int, cut: int) -> Plan:
    return Plan.from_dict(
        {
            "global_batch_size": 4,
            "groups": [
                {
                    "name": "a",
                    "zero_level": level,
                    "gpus": [
                        {"rank": 0, "micro_batches": [1, 2], "shard_weight": 2.0},
                        {"rank": 1, "micro_batches": [1]},
                    ],
                },
                {"name": "b", "gpus": [{"rank": 2, "micro_batches": [3, 1]}], "recompute": "full"},
            ],
            "stages": [{"group": "a", "layers": [0, cut]}, {"group": "b", "layers": [cut, 5]}],
        }
    )


def config(**more: Any) -> dict[str, Any]:
    return {
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01, "torch_adam": True}},
        "gradient_clipping": 0.5,
        "steps_per_print": None,
        "zorse": {"adapters": LORA},
    } | more


def samples(step: int) -> list[dict[str, Any]]:
    generator = torch.Generator().manual_seed(step)
    rows = [torch.randint(3, 60, (length,), generator=generator).tolist() for length in LENGTHS]
    return [{"input_ids": row, "labels": [-100, -100, *row[2:]]} for row in rows]


def start(folder: Path, level: int, cut: int, dtype: torch.dtype, **more: Any) -> Any:
    settings = config(**more)
    module = zorse_ds.from_pretrained(
        folder / "base", plan(level, cut), config=settings, dtype=dtype
    )
    return zorse_ds.initialize(model=module, config=settings)[0]


def train(rank: int, folder: Path, level: int, cut: int, dtype: torch.dtype) -> dict[str, Any]:
    """Save the fresh adapter, train, save a checkpoint and what came of it."""
    engine = start(folder, level, cut, dtype)
    engine.save_pretrained(folder / "fresh")
    losses = []
    for step in range(STEPS):
        engine.train_batch(iter([samples(step)]))
        losses.append(engine.report.loss)
    engine.save_checkpoint(folder / "checkpoint", tag="trained")
    engine.save_pretrained(folder / "adapter")
    engine.save_pretrained(folder / "merged", merge_adapters=True)
    engine.eval_batch(iter([samples(9)]))
    state = sum(t.numel() for s in engine.optimizer.state.values() for t in s.values() if t.dim())
    facts = {"losses": losses, "state": state, "eval": engine.report.loss}
    engine.destroy()
    return facts


def resume(rank: int, folder: Path, level: int, cut: int, dtype: torch.dtype) -> list[float]:
    note("resume")
    engine = start(folder, level, cut, dtype)
    engine.load_checkpoint(folder / "checkpoint")
    engine.eval_batch(iter([samples(9)]))
    losses = [engine.report.loss]
    engine.train_batch(iter([samples(STEPS)]))
    losses.append(engine.report.loss)
    engine.destroy()
    return losses


def base_of(folder: Path, dtype: torch.dtype = torch.float64) -> Any:
    return hf.AutoModelForCausalLM.from_pretrained(folder / "base", dtype=dtype)


def loss_of(model: Any, step: int) -> Tensor:
    """Mean over the targets of a batch, sample by sample."""
    total, count = torch.zeros((), dtype=torch.float64), 0
    for row in samples(step):
        ids, labels = (torch.tensor([row[key]]) for key in ("input_ids", "labels"))
        logits = model(input_ids=ids, use_cache=False).logits
        targets = labels[0, 1:]
        total = total + F.cross_entropy(logits[0, :-1].double(), targets, reduction="sum")
        count += int((targets != -100).sum())
    return total / count


def reference(folder: Path, steps: int) -> tuple[list[float], Any]:
    """Plain peft and torch, from the values that the run began with."""
    model = PeftModel.from_pretrained(base_of(folder), folder / "fresh", is_trainable=True)
    # peft holds adapters in float32 unless told otherwise.
    model.double().eval()
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=0.01)
    losses = []
    for step in range(steps):
        optimizer.zero_grad()
        loss = loss_of(model, step)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 0.5)
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses, model


@pytest.mark.parametrize(("name", "level"), [("llama_tied", 3), ("phi3", 1)])
def test_a_run_is_that_of_peft(name: str, level: int, tmp_path: Path) -> None:
    save_checkpoint(CONFIGS[name](), tmp_path / "base")
    results = run_ranks(3, train, tmp_path, level, 2, torch.float64, timeout_s=120)
    losses, model = reference(tmp_path, STEPS + 1)
    for result in results:
        assert result["losses"] == pytest.approx(losses[:STEPS], abs=1e-10)
    num_trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    # Two moments for each parameter of an adapter, on one rank or another, and for nothing else.
    expected = 2 * num_trained
    assert sum(result["state"] for result in results) == expected
    saved = PeftModel.from_pretrained(base_of(tmp_path), tmp_path / "adapter").double().eval()
    merged = hf.AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float64)
    for own in (saved, merged.eval()):
        assert float(loss_of(own, 9).detach()) == pytest.approx(results[0]["eval"], abs=1e-10)
    whole = get_peft_model(base_of(tmp_path), LoraConfig(task_type="CAUSAL_LM", **LORA))
    assert {n for n, p in whole.named_parameters() if p.requires_grad} == {
        n for n, p in model.named_parameters() if p.requires_grad
    }
    check_resume_and_export(tmp_path, losses, results[0]["eval"])


def check_resume_and_export(folder: Path, losses: list[float], expected: float) -> None:
    """Another plan goes on from the checkpoint; adapters and merged weights come out of it."""
    for result in run_ranks(3, resume, folder, 0, 4, torch.float64, timeout_s=120):
        assert result == pytest.approx([expected, losses[STEPS]], abs=1e-10)
    export(folder / "checkpoint" / "trained", folder / "out", dtype=torch.float64)
    again = PeftModel.from_pretrained(base_of(folder), folder / "out").double().eval()
    assert float(loss_of(again, 9).detach()) == pytest.approx(expected, abs=1e-10)
    export(
        folder / "checkpoint" / "trained",
        folder / "whole",
        dtype=torch.float64,
        merge_adapters=True,
    )
    whole = hf.AutoModelForCausalLM.from_pretrained(folder / "whole", dtype=torch.float64).eval()
    assert float(loss_of(whole, 9).detach()) == pytest.approx(expected, abs=1e-10)


def train_low(rank: int, folder: Path, more: dict[str, Any]) -> list[Any]:
    engine = start(folder, 1, 2, torch.bfloat16, **more)
    models = engine.module.stage_models.values()
    dtypes = {(p.requires_grad, p.dtype) for m in models for _, p in m.global_parameters()}
    losses = []
    for _ in range(6):
        engine.train_batch(iter([samples(0)]))
        losses.append(engine.report.loss)
    masters = {b.master.dtype for b in engine.optimizer.sharded.buckets}
    engine.destroy()
    return [losses, dtypes, masters]


@pytest.mark.parametrize("with_bf16", [True, False])
def test_a_base_in_bfloat16(with_bf16: bool, tmp_path: Path) -> None:
    """With bf16 in the config adapters have float32 masters; without it they are float32."""
    save_checkpoint(CONFIGS["llama"](), tmp_path / "base", torch.bfloat16)
    more = {"bf16": {"enabled": True}} if with_bf16 else {}
    for losses, dtypes, masters in run_ranks(3, train_low, tmp_path, more, timeout_s=120):
        assert losses[-1] < losses[0]
        adapter = torch.bfloat16 if with_bf16 else torch.float32
        assert dtypes == {(False, torch.bfloat16), (True, adapter)}
        assert masters == {torch.float32}
