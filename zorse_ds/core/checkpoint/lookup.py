"""From a range of a tensor to the pieces that hold it: loading under another plan."""

from collections.abc import Iterator
from typing import NamedTuple

from zorse_ds.core.checkpoint.manifest import DataFile, Manifest, Piece
from zorse_ds.errors import CheckpointError
from zorse_ds.ranges import Range, overlaps


class Found(NamedTuple):
    """A part of what was asked for, and where it is."""

    file: DataFile
    piece: Piece
    common: Range
    """Elements of the whole flattened tensor."""


class Lookup:
    """Finds pieces by kind, name and range."""

    def __init__(self, manifest: Manifest, where: str) -> None:
        self._where = where
        self._pieces: dict[tuple[str, str], list[tuple[DataFile, Piece]]] = {}
        for file in manifest.files:
            for piece in file.pieces:
                self._pieces.setdefault((piece.kind, piece.name), []).append((file, piece))
        self._kinds: dict[str, list[str]] = {}
        for (kind, name), entries in sorted(self._pieces.items()):
            entries.sort(key=lambda entry: entry[1].window)
            self._kinds.setdefault(name, []).append(kind)

    def has(self, kind: str, name: str) -> bool:
        """Some range of it was saved."""
        return (kind, name) in self._pieces

    def kinds_of(self, name: str) -> list[str]:
        """All kinds saved under a name, sorted."""
        return self._kinds.get(name, [])

    def find(self, kind: str, name: str, wanted: Range) -> Iterator[Found]:
        """The pieces that hold `wanted`, ascending and without overlap.

        Raises `CheckpointError` when a part of it is in no piece.
        """
        entries = self._pieces.get((kind, name), [])
        reached = wanted.start
        for i, _, common in overlaps([piece.window for _, piece in entries], [wanted]):
            if common.start != reached:
                break
            reached = common.stop
            yield Found(*entries[i], common)
        if reached < wanted.stop:
            raise CheckpointError(
                f"{self._where} lacks elements {reached} to {wanted.stop} of {name} ({kind}); "
                "expected every element once"
            )
