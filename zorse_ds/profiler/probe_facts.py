"""What probing finds out, as data: accounts of single ranks, and figures of pairs of ranks."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class DeviceFacts:
    """A rank's device, measured with nothing else on its links."""

    kind: Literal["cpu", "cuda"]
    name: str
    """As the driver calls it."""
    memory_bytes: int
    """Of the device; for a CPU of the whole host."""
    usable_bytes: int
    """What was free of it."""
    host_memory_bytes: int
    fp32_flops: float
    half_flops: float | None
    """FLOP/s of 16-bit matrices, where the device has units for them."""
    has_bf16: bool
    memory_bytes_per_s: float
    """Read and written by a copy within the device."""
    host_bytes_per_s: float
    """Copies to and from host memory, the slower direction."""
    reaches_peers: bool
    """Whether it can reach all other devices of its host without host memory."""


@dataclass(frozen=True)
class RankFacts:
    """One rank's own account; nothing of it is derived from the rank's number."""

    rank: int
    host: str
    device: DeviceFacts
    versions: Mapping[str, str]


@dataclass(frozen=True)
class Pairing:
    """Ranks that are measured together: the first pair alone, then all pairs at once."""

    pairs: tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class PairFigures:
    """The link between the ends of a pairing."""

    pairing: Pairing
    latency_s: float
    """Of an empty message, one way."""
    bytes_per_s: float
    """Of one pair's messages, one way."""
    total_bytes_per_s: float
    """Of all pairs together."""
    is_direct: bool
    """False: messages had to pass through host memory."""


@dataclass(frozen=True)
class ProbeResult:
    """Everything that probing found, alike on every rank."""

    ranks: tuple[RankFacts, ...]
    links: tuple[PairFigures, ...]
