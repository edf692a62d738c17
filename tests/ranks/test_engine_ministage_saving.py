"""A Hugging Face model in ministages equals plain transformers, and what was saved loads."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf

import zorse_ds
from tests.ranks.harness import run_ranks
from zorse_ds.core.plan import Plan
from zorse_ds.errors import ModelError

CONFIG = {
    "vocab_size": 64,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 5,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
PLAN = Plan.from_dict(
    {
        "global_batch_size": 6,
        "schedule": "ministage",
        "groups": [
            {
                "name": "a",
                "zero_level": 3,
                "recompute": "full",
                "gpus": [
                    {"rank": 0, "micro_batches": [2, 1], "shard_weight": 2.5},
                    {"rank": 1, "micro_batches": [3]},
                ],
            },
            {"name": "b", "zero_level": 3, "gpus": [{"rank": 2, "micro_batches": [4, 2]}]},
        ],
        "stages": [
            {"group": group, "layers": layers}
            for group, layers in zip("abab", [[0, 2], [2, 3], [3, 6], [6, 7]], strict=True)
        ],
    }
)
STEPS = 3


def samples() -> list[dict[str, Any]]:
    """Token ids of unlike lengths, some masked."""
    generator = torch.Generator().manual_seed(3)
    made = []
    for length in [5, 9, 3, 7, 8, 4] * STEPS:
        ids = torch.randint(3, 60, (length,), generator=generator)
        made.append({"input_ids": ids, "labels": ids.clone()})
    return made


def make_model(folder: Path, tied: bool) -> None:
    torch.manual_seed(5)
    config = hf.LlamaConfig(**CONFIG, tie_word_embeddings=tied)
    hf.AutoModelForCausalLM.from_config(config).save_pretrained(folder)


def train_and_save(rank: int, folder: Path) -> dict[str, list[float]]:
    """Both models, each saved before and after training."""
    losses = {}
    for name in ("untied", "tied"):
        model = zorse_ds.from_pretrained(folder / name, plan=PLAN)
        optimizer = {"type": "SGD", "params": {"lr": 0.1}}
        engine, *_ = zorse_ds.initialize(
            model=model, config={"optimizer": optimizer, "gradient_clipping": 0.0}
        )
        engine.save_pretrained(str(folder / f"{name} before"))
        data = samples()
        engine.set_dataiterator(iter([data[i : i + 6] for i in range(0, len(data), 6)]))
        losses[name] = [float(engine.train_batch()) for _ in range(STEPS)]
        engine.save_pretrained(str(folder / f"{name} after"))
        for own in engine.optimizer.sharded.stages.values():
            assert not any(each.flat.data.untyped_storage().nbytes() for each in own.sharded)
        read_state_dict(engine)
        engine.destroy()
    return losses


def read_state_dict(engine: zorse_ds.ZorseEngine) -> None:
    """What is in shards is not handed out as if it were nothing."""
    with pytest.raises(ModelError, match=r"stage \d are in shards .*; expected engine.save_pre"):
        engine.module.state_dict()
    with ExitStack() as opened:
        for stage in engine.module.stage_models:
            opened.enter_context(engine.whole(stage))
        state = engine.module.state_dict()
        assert state and all(tensor.numel() for tensor in state.values())


def trained_plainly(folder: Path) -> tuple[list[float], dict[str, torch.Tensor]]:
    """The same steps by transformers in one process, sample by sample."""
    model = hf.AutoModelForCausalLM.from_pretrained(folder)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data, losses = samples(), []
    for start in range(0, len(data), 6):
        batch = data[start : start + 6]
        count = sum(len(sample["labels"]) - 1 for sample in batch)
        optimizer.zero_grad()
        total = torch.zeros(())
        for sample in batch:
            logits = model(input_ids=sample["input_ids"][None]).logits[0, :-1]
            labels = sample["labels"][1:]
            total = total + torch.nn.functional.cross_entropy(logits, labels, reduction="sum")
        (total / count).backward()
        optimizer.step()
        losses.append(float(total.detach() / count))
    return losses, dict(model.state_dict())


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, list[float]]]]:
    folder = tmp_path_factory.mktemp("models")
    for name in ("untied", "tied"):
        make_model(folder / name, name == "tied")
    return folder, run_ranks(3, train_and_save, folder, timeout_s=120)


Trained = tuple[Path, list[dict[str, list[float]]]]


@pytest.mark.parametrize("name", ["untied", "tied"])
def test_what_was_loaded_is_saved_again(name: str, trained: Trained) -> None:
    folder, _ = trained
    expected = hf.AutoModelForCausalLM.from_pretrained(folder / name).state_dict()
    found = hf.AutoModelForCausalLM.from_pretrained(folder / f"{name} before").state_dict()
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[key], value) for key, value in expected.items())


@pytest.mark.parametrize("name", ["untied", "tied"])
def test_what_was_trained_is_saved(name: str, trained: Trained) -> None:
    folder, told = trained
    losses, expected = trained_plainly(folder / name)
    found = hf.AutoModelForCausalLM.from_pretrained(folder / f"{name} after").state_dict()
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        assert (found[key] - value).abs().max() < 1e-5, key
    for rank in told:
        assert rank[name] == pytest.approx(losses, rel=1e-5)


def save_with_dtypes(rank: int, folder: Path) -> None:
    """Save a model of which one group computes in bf16."""
    data = PLAN.to_dict()
    data["groups"][0]["dtype"] = "bfloat16"
    model = zorse_ds.from_pretrained(folder / "untied", plan=Plan.from_dict(data))
    config = {"optimizer": {"type": "SGD", "params": {"lr": 0.1}}, "steps_per_print": None}
    engine = zorse_ds.initialize(model=model, config=config)[0]
    engine.save_pretrained(str(folder / "unlike dtypes"))


def test_the_saved_config_loses_no_groups_precision(tmp_path: Path) -> None:
    make_model(tmp_path / "untied", False)
    run_ranks(3, save_with_dtypes, tmp_path, timeout_s=60)
    model = hf.AutoModelForCausalLM.from_pretrained(tmp_path / "unlike dtypes")
    assert model.config.dtype == torch.float32
    expected = hf.AutoModelForCausalLM.from_pretrained(tmp_path / "untied").state_dict()
    for key, value in model.state_dict().items():
        exact = torch.equal(value, expected[key])
        assert exact or torch.equal(value, expected[key].to(torch.bfloat16).float()), key
    assert torch.equal(model.lm_head.weight, expected["lm_head.weight"])
