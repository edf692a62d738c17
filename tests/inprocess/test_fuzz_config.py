"""Whatever stands in the DeepSpeed JSON, only the product's own errors come out before a start."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from hypothesis import given

from tests.fuzzing import fuzzed, near, only_own_errors, texts
from zorse_ds.core.plan import Plan
from zorse_ds.integrations.deepspeed.config import check_config, load_config, plan_from_config

PLAN = {
    "version": 1,
    "global_batch_size": 6,
    "groups": [
        {"name": "a", "gpus": [{"rank": 0, "micro_batches": [2, 4]}]},
        {"name": "b", "dtype": "float32", "gpus": [{"rank": 1, "micro_batches": [3, 3]}]},
    ],
    "stages": [{"group": "a", "layers": [0, 2]}, {"group": "b", "layers": [2, 5]}],
}
ZORSE = {
    "plan": PLAN,
    "data": {"shuffle": True, "seed": 3},
    "checkpoint": {"async": True, "keep_last": 2, "folder": "ckpt"},
    "adapt_shares": {"window": 4, "least_gain": 0.1, "most_moved": 0.5},
    "optimizer_step": "delayed",
    "transport": "staged",
    "timeout_s": 30.0,
}
CONFIGS: list[dict[str, Any]] = [
    {
        "train_batch_size": 6,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 4}},
        "gradient_clipping": 1.0,
        "bf16": {"enabled": True},
        "steps_per_print": 10,
        "tensorboard": {"enabled": False},
        "zorse": ZORSE,
    },
    {"fp16": {"enabled": True, "initial_scale_power": 8}, "zorse": {"plan": PLAN}},
    {"zero_optimization": {"stage": 0}, "activation_checkpointing": {}, "zorse": {}},
]


def read(config: Any) -> None:
    plan = only_own_errors(lambda: plan_from_config(config)) or Plan.from_dict(PLAN)
    check_config(load_config(config), plan)


@fuzzed
@given(near(CONFIGS))
def test_configs(config: Any) -> None:
    only_own_errors(lambda: read(config))


@fuzzed
@given(text=texts([json.dumps(config) for config in CONFIGS]))
def test_config_files(text: bytes, tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    path.write_bytes(text)
    only_own_errors(lambda: read(str(path)))


def test_the_examples_are_valid() -> None:
    for config in CONFIGS:
        check_config(load_config(config), Plan.from_dict(PLAN))
