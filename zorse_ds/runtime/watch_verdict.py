"""What ended a job, as facts and as one sentence. Pure: no threads, no sockets."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

Kind = Literal["raised", "gone", "silent"]


@dataclass(frozen=True, slots=True)
class Place:
    """Where a rank is."""

    rank: int
    stages: tuple[int, ...]
    device: str
    host: str
    pid: int
    home: str
    """Equal for processes that can signal each other: host and process namespace."""

    def __str__(self) -> str:
        hosted = "stage" if len(self.stages) == 1 else "stages"
        stages = ", ".join(map(str, self.stages))
        return f"rank {self.rank} ({hosted} {stages}, {self.device} of {self.host})"


@dataclass(frozen=True, slots=True)
class State:
    """What a rank is doing."""

    step: int | None
    """None outside of `train_batch` and `eval_batch`."""
    doing: str
    """The instruction, or what there is instead."""
    age_s: float
    """Since it began."""
    waits: bool = False
    """For another rank: its main thread is in a call that needs one."""
    stack: tuple[str, ...] = ()
    """Of its main thread, innermost call last."""

    def __str__(self) -> str:
        return self.doing if self.step is None else f"{self.doing} of step {self.step}"


UNKNOWN = State(None, "nothing that was heard of", 0.0)


@dataclass(frozen=True, slots=True)
class Verdict:
    """Why all ranks end."""

    kind: Kind
    ranks: tuple[int, ...]
    """Who is named."""
    text: str

    def to_dict(self) -> dict[str, Any]:
        """Plain data."""
        return asdict(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> "Verdict":
        """See `to_dict`."""
        return cls(data["kind"], tuple(data["ranks"]), data["text"])


def raised(place: Place, state: State, error: str) -> Verdict:
    """A rank raised `error`, given as `Type: message`."""
    text = f"{place} failed at {state}: {error}"
    return Verdict("raised", (place.rank,), text)


def gone(place: Place, state: State) -> Verdict:
    """A process ended without a word."""
    text = (
        f"{place} is gone: its process ended without a word (killed, out of memory, or its host is "
        f"lost); last heard of at {state}"
    )
    return Verdict("gone", (place.rank,), text)


def silent(
    places: Sequence[Place],
    last: Mapping[int, State],
    answers: Mapping[int, State],
    timeout_s: float,
) -> Verdict:
    """Some rank did not go on, usually for `timeout_s`: name who holds the others up.

    Those whose process does not answer, else those that wait for nobody, else all.
    """
    dumb = tuple(place.rank for place in places if place.rank not in answers)
    busy = tuple(rank for rank, state in answers.items() if not state.waits)
    named = dumb or busy or tuple(sorted(answers))
    how = "stopped answering" if dumb else "did not go on"
    if not dumb and not busy:
        how = "wait for each other"
    *others, last_named = [str(place) for place in places if place.rank in named]
    who = f"{', '.join(others)} and {last_named}" if others else last_named
    known = {**last, **answers}.values()
    waited_s = max((state.age_s for state in known if state.step), default=0.0)
    lines = [
        f"{who} {how}: no progress for {waited_s:.1f} s (zorse.timeout_s is {timeout_s:g}); "
        "the last instruction of each rank:"
    ]
    for place in places:
        state = answers.get(place.rank) or last.get(place.rank, UNKNOWN)
        lines += _lines_of(place, state, place.rank in named, place.rank in answers)
    return Verdict("silent", named, "\n".join(lines))


def silent_hub(first: Place, last: State, own: Place, state: State) -> Verdict:
    """The hub does not answer, so nobody knows what the others are doing."""
    text = (
        f"the watch on the host of {first} stopped answering: the host is stopped, overloaded or "
        f"out of reach; that rank was last heard of at {last}; {own} is at {state} for "
        f"{state.age_s:.1f} s"
    )
    return Verdict("silent", (first.rank,), text)


def hub_gone(first: Place, last: State) -> Verdict:
    """The hub's connection broke: more than a rank of its host is lost."""
    text = (
        f"the watch on the host of {first} is gone: its process was killed, or the host is lost; "
        f"that rank was last heard of at {last}"
    )
    return Verdict("gone", (first.rank,), text)


def _lines_of(place: Place, state: State, is_named: bool, answered: bool) -> list[str]:
    tail = f", for {state.age_s:.1f} s" if answered else ", then no answer"
    tail += ", waiting for another rank" if state.waits else ""
    lines = [f"  rank {place.rank}: {state}{tail}"]
    if is_named and answered:
        lines += [f"    {line}" for line in state.stack]
    return lines
