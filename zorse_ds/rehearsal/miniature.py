"""A model in small: every tensor has one `ratio`-th of the bytes it has in the real model.

Parameters, gradients, optimizer state, activations, messages and shards all shrink alike, so bytes
counted of real tensors, times `ratio`, are those of the real model, whatever an engine does.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from math import ceil
from typing import Any

import torch
from torch import Tensor, nn

from zorse_ds.core.model import LayerShape
from zorse_ds.core.plan import Dtype
from zorse_ds.cost.dtypes import DTYPE_BYTES, MASTER_BYTES
from zorse_ds.cost.layer_bytes import bytes_of
from zorse_ds.cost.setting import Setting
from zorse_ds.rehearsal.layers import MiniBlock, MiniEmbedding, MiniHead, MiniLoss, Piece

WIDTH = 512
"""Elements of a sample's hidden state in small."""
_PER = 64
"""Samples of the micro-batch that bytes a sample are read from."""


@dataclass(frozen=True, eq=False)
class Miniature:
    """How the model of a setting shrinks. `dtype` (of the real numbers) has the virtual one's size.

    Raises `ModelError` for a model whose layers have no hidden state.
    """

    setting: Setting
    width: int = WIDTH

    @cached_property
    def ratio(self) -> float:
        """Virtual bytes of a real byte."""
        return self.setting.seq_len * self.setting.model.hidden / self.width

    def numel(self, shape: LayerShape) -> int:
        """Parameters of a layer in small."""
        return max(1, round(shape.num_params / self.ratio))

    def layers(self, dtype: Dtype) -> list[tuple[type[nn.Module], tuple[Any, ...]]]:
        """Class and arguments of each pipeline layer; `dtype`: what its rank computes in."""
        return [self._layer(kind, dtype) for kind in self.setting.model.layers]

    def _layer(self, kind: str, dtype: Dtype) -> tuple[type[nn.Module], tuple[Any, ...]]:
        shape = self.setting.model.kinds[kind]
        if shape.role == "embedding":
            return MiniEmbedding, (kind, self.width, self.numel(shape))
        made = MiniHead if shape.role == "head" else MiniBlock
        return made, (kind, self.width, self._pieces(kind, shape, dtype))

    def loss(self, dtype: Dtype) -> MiniLoss:
        """The loss behind the head, which keeps float32 log-probabilities."""
        head = self.setting.model.shapes[-1]
        kind = self.setting.model.layers[-1]
        kept = self._small(MASTER_BYTES * head.vocab * self.setting.seq_len)
        return MiniLoss(kept, self._workspace(kind, head, dtype))

    def samples(self, count: int, seed: int = 0) -> list[tuple[Tensor, Tensor]]:
        """Samples `(ids, targets)`, the same on every rank."""
        generator = torch.Generator().manual_seed(seed)
        ids = torch.randint(1 << 30, (count, 2), generator=generator)
        targets = torch.rand(count, 1, generator=generator)
        return [(ids[i], targets[i]) for i in range(count)]

    def _pieces(self, kind: str, shape: LayerShape, dtype: Dtype) -> list[Piece]:
        """A layer's matrices one behind the other, so that gradients come one by one."""
        numel = self.numel(shape)
        largest = shape.hidden * max(shape.ffn, shape.hidden, shape.vocab)
        count = max(1, ceil(shape.num_params / largest - 0.5))
        kept = self._kept(kind, shape, dtype) / count
        workspace = self._workspace(kind, shape, dtype)
        keeps_input = DTYPE_BYTES[dtype] == MASTER_BYTES
        own = kept - self.width * DTYPE_BYTES[dtype]
        cuts = [numel * i // count for i in range(count + 1)]
        return [
            Piece(cuts[i + 1] - cuts[i], max(0.0, own), keeps_input, workspace)
            for i in range(count)
        ]

    def _kept(self, kind: str, shape: LayerShape, dtype: Dtype) -> float:
        """Real bytes a sample that wait for backward, without those of the loss."""
        saved = self._figures(kind, shape, dtype, _PER).saved / _PER
        if shape.role == "head":
            saved -= MASTER_BYTES * shape.vocab * self.setting.seq_len
        return self._small(saved)

    def _workspace(self, kind: str, shape: LayerShape, dtype: Dtype) -> Callable[[int], int]:
        """Micro-batch size → real bytes of temporaries."""

        def workspace(size: int) -> int:
            return int(self._small(self._figures(kind, shape, dtype, size).workspace))

        return workspace

    def _figures(self, kind: str, shape: LayerShape, dtype: Dtype, size: int) -> Any:
        return self._bytes_of(kind, shape, dtype, self.setting.seq_len, size)

    def _small(self, num_bytes: float) -> float:
        return num_bytes / self.ratio

    @cached_property
    def _bytes_of(self) -> Any:
        return bytes_of(self.setting.profile)
