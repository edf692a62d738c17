"""Link figures where nobody measured or stated any: what nodes of a GPU type usually have.

They are a start for planning, good to a factor of two; `zorse probe` measures the real ones.
"""

from typing import Any

from zorse_ds.core.gpus import GB_PER_S, GpuType

TYPICAL = (
    "typical: inside a node NVLink, or two thirds of a PCIe copy; NICs of 12.5 GB/s beside NVLink, "
    "else 3.1 GB/s"
)
"""Goes into a cluster's `link_figures`."""
NVLINK_NIC_GB_PER_S = 12.5
PLAIN_NIC_GB_PER_S = 3.1
"""100 and 25 Gbit/s."""
INTER_REGION_GB_PER_S = 0.6
"""Of each sending node."""

_SWITCHED_BYTES_PER_S = 120e9
"""Slower NVLink is a bridge between two cards, sold apart: it is not taken for granted."""
_PEER_SHARE = 2 / 3
"""What a copy between two GPUs reaches of one to host memory, over PCIe."""


def has_nvlink(kind: GpuType) -> bool:
    """Whether all GPUs of a node of this type are joined by NVLink as a rule."""
    return kind.nvlink_bytes_per_s > _SWITCHED_BYTES_PER_S


def typical_links(kind: GpuType) -> dict[str, Any]:
    """`intra_gb_per_s` and `nic_gb_per_s` of a node of `kind`, as in a cluster file."""
    joined = has_nvlink(kind)
    intra = kind.nvlink_bytes_per_s if joined else kind.pcie_bytes_per_s * _PEER_SHARE
    return {
        "intra_gb_per_s": round(intra / GB_PER_S, 1),
        "nic_gb_per_s": NVLINK_NIC_GB_PER_S if joined else PLAIN_NIC_GB_PER_S,
    }
