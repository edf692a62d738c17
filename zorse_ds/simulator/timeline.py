"""What ran when: one type for what was simulated and for what was measured."""

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Span:
    """One instruction on one rank, in seconds from the start of the step."""

    rank: int
    name: str
    start_s: float
    stop_s: float
    stage: int | None = None
    micro_batch: int | None = None


@dataclass(frozen=True, slots=True)
class Timeline:
    """The spans of one step, of one rank or of many."""

    spans: tuple[Span, ...]

    @classmethod
    def joined(cls, timelines: Iterable["Timeline"]) -> "Timeline":
        """All spans of several ranks, by start."""
        spans = (span for timeline in timelines for span in timeline.spans)
        return cls(tuple(sorted(spans, key=lambda span: (span.start_s, span.rank))))

    @property
    def step_s(self) -> float:
        """From the first start to the last stop."""
        if not self.spans:
            return 0.0
        return max(s.stop_s for s in self.spans) - min(s.start_s for s in self.spans)

    def busy_s(self, rank: int) -> float:
        """Seconds in which `rank` ran forward or backward passes."""
        busy = ("ForwardPass", "BackwardPass")
        return sum(s.stop_s - s.start_s for s in self.spans if s.rank == rank and s.name in busy)
