"""Gradients that are summed after every micro-batch: what travels together, and what is under way.

As in the engine (`runtime.rounds`): whole layers travel as soon as backward has gone through them,
and all but the last lot have arrived when the next one has its first gradient.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from zorse_ds.core.model import ModelShape
from zorse_ds.core.shards import LEAST_LOT
from zorse_ds.cost.state import tied_trained
from zorse_ds.ranges import Range


@dataclass(frozen=True, slots=True)
class Lot:
    """Trained parameters of some layers, whose gradients travel together."""

    layers: Range
    numel: int


def lots_of(model: ModelShape) -> tuple[Lot, ...]:
    """Of all layers, in the order in which backward makes them."""
    lots: list[Lot] = []
    last = model.num_layers - 1
    for layer, shape in enumerate(model.shapes):
        # A tied matrix has its gradient when backward has come to the embedding.
        numel = shape.trained_params - (tied_trained(model) if model.tied and layer == last else 0)
        if not lots or lots[-1].numel >= LEAST_LOT:
            lots.append(Lot(Range(layer, layer + 1), numel))
        else:
            before = lots[-1]
            lots[-1] = Lot(Range(before.layers.start, layer + 1), before.numel + numel)
    return tuple(reversed(lots))


class UnderWay:
    """Bytes of gradients beside a rank's own shard of their sum.

    `element`: bytes of one on the wire; `received`: contributions to the own shard, over one
    vector (the group's width times the rank's share).
    """

    def __init__(self, lots: Sequence[Lot], element: int, received: float) -> None:
        own = [element * lot.numel for lot in lots]
        sent = [0.0, 0.0, *(size * (1 + received) for size in own)]
        pairs = [one + other for one, other in pairwise(sent)]
        self.after_pass = pairs[-1]
        """From a backward pass to the next one: the last lots may not have arrived."""
        self._at = {lot.layers: max(pairs[i], sent[i + 1] + own[i]) for i, lot in enumerate(lots)}

    def beside(self, layers: Range) -> float:
        """The most while backward goes through some layers."""
        return max(size for own, size in self._at.items() if own.intersect(layers).size)
