"""The planner knows adapters: a model's shape has them, and plans that did not fit then do."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from tools.tiny_configs import CONFIGS
from zorse_ds.cli.program import app
from zorse_ds.integrations.huggingface.shape import model_shape

LORA = {"r": 2, "target_modules": "all-linear"}


@pytest.mark.parametrize("name", ["llama", "llama_tied", "gpt2", "qwen2", "falcon"])
def test_the_shape_counts_what_peft_trains(name: str) -> None:
    plain, shape = model_shape(CONFIGS[name]()), model_shape(CONFIGS[name](), LORA)
    whole = get_peft_model(
        AutoModelForCausalLM.from_config(CONFIGS[name]()), LoraConfig(task_type="CAUSAL_LM", **LORA)
    )
    trained, _ = whole.get_nb_trainable_parameters()
    assert sum(each.trained_params for each in shape.shapes) == trained
    assert shape.num_params - plain.num_params == trained
    assert sum(each.trained_params for each in plain.shapes) > trained


def test_layers_without_adapters_are_another_kind() -> None:
    shape = model_shape(
        CONFIGS["llama"](), {"target_modules": ["q_proj"], "layers_to_transform": [1]}
    )
    assert [each.trained_params > 0 for each in shape.shapes] == [False, False, True, False, False]
    assert len(shape.kinds) == 4


def test_zorse_plan_takes_adapters(tmp_path: Path) -> None:
    CONFIGS["llama"]().save_pretrained(tmp_path)
    (tmp_path / "lora.json").write_text(json.dumps(LORA))
    words = ["plan", "--cluster", "desk", "--model", str(tmp_path), "--global-batch", "16"]
    words += ["--seq-len", "64", "--effort", "0.1", "--json"]
    results = [
        CliRunner().invoke(app, [*words, *more])
        for more in ([], ["--adapters", str(tmp_path / "lora.json")])
    ]
    assert [result.exit_code for result in results] == [0, 0], results
    full, adapted = (json.loads(result.stdout) for result in results)
    text = [json.dumps(each) for each in (full, adapted)]
    assert text[0] != text[1]
