"""A Llama of transformers' own blocks as a plain layer list, for any `PipelineModule`."""

from typing import Any

import torch
from deepspeed.pipe import LayerSpec
from torch import Tensor, nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import (
    LlamaDecoderLayer,
    LlamaRMSNorm,
    LlamaRotaryEmbedding,
)


def llama_config(hidden: int = 512, blocks: int = 7, vocabulary: int = 8192) -> LlamaConfig:
    """The default has about 31 million parameters."""
    return LlamaConfig(
        hidden_size=hidden,
        intermediate_size=int(hidden * 2.75),
        num_hidden_layers=blocks,
        num_attention_heads=hidden // 64,
        num_key_value_heads=hidden // 64,
        vocab_size=vocabulary,
        attn_implementation="sdpa",
    )


class Block(nn.Module):
    """One decoder block with its rotary table; hidden state (b, t, h) in and out."""

    def __init__(self, config: LlamaConfig, index: int) -> None:
        super().__init__()
        self.block = LlamaDecoderLayer(config, index)
        self.rotary = LlamaRotaryEmbedding(config)

    def forward(self, hidden: Tensor) -> Tensor:
        """Causal attention and MLP."""
        positions = torch.arange(hidden.shape[1], device=hidden.device)[None]
        output: Any = self.block(hidden, position_embeddings=self.rotary(hidden, positions))
        return output if isinstance(output, Tensor) else output[0]


class Head(nn.Module):
    """Final norm and vocabulary projection: (b, t, h) → (b, t, vocabulary)."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.norm = LlamaRMSNorm(config.hidden_size)
        self.projection = nn.Linear(config.hidden_size, config.vocab_size, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        """Logits."""
        return self.projection(self.norm(hidden))


def layer_specs(config: LlamaConfig) -> list[LayerSpec]:
    """Embedding, blocks, head."""
    blocks = [LayerSpec(Block, config, i) for i in range(config.num_hidden_layers)]
    embedding = LayerSpec(nn.Embedding, config.vocab_size, config.hidden_size)
    return [embedding, *blocks, LayerSpec(Head, config)]


def mean_token_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Next-token cross entropy; every micro-batch has the same number of tokens."""
    predictions = logits[:, :-1].flatten(0, 1)
    return nn.functional.cross_entropy(predictions, labels[:, 1:].flatten())


def random_tokens(num_samples: int, length: int, vocabulary: int) -> list[tuple[Tensor, Tensor]]:
    """Samples `(inputs, labels)`, the same on every rank."""
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(vocabulary, (num_samples, length), generator=generator)
    return [(row, row) for row in tokens]


class TokenLoss:
    """Next-token cross entropy as `(sum, count)`, with a count that is known beforehand."""

    def __call__(self, logits: Tensor, labels: Tensor) -> tuple[Tensor, int]:
        """Sum over all targets."""
        predictions = logits[:, :-1].flatten(0, 1)
        loss = nn.functional.cross_entropy(predictions, labels[:, 1:].flatten(), reduction="sum")
        return loss, self.count_targets(labels)

    def count_targets(self, labels: Tensor) -> int:
        """Every token but each sample's first."""
        return labels[:, 1:].numel()
