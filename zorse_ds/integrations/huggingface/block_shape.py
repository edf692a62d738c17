"""The sizes of one decoder block, read off its parameters rather than off names in configurations.

Configurations of families call the same thing by many names, and keep names that the model does not
use; the shapes of the matrices cannot lie.
"""

import math
from collections.abc import Iterable, Mapping
from typing import Any, Literal

from transformers import PretrainedConfig

from zorse_ds.core.model import LayerShape

Shapes = Mapping[str, tuple[int, ...]]
"""Shapes of a block's parameters by their names within the block."""

_MIXERS = ("attn", "attention", "mixer", "mamba", "conv")
"""What the name of a module that mixes tokens holds; other matrices are feed-forward."""
_FUSED = ("query_key_value", "qkv_proj", "c_attn", "qkv")
_TOP_K = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_top_k", "top_k")


def block_shape(config: PretrainedConfig, shapes: Shapes) -> LayerShape:
    """The shape of a block with these parameters, in a model of the text configuration `config`."""
    hidden = int(config.hidden_size)
    experts = {name: shape for name, shape in shapes.items() if "experts" in name.split(".")}
    num_experts = _num_experts(experts)
    top_k = _first_of(config, _TOP_K) if num_experts else None
    num_params = _size(shapes.values())
    width, matrices = _feed_forward(shapes.keys() - experts.keys(), shapes, hidden, num_experts)
    active = None
    if num_experts:
        expert_width, matrices = _expert(experts, hidden)
        used = num_experts if top_k is None else min(top_k, num_experts)
        active = num_params - _size(experts.values()) * (num_experts - used) // num_experts
        width += expert_width * used
    heads, head_dim = _heads(config, shapes, hidden)
    return LayerShape(
        role="block",
        hidden=hidden,
        num_params=num_params,
        active_params=active,
        ffn=width,
        heads=heads,
        kv_heads=_kv_heads(config, shapes, hidden, heads, head_dim),
        head_dim=head_dim,
        num_ffn_matrices=matrices,
    )


def has_experts(shapes: Shapes) -> bool:
    """Whether a block is a mixture of experts."""
    return any("experts" in name.split(".") for name in shapes)


def has_attention(shapes: Shapes) -> bool:
    """Whether a block has attention whose cost grows with the square of the length."""
    return any(_is_attention(name) for name in shapes)


def _is_attention(name: str) -> bool:
    module = [part for part in name.split(".")[:-1] if "norm" not in part]
    return any(("attn" in part or "attention" in part) and "linear" not in part for part in module)


def _num_experts(experts: Shapes) -> int:
    """Experts are one tensor with an axis for them, or a list of modules."""
    stacked = [shape[0] for name, shape in experts.items() if not _index_in(name)]
    listed = {_index_in(name) for name in experts} - {None}
    return stacked[0] if stacked else len(listed)


def _index_in(name: str) -> str | None:
    """`3` of `experts.3.w1.weight`."""
    parts = name.split(".")
    following = parts[parts.index("experts") + 1]
    return following if following.isdigit() else None


def _expert(experts: Shapes, hidden: int) -> tuple[int, Literal[2, 3]]:
    """Width and number of matrices of one expert."""
    one = {
        name: shape[1:] if _index_in(name) is None else shape
        for name, shape in experts.items()
        if _index_in(name) in (None, "0")
    }
    return _feed_forward(one, one, hidden, 0)


def _feed_forward(
    names: Iterable[str], shapes: Shapes, hidden: int, num_experts: int
) -> tuple[int, Literal[2, 3]]:
    """Inner width and number of matrices, two fused ones counted as two; (0, 3) without any."""
    widths = [
        math.prod(shapes[name]) // hidden
        for name in names
        if len(shapes[name]) == 2 and hidden in shapes[name] and not _mixes(name)
    ]
    for gate in {num_experts, 1} & set(widths):
        # A router has one row an expert, the gate of a shared expert one row.
        widths.remove(gate)
    if not widths:
        return 0, 3
    # The matrix back to the hidden width is never fused, so it is among the narrowest.
    width = min(widths)
    return width, 3 if sum(widths) >= 2.5 * width else 2


def _mixes(name: str) -> bool:
    return any(word in part for part in name.split(".")[:-1] for word in _MIXERS)


def _heads(config: PretrainedConfig, shapes: Shapes, hidden: int) -> tuple[int, int]:
    """Number of query heads and their width; none in a block without attention."""
    heads = getattr(config, "num_attention_heads", None)
    if not heads or not has_attention(shapes):
        return 0, 0
    if getattr(config, "kv_lora_rank", None):
        # Latent attention: scores and sums have widths of their own, of which this is the mean.
        widths = (config.qk_nope_head_dim, config.qk_rope_head_dim, config.v_head_dim)
        return heads, sum(widths) // 2
    return heads, getattr(config, "head_dim", None) or hidden // heads


def _kv_heads(
    config: PretrainedConfig, shapes: Shapes, hidden: int, heads: int, head_dim: int
) -> int:
    if not heads or getattr(config, "kv_lora_rank", None):
        return heads
    for name, shape in shapes.items():
        module = name.split(".")[-2:-1]
        if len(shape) == 2 and module == ["k_proj"]:
            return max(1, math.prod(shape) // hidden // head_dim)
        if len(shape) == 2 and module and module[0] in _FUSED:
            return max(1, (math.prod(shape) // hidden // head_dim - heads) // 2)
    return getattr(config, "num_key_value_heads", None) or heads


def _first_of(config: PretrainedConfig, names: Iterable[str]) -> int | None:
    found = (getattr(config, name, None) for name in names)
    return next((value for value in found if isinstance(value, int)), None)


def _size(shapes: Iterable[tuple[int, ...]]) -> int:
    return sum(math.prod(shape) for shape in shapes)


def layer_type(config: PretrainedConfig, index: int) -> str:
    """How block `index` attends, in the configuration's word: `full_attention`, say."""
    types: Any = getattr(config, "layer_types", None)
    if types:
        return str(types[index])
    return "sliding_attention" if getattr(config, "sliding_window", None) else "full_attention"
