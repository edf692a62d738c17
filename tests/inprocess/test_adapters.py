"""Which modules get an adapter, its first values, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model

from tests.inprocess.hf_models import StageCache, make_batch, run, save_checkpoint
from tools.tiny_configs import CONFIGS
from zorse_ds.errors import ConfigError
from zorse_ds.integrations.huggingface import CausalLMStages
from zorse_ds.integrations.huggingface.adapter_saving import (
    join_adapter_parts,
    write_adapter_config,
    write_adapter_part,
)
from zorse_ds.integrations.huggingface.adapters import (
    is_adapter,
    lora_layers,
    merged_weight,
    read_adapters,
)

CUTS = ([(0, 5)], [(0, 1), (1, 4), (4, 5)], [(0, 2), (2, 5)])
RANDOM = {"r": 3, "lora_alpha": 5, "init_lora_weights": False}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "all linear": ("llama_tied", {"target_modules": "all-linear"}),
    "peft's own choice": ("qwen2", {}),
    "conv1d": ("gpt2", {"target_modules": ["c_attn"]}),
    "one fused matrix": ("phi3", {"target_modules": "all-linear"}),
    "tuples": ("falcon", {"target_modules": "all-linear"}),
    "some layers": ("llama", {"target_modules": ["q_proj"], "layers_to_transform": [2]}),
    "other ranks": ("llama", {"target_modules": ["q_proj"], "rank_pattern": {"layers.1.*": 5}}),
    "head and embedding": ("llama", {"target_modules": ["lm_head", "embed_tokens", "v_proj"]}),
    "excluded": ("llama", {"target_modules": "all-linear", "exclude_modules": ["o_proj"]}),
    "an expression": ("llama", {"target_modules": r".*layers\.[01]\.mlp\.(up|down)_proj"}),
    "attention beside experts": ("mixtral", {"target_modules": ["q_proj", "v_proj"]}),
    "linear attention": ("qwen3_next", {"target_modules": ["in_proj_qkvz", "q_proj"]}),
    "rslora": ("gemma2", {"target_modules": ["q_proj"], "use_rslora": True}),
}


def build(folder: Path, lora: dict[str, Any], seed: int = 4) -> CausalLMStages:
    return CausalLMStages.from_folder(folder, dtype=torch.float64, adapters=lora, seed=seed)


@pytest.mark.parametrize("case", CASES)
def test_saved_by_stages_it_is_an_adapter_of_the_whole_model(case: str, tmp_path: Path) -> None:
    name, lora = CASES[case]
    model = save_checkpoint(CONFIGS[name](), tmp_path / "base")
    stages = build(tmp_path / "base", RANDOM | lora)
    cache, batch = StageCache(stages), make_batch("padded")
    values = [run(cache.pipeline(cut), batch) for cut in CUTS]
    plain = model(**batch, use_cache=False).logits
    assert not torch.allclose(values[0], plain)
    folder = tmp_path / "adapter"
    folder.mkdir()
    for i, stage in enumerate(cache.pipeline(CUTS[1])):
        write_adapter_part(stage, folder, i)
    join_adapter_parts(folder)
    assert stages.adapters is not None
    write_adapter_config(stages.adapters, folder, tmp_path / "base")
    theirs = PeftModel.from_pretrained(model, folder).double().eval()
    expected = theirs(**batch, use_cache=False).logits
    for value in values:
        torch.testing.assert_close(value, expected, rtol=0, atol=1e-12)
    trained = {n for n, _ in theirs.named_parameters() if is_adapter(n)}
    assert len(json.loads((folder / "adapter_config.json").read_text())) > 10
    assert len(trained) == 2 * len(stages.adapters.targets)


def test_everything_else_is_frozen_and_counted(tmp_path: Path) -> None:
    model = save_checkpoint(CONFIGS["llama_tied"](), tmp_path)
    stages = build(tmp_path, {"target_modules": "all-linear", "r": 2})
    names = {
        name
        for stage in StageCache(stages).pipeline(CUTS[1])
        for name, parameter in stage.global_parameters()
        if parameter.requires_grad
    }
    assert all(map(is_adapter, names))
    whole = get_peft_model(
        model, LoraConfig(task_type="CAUSAL_LM", r=2, target_modules="all-linear")
    )
    expected, _ = whole.get_nb_trainable_parameters()
    assert stages.adapters is not None
    assert stages.adapters.num_params == expected
    plain = CausalLMStages.from_folder(tmp_path)
    assert sum(stages.parameter_counts) - sum(plain.parameter_counts) == expected


def test_first_values_depend_on_the_seed_alone(tmp_path: Path) -> None:
    save_checkpoint(CONFIGS["llama"](), tmp_path)
    lora = {"target_modules": "all-linear"}

    def values(seed: int) -> dict[str, torch.Tensor]:
        stage = build(tmp_path, lora, seed).build(0, 5)
        return {n: p for n, p in stage.global_parameters() if "lora_A" in n}

    first, other = values(1), values(2)
    assert all(not torch.equal(first[name], other[name]) for name in first)
    assert len({float(value.flatten()[0]) for value in first.values()}) == len(first)
    stage = build(tmp_path, lora, 1).build(2, 3)
    assert all(torch.equal(p, first[n]) for n, p in stage.global_parameters() if n in first)


def test_merging_leaves_the_base_as_it_was(tmp_path: Path) -> None:
    save_checkpoint(CONFIGS["gpt2"](), tmp_path)
    stage = build(tmp_path, RANDOM | {"target_modules": "all-linear"}).build(0, 5).eval()
    before = {name: value.clone() for name, value in stage.model.state_dict().items()}
    logits = stage(make_batch())
    merged = {f"{n}.weight": merged_weight(layer) for n, layer in lora_layers(stage.model)}
    assert all(torch.equal(value, before[n]) for n, value in stage.model.state_dict().items())
    assert torch.equal(stage(make_batch()), logits)
    whole = CausalLMStages.from_folder(tmp_path, dtype=torch.float64).build(0, 5).eval()
    whole.model.load_state_dict(merged, strict=False)
    torch.testing.assert_close(whole(make_batch()), logits, rtol=0, atol=1e-12)


REFUSED = {
    "misspelt": ({"rank": 4}, r"adapters.rank is not a known key; .*did you mean 'r'\?"),
    "no rank": ({"r": 0}, r"adapters.r is 0; expected a whole number above 0"),
    "another method": ({"peft_type": "IA3"}, r"adapters.peft_type is 'IA3'; expected 'LORA'"),
    "whole layers": ({"modules_to_save": ["lm_head"]}, r"modules_to_save is \['lm_head'\], which"),
    "biases": ({"bias": "all"}, r"adapters.bias is 'all', which stages .* expected 'none'"),
    "changed base": ({"init_lora_weights": "pissa"}, r"init_lora_weights is 'pissa'; expected"),
    "no such module": ({"target_modules": ["query"]}, r"Target modules .*query.* not found"),
    "shared weights": ({"target_modules": ["embed_tokens"]}, r"model.embed_tokens, whose weights"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_stages_cannot_carry_is_refused(case: str) -> None:
    lora, sentence = REFUSED[case]
    with pytest.raises(ConfigError, match=sentence) as caught:
        CausalLMStages.from_config(CONFIGS["llama_tied"](), adapters=lora)
    assert "\n" not in str(caught.value)
    assert "; expected" in str(caught.value)


def test_experts_in_one_parameter_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"mlp.*, which is no linear layer"):
        CausalLMStages.from_config(CONFIGS["mixtral"](), adapters={"target_modules": "all-linear"})


def test_a_configuration_may_be_a_file_or_its_folder(tmp_path: Path) -> None:
    LoraConfig(r=5, target_modules=["q_proj"], task_type="CAUSAL_LM").save_pretrained(tmp_path)
    for source in (tmp_path, str(tmp_path / "adapter_config.json")):
        assert read_adapters(source).r == 5
    with pytest.raises(ConfigError, match=r"none\.json cannot be read"):
        read_adapters(tmp_path / "none.json")
