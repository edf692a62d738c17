"""Shapes of Hugging Face models for planning, against the parameters of the real modules."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf

from tests.inprocess.hf_models import CONFIGS, SIZES
from tools.tiny_configs import REFUSED
from zorse_ds.core.model import LayerShape, ModelShape
from zorse_ds.errors import ModelError
from zorse_ds.integrations.huggingface import CausalLMStages
from zorse_ds.integrations.huggingface.shape import model_shape

MOE = {**SIZES, "num_experts_per_tok": 2}
NARROW = {**MOE, "num_experts": 6, "moe_intermediate_size": 8, "num_hidden_layers": 4}
LATENT = {"q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 8}
LINEAR = {
    "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    "linear_key_head_dim": 4, "linear_value_head_dim": 4,
}  # fmt: skip
MORE: dict[str, Callable[[], Any]] = {
    "mixtral": lambda: hf.MixtralConfig(**MOE, num_local_experts=4),
    "qwen3_moe": lambda: hf.Qwen3MoeConfig(**NARROW, mlp_only_layers=[1]),
    "deepseek_v3": lambda: hf.DeepseekV3Config(
        **{**MOE, "num_key_value_heads": 4}, **LATENT, v_head_dim=4, moe_intermediate_size=8,
        n_routed_experts=8, n_group=2, topk_group=1, first_k_dense_replace=1,
    ),
    "gpt_oss": lambda: hf.GptOssConfig(**MOE, num_local_experts=4, head_dim=4),
    "qwen3_next": lambda: hf.Qwen3NextConfig(
        **NARROW, **LINEAR, shared_expert_intermediate_size=24, head_dim=4
    ),
    "mamba2": lambda: hf.Mamba2Config(
        vocab_size=64, hidden_size=16, num_hidden_layers=3, num_heads=4, head_dim=8,
        state_size=8, n_groups=1,
    ),
    "phi3": lambda: hf.Phi3Config(**SIZES),
}  # fmt: skip
ALL = CONFIGS | MORE


def whole_model(config: Any) -> Any:
    with torch.device("meta"):
        return hf.AutoModelForCausalLM.from_config(config)


@pytest.mark.parametrize("family", ALL)
def test_parameters_are_those_of_the_real_modules(family: str) -> None:
    shape = model_shape(ALL[family]())
    model = whole_model(ALL[family]())
    assert shape.num_params == sum(parameter.numel() for parameter in model.parameters())
    lists = [m for m in model.modules() if isinstance(m, torch.nn.ModuleList)]
    blocks = max(lists, key=lambda blocks: sum(p.numel() for p in blocks.parameters()))
    sizes = [sum(p.numel() for p in block.parameters()) for block in blocks]
    assert [each.num_params for each in shape.shapes[1:-1]] == sizes
    counts = CausalLMStages.from_config(ALL[family]()).parameter_counts
    assert tuple(each.num_params for each in shape.shapes) == counts
    embeddings, head = model.get_input_embeddings(), model.get_output_embeddings()
    assert shape.tied == (embeddings.weight is head.weight)


def only_block(family: str) -> LayerShape:
    kinds = {k: s for k, s in model_shape(ALL[family]()).kinds.items() if s.role == "block"}
    assert list(kinds) == ["block"]
    return kinds["block"]


@pytest.mark.parametrize(
    ("family", "ffn", "matrices", "heads", "kv_heads"),
    [
        ("llama", 32, 3, 4, 2),
        ("gpt2", 64, 2, 4, 4),
        ("opt_projected", 32, 2, 4, 4),
        ("bloom", 64, 2, 4, 4),
        ("gpt_neox", 32, 2, 4, 4),
        ("falcon_alibi", 64, 2, 4, 1),
        ("cohere", 32, 3, 4, 2),
        ("phi3", 32, 3, 4, 2),
        ("mamba", 0, 3, 0, 0),
        ("mamba2", 0, 3, 0, 0),
    ],
)
def test_sizes_within_a_block(
    family: str, ffn: int, matrices: int, heads: int, kv_heads: int
) -> None:
    block = only_block(family)
    assert (block.hidden, block.ffn, block.num_ffn_matrices) == (16, ffn, matrices)
    assert (block.heads, block.kv_heads) == (heads, kv_heads)
    assert block.head_dim == (4 if heads else 0)


def test_only_blocks_that_differ_are_other_kinds() -> None:
    gemma = model_shape(CONFIGS["gemma2"]())
    assert gemma.layers[1:-1] == ("block_sliding", "block_full", "block_sliding")
    moe = model_shape(MORE["qwen3_moe"]())
    assert moe.layers[1:-1] == ("block_moe", "block_dense", "block_moe", "block_moe")
    mixed = model_shape(MORE["qwen3_next"]())
    assert mixed.layers[1:-1] == ("block_linear",) * 3 + ("block_full",)
    assert (mixed.kinds["block_linear"].heads, mixed.kinds["block_full"].heads) == (0, 4)


@pytest.mark.parametrize(
    ("family", "kind", "per_expert", "experts", "width"),
    [
        ("mixtral", "block", 3 * 16 * 32, 4, 2 * 32),
        ("qwen3_moe", "block_moe", 3 * 16 * 8, 6, 2 * 8),
        ("deepseek_v3", "block_moe", 3 * 16 * 8, 8, 2 * 8 + 8),
        ("gpt_oss", "block_full", 3 * 16 * 32 + 2 * 32 + 16, 4, 2 * 32),
        ("qwen3_next", "block_full", 3 * 16 * 8, 6, 2 * 8 + 24),
    ],
)
def test_a_token_meets_two_experts_and_the_shared_one(
    family: str, kind: str, per_expert: int, experts: int, width: int
) -> None:
    block = model_shape(MORE[family]()).kinds[kind]
    assert block.num_params - block.used_params == (experts - 2) * per_expert
    assert (block.ffn, block.num_ffn_matrices) == (width, 3)


def test_latent_attention_costs_what_its_two_widths_do() -> None:
    block = model_shape(MORE["deepseek_v3"]()).kinds["block_dense"]
    assert (block.heads, block.head_dim) == (4, (8 + 4 + 4) // 2)
    assert (block.ffn, block.active_params) == (32, None)


def test_a_folder_needs_no_weights_and_names_the_model(tmp_path: Path) -> None:
    folder = tmp_path / "my-llama"
    CONFIGS["llama_tied"]().save_pretrained(folder)
    shape = model_shape(folder)
    assert shape.name == "my-llama"
    assert shape.tied_params == 64 * 16
    shape.save(tmp_path / "shape.json")
    assert ModelShape.load(tmp_path / "shape.json") == shape


def test_what_cannot_be_read_or_cut_is_one_sentence(tmp_path: Path) -> None:
    for folder in (tmp_path, tmp_path / "none"):
        with pytest.raises(ModelError) as caught:
            model_shape(folder)
        assert "\n" not in str(caught.value)
        assert str(folder) in str(caught.value)
    with pytest.raises(ModelError, match="layerdrop"):
        model_shape(REFUSED["opt_layerdrop"]())
