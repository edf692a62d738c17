"""How much a search tries. All are counts, so its answer does not depend on the machine."""

from collections.abc import Callable
from dataclasses import dataclass

Progress = Callable[[str, int, int], None]
"""Told what is being done, how much of it is done, and of how much."""


@dataclass(frozen=True, slots=True)
class Effort:
    """The limits of one search."""

    most_groups: int = 24
    judged_per_grouping: int = 3
    """Drafts of a grouping that are simulated before any local search."""
    judged: int = 30
    """Drafts that are simulated before any local search, over all groupings."""
    confirmed: int = 4
    """Of those whose batch was shortened for it, how many are simulated whole."""
    improved: int = 3
    """How many of the best the local search starts from."""
    events: int = 1_000_000
    """Passes and messages simulated in all; what is needed to judge comes before local search."""
    events_at_once: int = 20_000
    """Of a first simulation: a larger step is shortened for it."""
    workers: int = 1
    """Processes; does not change the answer."""


USUAL = Effort()


def silent(what: str, done: int, whole: int) -> None:
    """A progress that shows nothing."""
