"""Megatron's indexed data sets as samples: tokens are read out of the `.bin` where they lie.

An index (`.idx`, little-endian) is: `MMIDIDX` and two zero bytes; version 1 (u64); a code of the
tokens' type (u8); numbers of sequences and of entries of the document index (u64 each); then by
sequence its length in tokens (i32) and its first byte in the `.bin` (i64); then the document index
(i64): the sequences that documents begin with, and one behind the last. A multimodal data set adds
one byte a sequence, which is not read.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from zorse_ds.errors import DataError
from zorse_ds.integrations.data.holdout import Holdout

_HEADER = b"MMIDIDX\x00\x00"
_VERSION = 1
_FIXED_BYTES = len(_HEADER) + 8 + 1 + 8 + 8
_TYPES = {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}
"""Codes of whole numbers; 6 and 7 are floats, which are no tokens."""
_ENDINGS = (".idx", ".bin")


def indexed_prefix(source: Any) -> Path | None:
    """The path without ending if `source` is one half of an indexed pair, else None."""
    if not isinstance(source, str | Path) or Path(source).suffix not in _ENDINGS:
        return None
    return Path(source).expanduser().with_suffix("")


class IndexedTokens:
    """Documents of an indexed data set, mapped into memory. `len` is their number.

    Raises `DataError` with one sentence for a file that is missing, of another format, or cut off.
    """

    def __init__(self, prefix: Path) -> None:
        self.prefix = prefix
        for path in map(self._path, _ENDINGS):
            if not path.is_file():
                raise DataError(f"{path} does not exist; expected both halves of an indexed pair")
        lengths, pointers, documents, kind = self._read_index()
        self.tokens = np.memmap(self._path(".bin"), dtype=kind, mode="r") if lengths.any() else None
        self._check(lengths, pointers, documents, np.dtype(kind).itemsize)
        self.starts = pointers // np.dtype(kind).itemsize
        """First token of each sequence."""
        self.lengths = lengths.astype(np.int64)
        self.documents = documents
        """First sequence of each document, and one behind the last."""

    def __len__(self) -> int:
        return len(self.documents) - 1

    def __getitem__(self, document: int) -> np.ndarray:
        """The tokens (int64) of a document."""
        sequences = range(int(self.documents[document]), int(self.documents[document + 1]))
        parts = [self.part(i, 0, int(self.lengths[i])) for i in sequences]
        return np.concatenate([np.empty(0, np.int64), *parts])

    def part(self, sequence: int, start: int, stop: int) -> np.ndarray:
        """Tokens `[start, stop)` (int64) of a sequence."""
        if self.tokens is None:
            return np.empty(0, np.int64)
        first = int(self.starts[sequence])
        return self.tokens[first + start : first + stop].astype(np.int64)

    def _path(self, ending: str) -> Path:
        return self.prefix.with_name(self.prefix.name + ending)

    def _read_index(self) -> tuple[np.ndarray, np.ndarray, np.ndarray, str]:
        path = self._path(".idx")
        raw = np.memmap(path, dtype="u1", mode="r") if path.stat().st_size else np.empty(0, "u1")
        if len(raw) < _FIXED_BYTES or raw[: len(_HEADER)].tobytes() != _HEADER:
            raise DataError(f"{path} does not begin as an index does; expected one of Megatron")
        version, code, *counts = np.frombuffer(
            raw[len(_HEADER) : _FIXED_BYTES].tobytes(), "<u8,u1,<u8,<u8", count=1
        )[0].tolist()
        if version != _VERSION or code not in _TYPES:
            raise DataError(
                f"{path} has version {version} and the type code {code}; expected version "
                f"{_VERSION} and a code of whole numbers ({', '.join(map(str, _TYPES))})"
            )
        num_sequences, num_documents = counts
        needed = _FIXED_BYTES + 12 * num_sequences + 8 * num_documents
        if len(raw) < needed:
            raise DataError(
                f"{path} has {len(raw)} bytes; expected at least {needed}: it is cut off"
            )
        columns, position = [], _FIXED_BYTES
        for kind, count in (("<i4", num_sequences), ("<i8", num_sequences), ("<i8", num_documents)):
            stop = position + np.dtype(kind).itemsize * count
            columns.append(np.frombuffer(raw[position:stop].tobytes(), kind))
            position = stop
        return columns[0], columns[1], columns[2], _TYPES[code]

    def _check(
        self, lengths: np.ndarray, pointers: np.ndarray, documents: np.ndarray, item: int
    ) -> None:
        path, size = self._path(".bin"), self._path(".bin").stat().st_size
        ends = pointers + lengths.astype(np.int64) * item
        if len(ends) and (int(ends.max()) > size or pointers.min() < 0 or (pointers % item).any()):
            raise DataError(
                f"{path} has {size} bytes, but its index points up to {int(ends.max())}; expected "
                "both files of one data set"
            )
        steps = np.diff(documents)
        if (
            not len(documents)
            or documents[0] != 0
            or documents[-1] != len(lengths)
            or min(steps, default=0) < 0
        ):
            raise DataError(
                f"{self._path('.idx')} has documents that do not cover its {len(lengths)} "
                "sequences in order; expected a document index from 0 to that"
            )


class IndexedSamples:
    """Documents laid end to end and cut every `seq_len`, as `tokenise_and_pack` does; a map.

    `holdout` takes one side of the documents only. Ends of text are those that the documents have.
    Raises `DataError` when there is no token.
    """

    def __init__(self, tokens: IndexedTokens, seq_len: int, holdout: Holdout | None = None) -> None:
        if seq_len < 2:
            raise DataError(
                f"seq_len is {seq_len}; expected at least 2, for each predicts the next"
            )
        self._tokens, self._seq_len = tokens, seq_len
        documents = np.arange(len(tokens))
        if holdout is not None:
            documents = holdout.rows_of(len(tokens))
        spans = [np.arange(tokens.documents[d], tokens.documents[d + 1]) for d in documents]
        self._sequences = np.concatenate(spans) if spans else np.empty(0, np.int64)
        self._ends = np.cumsum(tokens.lengths[self._sequences])
        self._size = -(-int(self._ends[-1]) // seq_len) if len(self._ends) else 0
        if not self._size:
            raise DataError(f"{tokens.prefix} holds no token; expected at least one")

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, index: int) -> Mapping[str, np.ndarray]:
        """A sample: its tokens as `input_ids` and as `labels`."""
        if not 0 <= index < len(self):
            raise IndexError(index)
        row = self._row(index)
        return {"input_ids": row, "labels": row}

    def select(self, rows: Sequence[int]) -> list[Mapping[str, np.ndarray]]:
        """Some samples, read now."""
        return [self[i] for i in rows]

    def _row(self, index: int) -> np.ndarray:
        start = index * self._seq_len
        stop = min(start + self._seq_len, int(self._ends[-1]))
        first = int(np.searchsorted(self._ends, start, side="right"))
        last = int(np.searchsorted(self._ends, stop, side="left"))
        parts = []
        for at in range(first, last + 1):
            begin = int(self._ends[at - 1]) if at else 0
            stop_here = min(stop, int(self._ends[at])) - begin
            parts.append(
                self._tokens.part(int(self._sequences[at]), max(start - begin, 0), stop_here)
            )
        return np.concatenate(parts)
