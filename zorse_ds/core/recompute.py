"""Which layers of a stage are made anew in its backward pass."""

from collections.abc import Callable
from dataclasses import dataclass

from zorse_ds.ranges import Range


@dataclass(frozen=True, slots=True)
class Recomputed:
    """Layers whose activations are not kept but for the inputs of runs of `every` layers."""

    layers: Range
    every: int = 1

    def __bool__(self) -> bool:
        """Anything is recomputed."""
        return self.layers.size > 0

    def runs(
        self, layers: Range, can: Callable[[int], bool] = lambda layer: True
    ) -> list[tuple[Range, bool]]:
        """`layers` in runs that are held together, and whether each is made anew.

        `can`: whether a layer can be recomputed at all; such as can not stand alone.
        """
        runs: list[tuple[Range, bool]] = []
        for layer in range(layers.start, layers.stop):
            again = self.layers.start <= layer < self.layers.stop and can(layer)
            if again and runs and runs[-1][1] and runs[-1][0].size < self.every:
                runs[-1] = (Range(runs[-1][0].start, layer + 1), True)
            else:
                runs.append((Range(layer, layer + 1), again))
        return runs


RECOMPUTE_KEYS = frozenset({"recompute_every", "recompute_layers"})
"""What a plan may say of recompute beside whether there is any."""

KEPT = Recomputed(Range(0, 0))
"""All activations are kept."""


def first_of(layers: Range, number: int | None = None, every: int = 1) -> Recomputed:
    """The first `number` of some layers are recomputed; None: all of them."""
    size = layers.size if number is None else min(number, layers.size)
    return Recomputed(Range(layers.start, layers.start + size), every) if size else KEPT
