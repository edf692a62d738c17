"""How long a draft's messages hold the busiest lane, without a simulation."""

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import pairwise

from zorse_ds.core.gpus import GB_PER_S
from zorse_ds.core.plan import Dtype
from zorse_ds.cost.dtypes import DTYPE_BYTES
from zorse_ds.cost.setting import Setting
from zorse_ds.planner.draft import Draft
from zorse_ds.ranges import Range

LaneKey = tuple[object, ...]
Shares = Mapping[int, float]
"""Node → the part of the batch that it runs in its group."""


@dataclass
class Loads:
    """Seconds that each lane is held, in the forward and in the backward phase of a step."""

    forward: dict[LaneKey, float] = field(default_factory=lambda: defaultdict(float))
    backward: dict[LaneKey, float] = field(default_factory=lambda: defaultdict(float))

    @property
    def forward_s(self) -> float:
        """Of the busiest lane."""
        return max(self.forward.values(), default=0.0)

    @property
    def backward_s(self) -> float:
        """Of the busiest lane."""
        return max(self.backward.values(), default=0.0)

    @property
    def whole_s(self) -> float:
        """Of the lane that is busiest over both."""
        lanes = self.forward.keys() | self.backward.keys()
        return max((self.forward[lane] + self.backward[lane] for lane in lanes), default=0.0)


def boundary_loads(draft: Draft, setting: Setting, shares: list[Shares], batch: int) -> Loads:
    """Activations down and gradients up.

    All ranks of neighbouring groups meet along the sample axis, so each node sends to each node
    below in proportion to both parts.
    """
    loads = Loads()
    hosts = [group for _, group, _ in draft.cuts]
    for (above, below), times in Counter(pairwise(hosts)).items():
        if above == below:
            continue
        element = DTYPE_BYTES[draft.groups[below].dtype]
        num_bytes = times * batch * setting.seq_len * setting.model.hidden * element
        for key, seconds in _held(setting, shares[above], shares[below], num_bytes):
            loads.forward[key] += seconds
        for key, seconds in _held(setting, shares[below], shares[above], num_bytes):
            loads.backward[key] += seconds
    return loads


def _held(
    setting: Setting, source: Shares, target: Shares, num_bytes: float
) -> Iterator[tuple[LaneKey, float]]:
    """Seconds that a boundary's bytes hold each lane between nodes, one way."""
    cluster = setting.cluster
    regions: dict[str | None, float] = defaultdict(float)
    for node, share in target.items():
        regions[cluster.nodes[node].region] += share
    shared = cluster.inter_region_gb_per_s_is == "per_link"
    for node, share in source.items():
        own = cluster.nodes[node]
        leaves = share * (1 - target.get(node, 0.0)) * num_bytes
        yield ("nic out", node), leaves / (own.nic_gb_per_s * GB_PER_S)
        if cluster.inter_region_gb_per_s is None:
            continue
        for region, part in regions.items():
            if region != own.region:
                key = ("regions", own.region, region) if shared else ("region out", node)
                far = share * part * num_bytes
                yield key, far / (cluster.inter_region_gb_per_s * GB_PER_S)
    for node, share in target.items():
        arrives = share * (1 - source.get(node, 0.0)) * num_bytes
        yield ("nic in", node), arrives / (cluster.nodes[node].nic_gb_per_s * GB_PER_S)


@lru_cache(maxsize=4096)
def ring_pace(ranks: tuple[int, ...], setting: Setting) -> float:
    """Seconds a byte that goes once around the ring of a group takes on the slowest lane."""
    if len(ranks) == 1:
        return 0.0
    slowest = min(
        setting.cluster.path(a, b).bytes_per_s
        for a, b in zip(ranks, (*ranks[1:], ranks[0]), strict=True)
    )
    return (len(ranks) - 1) / len(ranks) / slowest


def param_bytes(setting: Setting, layers: Range, element: int) -> float:
    """Bytes of the parameters of some layers."""
    return float(element * sum(s.num_params for s in setting.model.shapes[layers.as_slice()]))


def gather_s(dtype: Dtype, layers: Range, setting: Setting, pace: float) -> float:
    """Seconds of one gather of a stage's parameters."""
    return pace * param_bytes(setting, layers, DTYPE_BYTES[dtype])
