"""The weights of a folder as ranges of its files, each read when it is asked for, and only then.

A mapped file would do, but the pages of what was read count as this process's memory until the
kernel wants them back: loading would seem to need stage and file. So tensors are read straight into
memory of their own; the files' tables of contents are all that is read besides.
"""

import json
import math
import mmap
import re
from dataclasses import dataclass
from pathlib import Path
from pickle import UnpicklingError
from types import EllipsisType
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from zorse_ds.errors import ModelError
from zorse_ds.integrations.huggingface.weight_files import SAFETENSORS, files_of, weight_format
from zorse_ds.runtime.safetensors_format import DTYPES, LENGTH_BYTES, bytes_of, read_all

_MAPPED_BYTES = 2**20


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor in a file. `stored[...]`, as transformers asks for it, reads it."""

    path: Path
    offset: int
    """Of its first element, in bytes from the start of the file."""
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    @property
    def num_elements(self) -> int:
        """Elements from the first to the last in the file, with what lies between strides."""
        if 0 in self.shape:
            return 0
        return 1 + sum((n - 1) * s for n, s in zip(self.shape, self.stride, strict=True))

    def __getitem__(self, _: EllipsisType) -> Tensor:
        """The whole tensor, contiguous, in memory of its own. Raises `ModelError`."""
        flat = _new_memory(self.num_elements, self.dtype)
        with self.path.open("rb", buffering=0) as file:
            file.seek(self.offset)
            found = read_all(file, bytes_of(flat))
        if found < flat.nbytes:
            raise _damaged(self.path, f"it ends within {flat.nbytes} bytes at {self.offset}")
        return flat.as_strided(self.shape, self.stride).contiguous()


def _new_memory(num_elements: int, dtype: torch.dtype) -> Tensor:
    """Memory that goes back to the system as soon as nobody needs it (1-D).

    What is freed after a conversion to another dtype would else stay in the heap, in pieces.
    """
    num_bytes = num_elements * dtype.itemsize
    if num_bytes < _MAPPED_BYTES:
        return torch.empty(num_elements, dtype=dtype)
    memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(memory, dtype=dtype, count=num_elements)


def stored_weights(folder: Path) -> dict[str, StoredTensor | Tensor]:
    """What the files of weights in a folder hold, by name.

    Only `.bin` files older than torch 1.6 are no ranges; their tensors are read. Raises
    `ModelError` that names the file which cannot be read, or is damaged.
    """
    read = _read_safetensors if weight_format(folder) is SAFETENSORS else _read_bin
    found: dict[str, StoredTensor | Tensor] = {}
    for path in files_of(folder):
        try:
            found |= read(path)
        except ModelError:
            raise
        except UnpicklingError as problem:
            raise _no_weights(path, problem) from problem
        except Exception as problem:  # a damaged file fails in any code that reads it
            raise _damaged(path, _reason(problem)) from problem
    return found


def _read_safetensors(path: Path) -> dict[str, StoredTensor]:
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(LENGTH_BYTES), "little")
        if LENGTH_BYTES + length > size:
            raise _damaged(path, f"it has {size} bytes, and a header of {length}")
        header = json.loads(file.read(length))
    header.pop("__metadata__", None)
    start = LENGTH_BYTES + length
    return {name: _in_safetensors(path, start, size, name, of) for name, of in header.items()}


def _in_safetensors(path: Path, start: int, size: int, name: str, of: Any) -> StoredTensor:
    if of["dtype"] not in DTYPES:
        raise ModelError(
            f"{path}: {name} is of dtype {of['dtype']}; expected one of {', '.join(DTYPES)}"
        )
    dtype, shape = DTYPES[of["dtype"]], tuple(of["shape"])
    begin, end = of["data_offsets"]
    if end - begin != math.prod(shape) * dtype.itemsize or begin < 0 or start + end > size:
        raise _damaged(path, f"{name} of shape {list(shape)} is at bytes {begin} to {end}")
    strides = tuple(math.prod(shape[i + 1 :]) for i in range(len(shape)))
    return StoredTensor(path, start + begin, dtype, shape, strides)


def _read_bin(path: Path) -> dict[str, StoredTensor | Tensor]:
    """By torch's own reader, which runs no code from the file, but without its data."""
    with FakeTensorMode():
        tensors = torch.load(path, map_location="cpu", weights_only=True)
    strange = tensors if not isinstance(tensors, dict) else _no_tensor_in(tensors)
    if strange is not None:
        raise ModelError(
            f"{path} holds a {type(strange).__name__}; expected tensors by name, as "
            "model.state_dict() gives them"
        )
    found = {name: _in_bin(path, tensor) for name, tensor in tensors.items()}
    whole = {name: tensor for name, tensor in found.items() if tensor is not None}
    if len(whole) == len(found):
        return dict(whole)
    older: dict[str, StoredTensor | Tensor] = torch.load(
        path, map_location="cpu", weights_only=True
    )
    return older


def _no_tensor_in(tensors: dict[str, Any]) -> Any:
    return next((value for value in tensors.values() if not isinstance(value, Tensor)), None)


def _in_bin(path: Path, tensor: Tensor) -> StoredTensor | None:
    """Where a tensor without data lies; None in the older form of file."""
    start = tensor.untyped_storage()._checkpoint_offset
    if start is None:
        return None
    offset = start + int(tensor.storage_offset()) * tensor.itemsize
    return StoredTensor(path, offset, tensor.dtype, tuple(tensor.shape), tensor.stride())


def _damaged(path: Path, found: str) -> ModelError:
    return ModelError(f"{path} is damaged ({found}); expected a file of weights as it was saved")


def _no_weights(path: Path, problem: UnpicklingError) -> ModelError:
    """Torch's message is a page of advice on how to run what is in the file."""
    told = re.search(r"WeightsUnpickler error:\s*([^\n]+)", str(problem))
    found = told.group(1).partition(" by default")[0] if told else "it cannot be unpickled"
    return ModelError(
        f"{path} is damaged or holds more than tensors ({found}), and nothing in it was run; "
        "expected a file of weights as torch.save(model.state_dict(), path) writes it"
    )


def _reason(problem: Exception) -> str:
    """The kind of an exception and the first line of what it says."""
    lines = str(problem).strip().splitlines()
    return ": ".join([type(problem).__name__, *lines[:1]])
