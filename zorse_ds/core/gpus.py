"""The catalogue of GPU types: vendors' figures, shipped with the package.

Peak is not speed: what a type really reaches is measured, or estimated in `zorse_ds.cost`. Types
that the catalogue lacks are described in the cluster file that has them (`TypeFigures`).
"""

import csv
import difflib
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from importlib import resources
from types import MappingProxyType
from typing import Annotated

from pydantic import Field

from zorse_ds.core.strict import StrictModel
from zorse_ds.errors import ClusterError

GIB = 2**30
GB_PER_S = 1e9
"""Figures of links are in units of 10⁹ bytes a second, those of memory in GiB."""

MAX_SUGGESTED = 6
_NEAR = 0.6
"""How alike, of 1, a name must look to be suggested."""


@dataclass(frozen=True, slots=True)
class GpuType:
    """One kind of device, of the catalogue or of a cluster file."""

    name: str
    vendor: str
    device_name: str
    """What the driver calls it."""
    tensor_flops: float
    """Dense 16-bit FLOP/s of the matrix units; without such units, of 32 bits."""
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


Positive = Annotated[float, Field(gt=0)]


class TypeFigures(StrictModel):
    """A device type as a cluster file describes it, under `types`. One of the TFLOPS is needed."""

    tensor_tflops: Positive | None = None
    """Dense, 16 bits; default: `fp32_tflops`."""
    fp32_tflops: Positive | None = None
    memory_gib: Positive
    usable_gib: Positive | None = None
    """What a program can allocate; default: all."""
    memory_gb_per_s: Positive | None = None
    bf16: bool = False
    """Whether it computes in bfloat16."""
    nvlink_gb_per_s: float = Field(default=0.0, ge=0)
    """One way, per device."""
    host_gb_per_s: Positive = 12.0
    """Copies to and from host memory, one way; default: sixteen lanes of PCIe 3."""
    vendor: str = ""
    device_name: str = ""
    """What the driver calls it: `zorse probe` recognises it by that."""

    def as_type(self, name: str) -> GpuType:
        """The same in the program's units. One of the TFLOPS must be there."""
        tflops = self.tensor_tflops or self.fp32_tflops
        assert tflops is not None, "the cluster's checks ask for one of the two"
        usable_gib = self.memory_gib if self.usable_gib is None else self.usable_gib
        return GpuType(
            name=name,
            vendor=self.vendor,
            device_name=self.device_name,
            tensor_flops=tflops * 1e12,
            fp32_flops=None if self.fp32_tflops is None else self.fp32_tflops * 1e12,
            memory_bytes=int(self.memory_gib * GIB),
            usable_bytes=int(usable_gib * GIB),
            memory_bytes_per_s=None
            if self.memory_gb_per_s is None
            else self.memory_gb_per_s * GB_PER_S,
            has_bf16=self.bf16,
            nvlink_bytes_per_s=self.nvlink_gb_per_s * GB_PER_S,
            pcie_bytes_per_s=self.host_gb_per_s * GB_PER_S,
        )


_PCIE_BYTES_PER_S = {3: 12e9, 4: 24e9, 5: 48e9}
"""Sixteen lanes, about three quarters of the nominal rate."""


@cache
def gpu_types() -> Mapping[str, GpuType]:
    """The catalogue, by name."""
    text = resources.files("zorse_ds.core").joinpath("gpu_types.csv").read_text("utf-8")
    rows = csv.DictReader(text.splitlines())
    return MappingProxyType({row["gpu_type"]: _parsed(row) for row in rows})


def gpu_type_named(name: str, known: Mapping[str, GpuType] | None = None) -> GpuType:
    """The entry of `known` (default: the catalogue).

    Raises `ClusterError` that suggests the nearest names.
    """
    types = gpu_types() if known is None else known
    found = types.get(name)
    if found is None:
        near = type_suggestion(name, types)
        raise ClusterError(f"GPU type {name!r} is none of the {len(types)} known ones{near}")
    return found


def type_suggestion(name: str, known: Iterable[str]) -> str:
    """`; did you mean 'a' or 'b'?` with the names that hold `name`, or else look like it.

    Upper and lower case, and the signs between, do not count: `a100` finds all of the A100s.
    """
    wanted = _plain(name)
    # One letter is like everything.
    plain = {each: _plain(each) for each in known if len(wanted) > 1}
    found = [each for each, text in plain.items() if wanted in text]
    if not found:
        scores = {each: _likeness(wanted, text) for each, text in plain.items()}
        near = [each for each, score in scores.items() if score >= _NEAR]
        found = sorted(near, key=lambda each: -scores[each])[:3]
    if not found:
        return "; `zorse gpus` lists them"
    names = [repr(each) for each in found[:MAX_SUGGESTED]]
    return f"; did you mean {' or '.join(names)}?"


def type_of_device(device_name: str) -> GpuType | None:
    """The catalogue's entry for what a driver calls a device, or None.

    A driver's name may say more than the catalogue's (`NVIDIA H200` beside `NVIDIA H200 NVL`):
    only an equal name counts, apart from case, signs and the vendor in front.
    """
    wanted = _device(device_name)
    return next(
        (each for each in gpu_types().values() if _device(each.device_name) == wanted), None
    )


def _device(text: str) -> str:
    words = [word for word in text.lower().split() if word not in ("nvidia", "tesla", "geforce")]
    return _plain("".join(words))


def _plain(text: str) -> str:
    return re.sub(r"[^a-z0-9]", "", text.lower())


def _likeness(wanted: str, name: str) -> float:
    """Of the whole names, or of `wanted` and the start of `name`, whichever is more alike."""
    texts = (name, name[: len(wanted)])
    return max(difflib.SequenceMatcher(None, wanted, text).ratio() for text in texts)


def _parsed(row: dict[str, str]) -> GpuType:
    figures = TypeFigures(
        tensor_tflops=float(row["tensor_tflops"]),
        fp32_tflops=_number(row["fp32_tflops"]),
        memory_gib=float(row["memory_gib"]),
        usable_gib=float(row["usable_gib"]),
        memory_gb_per_s=_number(row["memory_gb_per_s"]),
        bf16=row["bf16"] == "yes",
        nvlink_gb_per_s=float(row["nvlink_gb_per_s_both_ways"] or 0) / 2,
        host_gb_per_s=_PCIE_BYTES_PER_S[int(row["pcie_gen"])] / GB_PER_S,
        vendor=row["vendor"],
        device_name=row["device_name"],
    )
    return figures.as_type(row["gpu_type"])


def _number(text: str) -> float | None:
    return float(text) if text else None
