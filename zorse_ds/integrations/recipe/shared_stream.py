"""A stream that one rank reads and tokenises for all."""

from typing import Any

import numpy as np

from zorse_ds.errors import DataError
from zorse_ds.integrations.data import SampleStream
from zorse_ds.integrations.data.stream import Sample
from zorse_ds.runtime.dist_world import DistWorld


class SharedStream:
    """Global batches of the first rank's stream, the same on every rank.

    The order of tokens depends on everything before, so each rank would have to tokenise all of it;
    the tokens of a batch are few bytes beside its activations. `own` is None on the other ranks.
    """

    def __init__(self, own: SampleStream | None, world: DistWorld) -> None:
        self._own, self._world = own, world

    def __iter__(self) -> "SharedStream":
        return self

    def __next__(self) -> list[Sample]:
        """Collective: every rank. Raises the first rank's `DataError` on all."""
        told: Any = None
        if self._own is not None:
            try:
                told = _packed(next(self._own))
            except DataError as error:
                told = error
        told = self._world.from_first(told)
        if isinstance(told, DataError):
            raise told
        return _unpacked(told)

    def state_dict(self) -> dict[str, Any]:
        """The stream's place as plain data; empty on ranks that do not read it."""
        return {} if self._own is None else self._own.state_dict()

    def resume(self, state: dict[str, Any] | None, num_batches: int) -> None:
        """Go on from there, or from the start, to where so many batches have been handed out."""
        if self._own is None:
            return
        if state:
            self._own.load_state_dict(state)
        # SIGTERM saves at a step of its own, which the state may be behind of.
        self._own.skip_to(num_batches)


def _packed(samples: list[Sample]) -> list[dict[str, np.ndarray]]:
    """Token ids in 4 bytes each."""
    return [{key: np.asarray(ids, np.int32) for key, ids in each.items()} for each in samples]


def _unpacked(samples: list[dict[str, np.ndarray]]) -> list[Sample]:
    return [{key: ids.tolist() for key, ids in each.items()} for each in samples]
