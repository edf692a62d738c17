"""The catalogue of GPU types: vendors' figures, shipped with the package.

Peak is not speed: what a type really reaches is measured, or estimated in `zorse_ds.cost`.
"""

import csv
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib import resources
from types import MappingProxyType

from zorse_ds.core.strict import suggestion
from zorse_ds.errors import ClusterError

GIB = 2**30
GB_PER_S = 1e9
"""Figures of links are in units of 10⁹ bytes a second, those of memory in GiB."""


@dataclass(frozen=True, slots=True)
class GpuType:
    """One row of the catalogue."""

    name: str
    vendor: str
    device_name: str
    """What the driver calls it."""
    tensor_flops: float
    """Dense 16-bit FLOP/s of the matrix units."""
    fp32_flops: float | None
    memory_bytes: int
    """What the vendor says."""
    usable_bytes: int
    """What a program can allocate."""
    memory_bytes_per_s: float | None
    has_bf16: bool
    nvlink_bytes_per_s: float
    """One way, per GPU; 0 where there is none."""
    pcie_bytes_per_s: float
    """One way, what a copy to or from host memory reaches."""


_PCIE_BYTES_PER_S = {3: 12e9, 4: 24e9, 5: 48e9}
"""Sixteen lanes, about three quarters of the nominal rate."""


@cache
def gpu_types() -> Mapping[str, GpuType]:
    """The catalogue, by name."""
    text = resources.files("zorse_ds.core").joinpath("gpu_types.csv").read_text("utf-8")
    rows = csv.DictReader(text.splitlines())
    return MappingProxyType({row["gpu_type"]: _parsed(row) for row in rows})


def gpu_type_named(name: str) -> GpuType:
    """The catalogue's entry. Raises `ClusterError` that suggests the nearest name."""
    found = gpu_types().get(name)
    if found is None:
        raise ClusterError(
            f"GPU type {name!r} is not in the catalogue of {len(gpu_types())} types"
            f"{suggestion(name.upper(), gpu_types())}"
        )
    return found


def _parsed(row: dict[str, str]) -> GpuType:
    def number(key: str) -> float | None:
        return float(row[key]) if row[key] else None

    return GpuType(
        name=row["gpu_type"],
        vendor=row["vendor"],
        device_name=row["device_name"],
        tensor_flops=float(row["tensor_tflops"]) * 1e12,
        fp32_flops=None if number("fp32_tflops") is None else float(row["fp32_tflops"]) * 1e12,
        memory_bytes=int(float(row["memory_gib"]) * GIB),
        usable_bytes=int(float(row["usable_gib"]) * GIB),
        memory_bytes_per_s=float(row["memory_gb_per_s"]) * GB_PER_S
        if row["memory_gb_per_s"]
        else None,
        has_bf16=row["bf16"] == "yes",
        nvlink_bytes_per_s=float(row["nvlink_gb_per_s_both_ways"] or 0) / 2 * GB_PER_S,
        pcie_bytes_per_s=_PCIE_BYTES_PER_S[int(row["pcie_gen"])],
    )
