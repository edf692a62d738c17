"""Tiny configurations of the families of causal language models that are tried.

They keep what makes a family special (windows, multipliers, positions, experts) and nothing of its
size. `docs/families.md` and the tests of exactness are made of them.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import transformers as hf

SIZES = {
    "vocab_size": 64,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
GPT2_SIZES = {
    "vocab_size": 64,
    "n_embd": 16,
    "n_layer": 3,
    "n_head": 4,
    "n_positions": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
GEMMA = {"head_dim": 4, "query_pre_attn_scalar": 4, "sliding_window": 3}
GRANITE = {"embedding_multiplier": 12.0, "logits_scaling": 8.0, "residual_multiplier": 0.22}
QWEN_WINDOWS = {"use_sliding_window": True, "sliding_window": 3, "max_window_layers": 1}
OPT = {"vocab_size": 64, "ffn_dim": 32, "hidden_size": 16, "num_hidden_layers": 3}
HEADS = {"num_attention_heads": 4}
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
MOE = {**SIZES, "moe_intermediate_size": 16, "num_experts_per_tok": 2}
LAYER_TYPES = ["sliding_attention", "full_attention", "sliding_attention"]
LATENT = {
    "num_key_value_heads": 4,
    "q_lora_rank": 8,
    "kv_lora_rank": 8,
    "qk_nope_head_dim": 4,
    "qk_rope_head_dim": 4,
    "v_head_dim": 4,
}
DEEPSEEK = {
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 1,
}
QWEN3_NEXT = {
    "head_dim": 8,
    "num_experts": 4,
    "shared_expert_intermediate_size": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 4,
    "linear_value_head_dim": 4,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
}
MAMBA2 = {"num_heads": 4, "head_dim": 8, "state_size": 8, "n_groups": 1, "chunk_size": 4}
TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
GEMMA4 = {"head_dim": 4, "hidden_size_per_layer_input": 0}
GEMMA3N = {
    "laurel_rank": 4,
    "altup_num_inputs": 2,
    "activation_sparsity_pattern": [0.0] * 3,
    "num_kv_shared_layers": 0,
}

FULL = ["full_attention"] * 3
PER_LAYER = {"hidden_size_per_layer_input": 4, "vocab_size_per_layer_input": 64}

CONFIGS: dict[str, Callable[[], Any]] = {
    "llama": lambda: hf.LlamaConfig(**SIZES),
    "llama_tied": lambda: hf.LlamaConfig(**SIZES, tie_word_embeddings=True),
    "llama3_rope": lambda: hf.LlamaConfig(**SIZES, rope_parameters=LLAMA3_ROPE),
    "gpt2": lambda: hf.GPT2Config(**GPT2_SIZES),
    "gpt2_untied": lambda: hf.GPT2Config(**GPT2_SIZES, tie_word_embeddings=False),
    "qwen2": lambda: hf.Qwen2Config(**SIZES, **QWEN_WINDOWS),
    "mistral": lambda: hf.MistralConfig(**SIZES, sliding_window=3),
    "gemma2": lambda: hf.Gemma2Config(**SIZES, **GEMMA),
    "gemma3": lambda: hf.Gemma3TextConfig(**SIZES, **GEMMA, sliding_window_pattern=2),
    "granite": lambda: hf.GraniteConfig(**SIZES, **GRANITE, attention_multiplier=0.3),
    "cohere": lambda: hf.CohereConfig(**SIZES),
    "falcon_alibi": lambda: hf.FalconConfig(**{**SIZES, "num_key_value_heads": 4}, alibi=True),
    "bloom": lambda: hf.BloomConfig(vocab_size=64, hidden_size=16, n_layer=3, n_head=4),
    "opt_projected": lambda: hf.OPTConfig(
        **OPT, **HEADS, word_embed_proj_dim=8, do_layer_norm_before=False, dropout=0.0
    ),
    "gpt_neox": lambda: hf.GPTNeoXConfig(**{**SIZES, "num_key_value_heads": 4}),
    "mamba": lambda: hf.MambaConfig(vocab_size=64, hidden_size=16, num_hidden_layers=3),
    "qwen3": lambda: hf.Qwen3Config(**SIZES, head_dim=4),
    "phi3": lambda: hf.Phi3Config(**SIZES),
    "opt": lambda: hf.OPTConfig(**OPT, **HEADS, dropout=0.0, word_embed_proj_dim=16),
    "falcon": lambda: hf.FalconConfig(**{**SIZES, "num_key_value_heads": 4}),
    "olmo2": lambda: hf.Olmo2Config(**SIZES),
    "granite_plain": lambda: hf.GraniteConfig(**SIZES),
    "cohere2": lambda: hf.Cohere2Config(**SIZES, sliding_window=3, layer_types=LAYER_TYPES),
    "starcoder2": lambda: hf.Starcoder2Config(**SIZES),
    "smollm3": lambda: hf.SmolLM3Config(**SIZES, no_rope_layers=[1, 0, 1]),
    "qwen3_moe": lambda: hf.Qwen3MoeConfig(**MOE, head_dim=4, num_experts=4, mlp_only_layers=[0]),
    "mixtral": lambda: hf.MixtralConfig(**SIZES, **EXPERTS),
    "deepseek_v3": lambda: hf.DeepseekV3Config(**{**MOE, **LATENT}, **DEEPSEEK),
    "gpt_oss": lambda: hf.GptOssConfig(
        **SIZES, **EXPERTS, head_dim=4, sliding_window=3, layer_types=LAYER_TYPES
    ),
    "qwen3_next": lambda: hf.Qwen3NextConfig(**MOE, **QWEN3_NEXT),
    "mamba2": lambda: hf.Mamba2Config(
        vocab_size=64, hidden_size=16, num_hidden_layers=3, **MAMBA2, **TOKENS
    ),
    "gemma4": lambda: hf.Gemma4TextConfig(**SIZES, **GEMMA4, num_kv_shared_layers=0),
}
"""Those that are cut exactly."""

REFUSED: dict[str, Callable[[], Any]] = {
    "gemma3n": lambda: hf.Gemma3nTextConfig(**SIZES, **GEMMA3N, **PER_LAYER, head_dim=4),
    "gemma4_per_layer": lambda: hf.Gemma4TextConfig(**SIZES, **{**GEMMA4, **PER_LAYER}),
    "gemma4_shared_keys": lambda: hf.Gemma4TextConfig(
        **SIZES, **GEMMA4, num_kv_shared_layers=1, layer_types=FULL
    ),
    "opt_layerdrop": lambda: hf.OPTConfig(**OPT, **HEADS, layerdrop=0.1),
}
"""Those that are refused by name."""


def _with_router_loss(name: str) -> Any:
    config = CONFIGS[name]()
    config.output_router_logits = True
    return config


ROUTED: dict[str, Callable[[], Any]] = {
    name: partial(_with_router_loss, name)
    for name in ("mixtral", "qwen3_moe", "gpt_oss", "qwen3_next")
}
"""Mixtures of experts with their auxiliary loss switched on."""
