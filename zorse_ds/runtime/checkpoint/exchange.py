"""How ranks tell each other, while they save or load, whether all is well."""

import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, Protocol

import torch.distributed as dist

from zorse_ds.errors import CheckpointError, ZorseError


class Exchange(Protocol):
    """All ranks of a job; every method is called by all of them alike."""

    @property
    def rank(self) -> int:
        """The own rank."""

    @property
    def size(self) -> int:
        """How many ranks there are."""

    def gather_objects(self, value: Any) -> list[Any]:
        """Collective: every rank's value, by rank."""


class DistExchange:
    """An `Exchange` with a gloo process group of its own, so that a thread may use it.

    Collective: every rank constructs it. `timeout_s` bounds how much longer one rank may write than
    another.
    """

    def __init__(self, timeout_s: float) -> None:
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self._group = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s))

    def gather_objects(self, value: Any) -> list[Any]:
        """See `Exchange.gather_objects`."""
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value, group=self._group)
        return values


class Alone:
    """An `Exchange` of one process, which needs no process group."""

    rank, size = 0, 1

    def gather_objects(self, value: Any) -> list[Any]:
        """See `Exchange.gather_objects`."""
        return [value]


class Attempts:
    """What fails on one rank fails on all, with one sentence, at the next `agree`."""

    def __init__(self, exchange: Exchange, doing: str) -> None:
        self._exchange, self._doing = exchange, doing
        self._problem: str | None = None

    @contextmanager
    def attempt(self) -> Iterator[None]:
        """Keep the first error for the next `agree`."""
        try:
            yield
        except ZorseError as error:
            self._keep(str(error))
        except OSError as error:
            reason = error.strerror or str(error)
            place = f" at {error.filename}" if error.filename else ""
            self._keep(
                f"{self._doing} failed on rank {self._exchange.rank} ({reason}{place}); expected a "
                "folder that all ranks share, with room for the whole checkpoint"
            )
        except Exception as error:
            trace = "".join(traceback.format_exception(error)).rstrip()
            self._keep(f"{self._doing} failed on rank {self._exchange.rank}:\n{trace}")

    def agree(self, value: Any = None) -> list[Any]:
        """Collective: every rank's value. Raises `CheckpointError` on all if one has failed."""
        facts = self._exchange.gather_objects((self._problem, value))
        problems = list(dict.fromkeys(problem for problem, _ in facts if problem is not None))
        if problems:
            raise CheckpointError(problems[0])
        return [value for _, value in facts]

    def _keep(self, problem: str) -> None:
        self._problem = self._problem or problem
