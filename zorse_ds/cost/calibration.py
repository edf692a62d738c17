"""What layer times are estimated from: measured rows of other people's GPUs, and boards' figures.

The files lie beside this module; `layer_latency.txt` says where they come from.
"""

import csv
import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib import resources
from types import MappingProxyType
from typing import Literal

from zorse_ds.core.gpus import GpuType, gpu_types
from zorse_ds.core.model import LayerShape, llama_block
from zorse_ds.core.plan import Dtype

Precision = Literal["float16", "float32"]
"""16-bit formats are equally fast."""

_TYPES = {
    "a100x40": "A100-SXM-40GB",
    "a100x80": "A100-SXM-80GB",
    "a10g": "A10G",
    "a6000": "A6000",
    "l4": "L4",
    "p100": "P100-PCIE-16GB",
    "p40": "P40",
    "t4": "T4",
    "v100-pciex16": "V100-PCIE-16GB",
    "v100x16": "V100-SXM2-16GB",
    "v100x32": "V100-SXM2-32GB",
}
"""Names in the file. The row of another type (w6800) is not used: the catalogue lacks it."""

_LLAMA_BLOCKS = {
    2048: llama_block(2048, 5632, 32),
    3200: llama_block(3200, 8640, 32),
    4096: llama_block(4096, 11008, 32),
    5120: llama_block(5120, 13824, 40),
    8192: llama_block(8192, 22016, 64),
}
_USUAL_WATTS = 300.0
_USUAL_BYTES_PER_S_PER_FLOPS = 5e-3
"""Memory bandwidth where a type's is unknown."""


@dataclass(frozen=True, slots=True)
class Board:
    """What estimates look at in a GPU type."""

    gpu_type: str
    chip: str
    """The die; types without a known one are alone."""
    tensor_flops: float
    fp32_flops: float
    bytes_per_s: float
    watts: float
    has_bf16: bool

    @property
    def family(self) -> str:
        """The same card with other memory or another socket: `A100` of `A100-PCIE-40GB`."""
        return self.gpu_type.split("-")[0]

    def peak_flops(self, precision: Precision) -> float:
        """Without matrix units 16 bits are no faster than 32: halves are computed as floats."""
        return self.tensor_flops if precision == "float16" else self.fp32_flops


def precision_of(dtype: Dtype) -> Precision:
    """The column of the calibration that a dtype belongs to."""
    return "float32" if dtype == "float32" else "float16"


@cache
def _board_rows() -> Mapping[str, dict[str, str]]:
    return MappingProxyType({row["gpu_type"]: row for row in _rows("gpu_boards.csv")})


def board_of(kind: GpuType) -> Board:
    """A type of the catalogue or of a cluster file; what is not known of it is taken as usual."""
    row = _board_rows().get(kind.name, {"chip": "", "board_watts": "", "matrix_units": "yes"})
    fp32 = kind.fp32_flops or kind.tensor_flops / 8
    rate = kind.memory_bytes_per_s or kind.tensor_flops * _USUAL_BYTES_PER_S_PER_FLOPS
    return Board(
        gpu_type=kind.name,
        chip=row["chip"] or kind.name,
        tensor_flops=max(kind.tensor_flops, fp32) if row["matrix_units"] == "yes" else fp32,
        fp32_flops=fp32,
        bytes_per_s=rate,
        watts=float(row["board_watts"] or _USUAL_WATTS),
        has_bf16=kind.has_bf16,
    )


@dataclass(frozen=True, slots=True)
class LineFit:
    """Seconds against the micro-batch size: a slope and an intercept that may be negative."""

    per_sample_s: float
    fixed_s: float

    def at(self, size: int) -> float:
        """Seconds for `size` samples; negative where the line says so."""
        return self.per_sample_s * size + self.fixed_s

    @property
    def is_line(self) -> bool:
        """An intercept of several slopes, of either sign, is a fit that went wrong."""
        return abs(self.fixed_s) <= 1.5 * self.per_sample_s

    @property
    def is_plausible(self) -> bool:
        """No steep line with an intercept far below zero: the card was equally fast all along."""
        return self.fixed_s >= -0.1 * self.per_sample_s


@dataclass(frozen=True, slots=True)
class MeasuredLayer:
    """One row: a block of a model on a GPU type, at one length and precision."""

    model: str
    board: Board
    shape: LayerShape
    seq_len: int
    precision: Precision
    forward: LineFit
    backward: LineFit
    num_sizes: int
    """Micro-batch sizes 1 … n were measured; 0 = not said."""

    @property
    def key(self) -> str:
        """Tells the row from all others."""
        return f"{self.model} {self.board.gpu_type} {self.seq_len} {self.precision}"

    def fit(self, *, backward: bool) -> LineFit:
        """The line of one pass."""
        return self.backward if backward else self.forward


@cache
def measured_layers() -> tuple[MeasuredLayer, ...]:
    """The rows whose GPU type the catalogue knows and whose forward lies on a line at all."""
    rows = [_measured(row) for row in _rows("layer_latency.csv") if row["gpu"] in _TYPES]
    return tuple(row for row in rows if row.forward.is_line)


def _measured(row: dict[str, str]) -> MeasuredLayer:
    def line(name: str) -> LineFit:
        per_sample, fixed = row[f"{name}_ms_per_sample"], row[f"{name}_ms_fixed"]
        return LineFit(float(per_sample) / 1e3, float(fixed) / 1e3)

    return MeasuredLayer(
        model=row["model"],
        board=board_of(gpu_types()[_TYPES[row["gpu"]]]),
        shape=_shape(row["model"], int(row["hidden"]), int(row["params_per_layer"])),
        seq_len=int(row["seq_len"]),
        precision="float32" if row["dtype"] == "float32" else "float16",
        forward=line("fwd"),
        backward=line("bwd"),
        num_sizes=int(row["batches_measured"]),
    )


def _shape(model: str, hidden: int, num_params: int) -> LayerShape:
    if model.startswith("llama"):
        assert _LLAMA_BLOCKS[hidden].num_params == num_params
        return _LLAMA_BLOCKS[hidden]
    # The number of heads is not said, and changes no FLOPs.
    heads = math.ceil(hidden / 128)
    return LayerShape(
        role="block",
        hidden=hidden,
        num_params=num_params,
        ffn=4 * hidden,
        heads=heads,
        kv_heads=heads,
        head_dim=hidden // heads,
        num_ffn_matrices=2,
    )


def _rows(name: str) -> list[dict[str, str]]:
    text = resources.files("zorse_ds.cost").joinpath(name).read_text("utf-8")
    return list(csv.DictReader(text.splitlines()))
