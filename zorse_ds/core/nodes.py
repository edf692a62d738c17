"""What a cluster file says of one node, and of a link between two. Units as people use them."""

from typing import Annotated

from pydantic import BeforeValidator, Field

from zorse_ds.core.strict import StrictModel

MAX_GPUS = 4096
"""Of one node."""
INTRA_LATENCY_US = 10.0
NIC_LATENCY_US = 30.0
"""Where a file says nothing: one hop inside a node, and between nodes of one region."""


def as_tuple(value: object) -> object:
    """JSON has lists only, and strict records take tuples only."""
    return tuple(value) if isinstance(value, list) else value


class Node(StrictModel):
    """One host with its GPUs, in rank order."""

    name: str | None = None
    """The host's name, as in a hostfile."""
    gpu_type: str | None = None
    num_gpus: Annotated[int, Field(ge=1, le=MAX_GPUS)] | None = None
    gpu_types: Annotated[tuple[str, ...], BeforeValidator(as_tuple)] | None = None
    """Either `gpu_type` and `num_gpus`, or one type a GPU here."""
    intra_gb_per_s: float = Field(gt=0)
    """Between two GPUs of the node, each GPU one way."""
    intra_latency_us: float = Field(default=INTRA_LATENCY_US, ge=0)
    intra_direct: bool = True
    """False: GPUs of the node can only talk through host memory."""
    nic_gb_per_s: float = Field(gt=0)
    """Of the whole node to other nodes, one way."""
    nic_latency_us: float = Field(default=NIC_LATENCY_US, ge=0)
    host_gb_per_s: Annotated[float, Field(gt=0)] | None = None
    """Copies between a GPU and host memory, per GPU; default: by the type's PCIe."""
    host_memory_gib: Annotated[float, Field(gt=0)] | None = None
    usable_gib: Annotated[float, Field(gt=0)] | None = None
    """What a program can allocate on each GPU; default: the catalogue's figure."""
    region: str | None = None
    price_per_hour: Annotated[float, Field(ge=0)] | None = None
    """Of the whole node, in any one currency."""

    @property
    def types(self) -> tuple[str, ...]:
        """The GPU type of each GPU."""
        if self.gpu_types is not None:
            return self.gpu_types
        return (self.gpu_type or "",) * (self.num_gpus or 0)


class NodeLink(StrictModel):
    """A measured link between two nodes, better known than their NICs alone say."""

    nodes: Annotated[tuple[int, int], BeforeValidator(as_tuple)]
    gb_per_s: float = Field(gt=0)
    """One way."""
    latency_us: float = Field(ge=0)
    direct: bool = True
    """False: GPUs of the two nodes can only talk through host memory."""
