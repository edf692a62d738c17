"""A plan found when training starts: one for all ranks, and exact like any other."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

import zorse_ds
from tests.inprocess.hf_models import CONFIGS
from tests.ranks.harness import run_ranks
from zorse_ds.core.plan import Plan
from zorse_ds.errors import ConfigError, WorldError

CLUSTER = {
    "types": {
        "big": {"fp32_tflops": 1.0, "memory_gib": 8},
        "small": {"fp32_tflops": 0.5, "memory_gib": 8},
    },
    "nodes": [{"gpu_types": ["big", "small", "small"], "intra_gb_per_s": 2, "nic_gb_per_s": 1}],
}
CONFIG: dict[str, Any] = {
    "train_batch_size": 6,
    "gradient_clipping": 0.0,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
    "zorse": {"plan": "auto", "cluster": CLUSTER, "seq_len": 8, "data": {"shuffle": False}},
}


def samples() -> list[dict[str, list[int]]]:
    ids = torch.randint(3, 60, (6, 8), generator=torch.Generator().manual_seed(0)).tolist()
    return [{"input_ids": row, "labels": row} for row in ids]


def trained(rank: int, folder: Path) -> tuple[float, dict[str, Any]]:
    module = zorse_ds.from_pretrained(folder, config=CONFIG)
    engine = zorse_ds.initialize(model=module, config=CONFIG, training_data=samples())[0]
    return float(engine.train_batch()), engine.plan.to_dict()


def refused(rank: int, folder: Path, changes: dict[str, Any], kinds: tuple[type, ...]) -> str:
    config = CONFIG | {"zorse": CONFIG["zorse"] | changes}
    with pytest.raises(kinds) as error:
        zorse_ds.from_pretrained(folder, config=config)
    return str(error.value)


def test_all_ranks_train_by_the_plan_that_was_found(tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_config(CONFIGS["llama"]())
    model.save_pretrained(tmp_path)
    results = run_ranks(3, trained, tmp_path)
    plan = Plan.from_dict(results[0][1])
    assert {str(found) for _, found in results} == {str(results[0][1])}
    assert (plan.world_size, plan.global_batch_size) == (3, 6)
    ids = torch.tensor([row["input_ids"] for row in samples()])
    expected = model(input_ids=ids, labels=ids).loss.item()
    assert all(loss == pytest.approx(expected, rel=1e-5) for loss, _ in results)


def test_what_planning_needs_is_asked_for(tmp_path: Path) -> None:
    AutoModelForCausalLM.from_config(CONFIGS["llama"]()).save_pretrained(tmp_path)
    (found,) = set(run_ranks(2, refused, tmp_path, {"cluster": None}, (ConfigError,)))
    assert found.startswith("zorse.plan is 'auto', but zorse.cluster is missing; expected ")
    found = run_ranks(2, refused, tmp_path, {}, (ConfigError, WorldError))[0]
    assert found == ("zorse.cluster has 3 GPUs, but 2 ranks were started; expected one rank a GPU")
