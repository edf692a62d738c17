"""The auxiliary loss of mixtures of experts, as sums that travel with the samples.

It asks of all blocks together how evenly tokens are spread over experts (Switch Transformer, arXiv
2101.03961, equations 4 to 6): `E · Σ_e f_e · P_e`, with the share f of tokens an expert is chosen
for and its mean probability P, over the tokens of a micro-batch and all blocks. Both are sums of
what single samples give, so stages add theirs up and the last one has what it needs.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn


@dataclass(frozen=True)
class RouterLoss:
    """What the loss is made of, and which modules it is made from."""

    num_experts: int
    top_k: int
    coefficient: float
    """What it is multiplied by before it is added to the cross entropy."""
    router: type[nn.Module]
    logits_index: int
    """Where in a router's output its logits are."""

    @property
    def width(self) -> int:
        """Numbers that travel for each sample."""
        return 2 * self.num_experts + 1

    def zeros(self, num_samples: int, device: torch.device) -> torch.Tensor:
        """Sums (b, 1, width) over no block."""
        # float64, which no boundary between dtypes converts: counts stay exact.
        return torch.zeros(num_samples, 1, self.width, dtype=torch.float64, device=device)

    def sums(
        self, logits: torch.Tensor, num_samples: int, mask: torch.Tensor | None
    ) -> torch.Tensor:
        """Sums (b, 1, width) of one block: choices, probabilities, and number of tokens.

        `logits` is (b·t, experts) or (b, t, experts), `mask` (b, t) with 0 for tokens to leave out.
        """
        logits = logits.reshape(num_samples, -1, self.num_experts)
        probabilities = torch.softmax(logits, dim=-1)
        chosen = torch.topk(probabilities.detach(), self.top_k, dim=-1).indices
        counts = torch.zeros_like(logits, dtype=torch.float32).scatter_(-1, chosen, 1.0)
        rows = torch.ones_like(counts[..., :1])
        weights = rows if mask is None else mask.to(logits.device, torch.float32).unsqueeze(-1)
        parts = torch.cat((counts, probabilities.float(), rows), dim=-1)
        return (parts * weights).double().sum(dim=1, keepdim=True)

    def of(self, sums: torch.Tensor) -> torch.Tensor:
        """The loss, without coefficient, of a micro-batch with these sums over all blocks.

        In float32 and in transformers' order of operations, so that gradients have its very bits.
        """
        counts, probabilities, rows = (
            sums.sum(dim=(0, 1)).float().split((self.num_experts, self.num_experts, 1))
        )
        tokens = rows.clamp(min=1)
        return (counts / tokens * (probabilities / tokens)).sum() * self.num_experts


class RouterSums:
    """Listens to the routers of some blocks, from `start` to `finish` of a forward."""

    def __init__(self, loss: RouterLoss, blocks: list[nn.Module]) -> None:
        self._loss = loss
        self._logits: list[torch.Tensor] | None = None
        for block in blocks:
            for module in block.modules():
                if isinstance(module, loss.router):
                    module.register_forward_hook(self._listen)

    def start(self) -> None:
        """Begin a forward."""
        self._logits = []

    def finish(
        self, before: torch.Tensor | None, hidden: torch.Tensor, mask: torch.Tensor | None
    ) -> torch.Tensor:
        """The sums of the stages `before` and of this forward, whose result `hidden` is."""
        heard, self._logits = self._logits or [], None
        size = hidden.shape[0]
        total = self._loss.zeros(size, hidden.device) if before is None else before
        for logits in heard:
            total = total + self._loss.sums(logits, size, mask)
        return total

    def _listen(self, _router: nn.Module, _args: Any, output: Any) -> None:
        # Recomputed blocks run again in the backward pass, where nobody wants to hear them.
        if self._logits is not None:
            tensor = output if isinstance(output, torch.Tensor) else output[self._loss.logits_index]
            self._logits.append(tensor)
