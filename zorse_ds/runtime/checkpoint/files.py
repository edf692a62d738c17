"""Safetensors files with a checksum for each range: written in one pass, read range by range."""

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
from zorse_ds.runtime.safetensors_format import (
    CODES,
    bytes_of,
    entry_of,
    header_of,
    read_all,
    write_all,
)

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
        write_all(file, memoryview(header))
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
    table = {
        f"{entry.kind}/{entry.name}{entry.window}": entry_of(
            _known_dtype(entry), (entry.values.numel(),), span
        )
        for entry, span in zip(entries, spans, strict=True)
    }
    return header_of(table)


def _known_dtype(entry: Entry) -> torch.dtype:
    dtype = entry.values.dtype
    if dtype not in CODES:
        raise CheckpointError(
            f"{entry.name} ({entry.kind}) is of dtype {dtype}, which a checkpoint cannot hold; "
            f"expected one of {', '.join(str(known) for known in CODES)}"
        )
    return dtype


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
    own = values.detach().cpu().contiguous()
    data = bytes_of(own)
    checksum = Checksum()
    for start in range(0, len(data), _BLOCK_BYTES):
        block = data[start : start + _BLOCK_BYTES]
        checksum.update(block)
        write_all(file, block)
    return checksum.text


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
                found = read_all(opened, memoryview(data))
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
