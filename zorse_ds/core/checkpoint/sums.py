"""Checksums: of ranges and headers (fast, xxh3), and of small files (`sha256sum -c` reads them)."""

import hashlib
import re
from collections.abc import Iterable
from pathlib import Path

import xxhash

from zorse_ds.errors import CheckpointError

SUMS_NAME = "SHA256SUMS"
_LINE = re.compile(r"([0-9a-f]{64})  (.+)")


class Checksum:
    """A 128-bit xxh3 checksum of bytes that come in parts."""

    def __init__(self) -> None:
        self._state = xxhash.xxh3_128()

    def update(self, data: bytes | memoryview) -> None:
        """Add the next bytes."""
        self._state.update(data)

    @property
    def text(self) -> str:
        """The checksum of all bytes so far, 32 hexadecimal digits."""
        return self._state.hexdigest()


def checksum_of(data: bytes | memoryview) -> str:
    """The checksum of `data` in one go."""
    whole = Checksum()
    whole.update(data)
    return whole.text


def damaged(path: Path, found: str) -> CheckpointError:
    """The error for a file that is not as it was written."""
    return CheckpointError(
        f"{path} is damaged ({found}); expected the bytes that were saved, so load an older tag or "
        "a copy of this one"
    )


def sums_text(folder: Path, names: Iterable[str]) -> str:
    """One line for each of the small files."""
    return "".join(f"{_sha256(folder / name)}  {name}\n" for name in names)


def verified_names(folder: Path) -> list[str]:
    """The files that `SHA256SUMS` lists, each with the sum it has there.

    Raises `CheckpointError` that names the first file that is not as it was.
    """
    path = folder / SUMS_NAME
    try:
        text = path.read_bytes().decode("ascii")
    except (OSError, ValueError) as problem:
        raise damaged(path, getattr(problem, "strerror", None) or "not a text") from None
    *lines, rest = text.split("\n")
    matches = [_LINE.fullmatch(line) for line in lines]
    if rest or not all(matches):
        raise damaged(path, "a line is not as it was")
    names = []
    for match in matches:
        assert match is not None
        _check(folder / match[2], match[1])
        names.append(match[2])
    return names


def _check(path: Path, expected: str) -> None:
    try:
        found = _sha256(path)
    except (OSError, ValueError) as problem:
        reason = getattr(problem, "strerror", None) or problem
        raise damaged(path, f"{reason}, but {SUMS_NAME} lists it") from None
    if found != expected:
        raise damaged(path, f"its checksum differs from that in {SUMS_NAME}")


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
