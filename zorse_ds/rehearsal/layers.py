"""The layers of a model in small: real forward and backward, with the memory of the real ones."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes

Workspace = Callable[[int], int]
"""Micro-batch size → bytes."""


@dataclass(frozen=True, slots=True)
class Piece:
    """One matrix of a layer."""

    numel: int
    kept_bytes: float
    """A sample, from forward to backward, beside its input."""
    keeps_input: bool
    """The input itself is kept; else a copy of it."""
    workspace: Workspace


class MiniLayer(nn.Module):
    """A pipeline layer of a kind of the model."""

    def __init__(self, kind: str, width: int) -> None:
        super().__init__()
        self.kind, self.width = kind, width


class MiniEmbedding(MiniLayer):
    """Ids (b, n), of any size → hidden state (b, width): the mean of the rows they fall on."""

    def __init__(self, kind: str, width: int, numel: int) -> None:
        super().__init__(kind, width)
        self.table = nn.Parameter(torch.randn(numel) * 0.5)

    def forward(self, ids: Tensor) -> Tensor:
        """Rows may start at any element of the table."""
        output: Tensor = _LookUp.apply(ids, self.table, self.width)
        return output


class MiniBlock(MiniLayer):
    """Hidden state (b, width) → hidden state: one residual step a piece."""

    def __init__(self, kind: str, width: int, pieces: Sequence[Piece]) -> None:
        super().__init__(kind, width)
        self.pieces = tuple(pieces)
        self.weights = nn.ParameterList(
            nn.Parameter(torch.randn(piece.numel) * 0.05) for piece in pieces
        )

    def forward(self, hidden: Tensor) -> Tensor:
        """All pieces."""
        for piece, weight in zip(self.pieces, self.weights, strict=True):
            hidden = _Step.apply(hidden, weight, piece)
        return hidden


class MiniHead(MiniBlock):
    """The last layer: a block by another name, for engines that recompute by class."""


class MiniLoss:
    """Squared error of the mean of the hidden state: `(sum, number of samples)`."""

    def __init__(self, kept_bytes: float, workspace: Workspace) -> None:
        self._kept_bytes, self._workspace = kept_bytes, workspace

    def __call__(self, hidden: Tensor, targets: Tensor) -> tuple[Tensor, int]:
        """Hidden (b, width), targets (b, 1)."""
        kept = int(self._kept_bytes * len(hidden))
        hidden = _Keep.apply(hidden, kept, self._workspace(len(hidden)))
        error = hidden.float().mean(1, keepdim=True) - targets.float()
        return error.square().sum(), len(hidden)

    def count_targets(self, targets: Tensor) -> int:
        """One a sample."""
        return len(targets)

    def mean(self, hidden: Tensor, targets: Tensor) -> Tensor:
        """The same as a mean, for stock engines."""
        total, count = self(hidden, targets)
        return total / count


class _LookUp(torch.autograd.Function):
    """Mean of rows of a flat table; keeps nothing but the ids."""

    @staticmethod
    def forward(ctx: Any, ids: Tensor, table: Tensor, width: int) -> Tensor:
        ctx.save_for_backward(ids, table)
        output = table.new_empty(len(ids), width)
        with _disable_current_modes():
            return output.copy_(table[_elements(ids, table, width)].mean(1))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, Tensor, None]:
        ids, table = ctx.saved_tensors
        (grad,) = grads
        by_table = torch.zeros_like(table)
        with _disable_current_modes():
            elements = _elements(ids, table, grad.shape[1])
            shares = (grad / ids.shape[1])[:, None].expand(elements.shape)
            return None, by_table.index_add_(0, elements.flatten(), shares.flatten()), None


class _Step(torch.autograd.Function):
    """`mix`, holding what the real matrix holds and nothing else."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, piece: Piece) -> Tensor:
        ctx.piece = piece
        _use(hidden, piece.workspace(len(hidden)))
        kept = hidden if piece.keeps_input else hidden.clone()
        ctx.save_for_backward(kept, weight, _bytes(hidden, int(piece.kept_bytes * len(hidden))))
        output = torch.empty_like(hidden)
        with _disable_current_modes():
            return output.copy_(mix(hidden, weight))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        hidden, weight, _ = ctx.saved_tensors
        _use(hidden, ctx.piece.workspace(len(hidden)))
        grad_hidden, grad_weight = torch.empty_like(hidden), torch.empty_like(weight)
        with _disable_current_modes():
            own = mix_gradients(hidden, weight, grads[0])
            return grad_hidden.copy_(own[0]), grad_weight.copy_(own[1]), None


class _Keep(torch.autograd.Function):
    """Identity that holds bytes until its backward."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, kept_bytes: int, workspace_bytes: int) -> Tensor:
        ctx.save_for_backward(_bytes(hidden, kept_bytes))
        ctx.workspace_bytes = workspace_bytes
        _use(hidden, workspace_bytes)
        return hidden.view_as(hidden)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        assert ctx.saved_tensors, "kept until now"
        _use(grads[0], ctx.workspace_bytes)
        return grads[0], None, None


def mix(hidden: Tensor, weight: Tensor) -> Tensor:
    """`h + tanh(h Wᵀ) W / rows + rest`, with W (rows, width) cut from a flat weight."""
    matrix, rest = _cut(weight, hidden.shape[1])
    output = hidden + torch.tanh(hidden @ matrix.T) @ matrix / max(1, len(matrix))
    output[:, : len(rest)] += rest
    return output


def mix_gradients(hidden: Tensor, weight: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of `mix` by hidden state and weight, given that of its output."""
    matrix, rest = _cut(weight, hidden.shape[1])
    bent = torch.tanh(hidden @ matrix.T)
    share = grad / max(1, len(matrix))
    inner = (share @ matrix.T) * (1 - bent.square())
    by_matrix = inner.T @ hidden + bent.T @ share
    by_rest = grad[:, : len(rest)].sum(0)
    return grad + inner @ matrix, torch.cat([by_matrix.flatten(), by_rest])


def _cut(weight: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """As many rows as a flat weight has, and the rest of it."""
    rows = weight.numel() // width
    return weight[: rows * width].view(rows, width), weight[rows * width :]


def _elements(ids: Tensor, table: Tensor, width: int) -> Tensor:
    """Where each row's elements lie: (b, n, width)."""
    rows = ids.remainder(max(1, table.numel() - width))
    return (rows[..., None] + torch.arange(width)).remainder(table.numel())


def _bytes(like: Tensor, num_bytes: int) -> Tensor:
    return torch.empty(max(0, num_bytes), dtype=torch.uint8, device=like.device)


def _use(like: Tensor, num_bytes: int) -> None:
    """Hold temporaries for a moment: the memory's peak sees them."""
    _bytes(like, num_bytes)
