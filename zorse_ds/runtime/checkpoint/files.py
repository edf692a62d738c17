"""Safetensors files with a checksum for each range: written in one pass, read range by range.

The format is simple and the library's `save_file` can neither hash while it writes nor write
tensors one after the other; what is written here, its `safe_open` reads.
"""

import json
import os
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from zorse_ds.core.checkpoint.lookup import Lookup
from zorse_ds.core.checkpoint.manifest import DataFile, Manifest, Piece
from zorse_ds.core.checkpoint.sums import Checksum, checksum_of, damaged
from zorse_ds.errors import CheckpointError
from zorse_ds.ranges import Range, consecutive
from zorse_ds.runtime.checkpoint.capture import Entry

_CODES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
_BLOCK_BYTES = 8 * 1024 * 1024


def write_entries(path: Path, entries: Sequence[Entry]) -> DataFile:
    """Write a file and have it on the disk; returns what the manifest says of it.

    Memory: one entry where it is not on the CPU. Raises `OSError`, or `CheckpointError` for a
    dtype that safetensors does not know.
    """
    # The widest first, so that each tensor starts at a multiple of its element's size.
    ordered = sorted(entries, key=lambda entry: -entry.values.element_size())
    spans = consecutive([entry.values.nbytes for entry in ordered])
    header = _header(ordered, spans)
    pieces = []
    with path.open("wb", buffering=0) as file:
        _write_all(file, memoryview(header))
        for entry, span in zip(ordered, spans, strict=True):
            checksum = _write_hashed(file, entry.values)
            offset = len(header) + span.start
            pieces.append(_piece(entry, offset, checksum))
        os.fsync(file.fileno())
    size = len(header) + sum(span.size for span in spans)
    return DataFile(
        name=path.name,
        num_bytes=size,
        header_bytes=len(header),
        header_checksum=checksum_of(header),
        pieces=tuple(pieces),
    )


def _header(entries: Sequence[Entry], spans: Sequence[Range]) -> bytes:
    """Length (8 bytes, little-endian), then JSON padded so that data starts aligned."""
    table: dict[str, object] = {"__metadata__": {"format": "pt"}}
    for entry, span in zip(entries, spans, strict=True):
        table[f"{entry.kind}/{entry.name}{entry.window}"] = {
            "dtype": _code_of(entry),
            "shape": [entry.values.numel()],
            "data_offsets": list(span),
        }
    text = json.dumps(table, separators=(",", ":")).encode()
    text = text.ljust(-(-len(text) // 8) * 8)
    return len(text).to_bytes(8, "little") + text


def _code_of(entry: Entry) -> str:
    code = _CODES.get(entry.values.dtype)
    if code is None:
        raise CheckpointError(
            f"{entry.name} ({entry.kind}) is of dtype {entry.values.dtype}, which a checkpoint "
            f"cannot hold; expected one of {', '.join(str(dtype) for dtype in _CODES)}"
        )
    return code


def _piece(entry: Entry, offset: int, checksum: str) -> Piece:
    return Piece(
        name=entry.name,
        kind=entry.kind,
        start=entry.window.start,
        stop=entry.window.stop,
        dtype=str(entry.values.dtype).removeprefix("torch."),
        offset=offset,
        num_bytes=entry.values.nbytes,
        checksum=checksum,
    )


def _write_hashed(file, values: Tensor) -> str:  # type: ignore[no-untyped-def]
    data = _bytes_of(values.detach().cpu().contiguous())
    checksum = Checksum()
    for start in range(0, len(data), _BLOCK_BYTES):
        block = data[start : start + _BLOCK_BYTES]
        checksum.update(block)
        _write_all(file, block)
    return checksum.text


def _write_all(file, data: memoryview) -> None:  # type: ignore[no-untyped-def]
    """A raw file may take less than it is given."""
    while data:
        data = data[file.write(data) :]


def _bytes_of(tensor: Tensor) -> memoryview:
    """The memory of a contiguous tensor on the CPU."""
    return memoryview(tensor.view(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]


class CheckpointReader:
    """Reads ranges of the tensors of one checkpoint; every byte that is used was verified.

    Raises `CheckpointError` that names the damaged file.
    """

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        self.folder = folder
        self.manifest = manifest
        self.lookup = Lookup(manifest, str(folder))

    def read_into(self, target: Tensor, kind: str, name: str, window: Range) -> None:
        """Fill `target` (1-D, `window.size`) with elements `window`, in its own dtype."""
        for file, piece, common in self.lookup.find(kind, name, window):
            values = self._read_piece(file, piece)
            part = values[common.relative_to(piece.start).as_slice()]
            target[common.relative_to(window.start).as_slice()].copy_(part)

    def dtype_of(self, kind: str, name: str) -> torch.dtype:
        """The dtype that a tensor was saved in."""
        first = next(self.lookup.find(kind, name, Range(0, 1)))
        dtype: torch.dtype = getattr(torch, first.piece.dtype)
        return dtype

    def read_whole(self, kind: str, name: str) -> Tensor:
        """A whole tensor in the shape and dtype it was saved in."""
        shape = self.manifest.shapes[name]
        size = torch.Size(shape).numel()
        target = torch.empty(size, dtype=self.dtype_of(kind, name)) if size else torch.empty(0)
        self.read_into(target, kind, name, Range(0, size))
        return target.view(shape)

    def verify_header(self, file: DataFile) -> None:
        """Compare size and header of a file with what was written."""
        path = self.folder / file.name
        try:
            size = path.stat().st_size
            with path.open("rb") as opened:
                header = opened.read(file.header_bytes)
        except OSError as problem:
            raise damaged(path, str(problem.strerror)) from None
        if size != file.num_bytes:
            raise damaged(path, f"it has {size} bytes instead of {file.num_bytes}")
        if checksum_of(header) != file.header_checksum:
            raise damaged(path, "the checksum of its header differs from that in the manifest")

    def verify(self, file: DataFile, kinds: Sequence[str]) -> None:
        """Read all pieces of some kinds, for their checksums alone."""
        for piece in file.pieces:
            if piece.kind in kinds:
                self._read_piece(file, piece)

    def _read_piece(self, file: DataFile, piece: Piece) -> Tensor:
        """A whole piece: its checksum is of all its bytes."""
        path = self.folder / file.name
        data = bytearray(piece.num_bytes)
        try:
            with path.open("rb", buffering=0) as opened:
                opened.seek(piece.offset)
                found = _read_all(opened, memoryview(data))
        except OSError as problem:
            raise damaged(path, str(problem.strerror)) from None
        if found < piece.num_bytes:
            raise damaged(path, f"it ends before {piece.name} ({piece.kind})")
        if checksum_of(memoryview(data)) != piece.checksum:
            raise damaged(path, f"the checksum of {piece.name} ({piece.kind}) differs")
        values = torch.frombuffer(data, dtype=getattr(torch, piece.dtype)) if data else _EMPTY
        if values.numel() != piece.window.size:
            raise damaged(path, f"{piece.name} ({piece.kind}) has another number of elements")
        return values


_EMPTY = torch.empty(0)


def _read_all(file, target: memoryview) -> int:  # type: ignore[no-untyped-def]
    """Fill `target` from a raw file, which may give less than it is asked for."""
    filled = 0
    while filled < len(target) and (count := file.readinto(target[filled:])):
        filled += count
    return filled
