"""What a safetensors file looks like: a length, a table of contents as JSON, the tensors' bytes.

The library's `save_file` can neither hash while it writes nor write tensors one after the other,
and reads through mapped files; what is written here, it reads.
"""

import ctypes
import json
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

CODES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
DTYPES = {code: dtype for dtype, code in CODES.items()}
LENGTH_BYTES = 8
"""Of the header's length, little-endian, at the start of the file."""


def header_of(table: Mapping[str, object]) -> bytes:
    """Length and table of contents, padded so that data starts aligned.

    `table` maps names to what `entry_of` returns.
    """
    whole = {"__metadata__": {"format": "pt"}, **table}
    text = json.dumps(whole, separators=(",", ":")).encode()
    text = text.ljust(-(-len(text) // 8) * 8)
    return len(text).to_bytes(LENGTH_BYTES, "little") + text


def entry_of(dtype: torch.dtype, shape: tuple[int, ...], span: tuple[int, int]) -> dict[str, Any]:
    """A tensor's entry; `span` is in bytes from the end of the header."""
    return {"dtype": CODES[dtype], "shape": list(shape), "data_offsets": list(span)}


def bytes_of(tensor: Tensor) -> memoryview:
    """The memory of a contiguous tensor on the CPU, for as long as the tensor lives.

    Not by way of numpy, after which a storage cannot be resized any more.
    """
    assert tensor.is_contiguous() and tensor.device.type == "cpu", "of one piece, on the CPU"
    array = (ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr())
    return memoryview(array).cast("B")


def write_all(file: Any, data: memoryview) -> None:
    """Write to a raw file, which may take less than it is given."""
    while data:
        data = data[file.write(data) :]


def read_all(file: Any, target: memoryview) -> int:
    """Fill `target` from a raw file, which may give less than it is asked for; the bytes found."""
    filled = 0
    while filled < len(target) and (count := file.readinto(target[filled:])):
        filled += count
    return filled
