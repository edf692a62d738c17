"""Reads the history and configuration that wandb wrote offline.

A `.wandb` file is a log of protobuf records in LevelDB's format: after a header of 7 bytes, blocks
of 32 KiB in which each piece of a record has a checksum (4 bytes), a length (2) and a type (1).
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

BLOCK_BYTES = 32 * 1024
HEADER_BYTES = 7
FULL, LAST = 1, 4


def history_of(folder: Path) -> list[dict[str, Any]]:
    """The logged rows of the only run under `folder`, in order."""
    return [
        {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in items}
        for items in (own.history.item for own in _all(folder, "history"))
    ]


def config_of(folder: Path) -> dict[str, Any]:
    """The configuration of the only run under `folder`, by its top-level keys."""
    config: dict[str, Any] = {}
    for record in _all(folder, "run"):
        config |= {item.key: json.loads(item.value_json) for item in record.run.config.update}
    for record in _all(folder, "config"):
        config |= {item.key: json.loads(item.value_json) for item in record.config.update}
    return config


def _all(folder: Path, kind: str) -> list[Any]:
    """The records of a kind."""
    from wandb.proto.wandb_internal_pb2 import Record

    (path,) = [path for path in folder.rglob("*.wandb") if path.stat().st_size > HEADER_BYTES]
    records = []
    for raw in _records(path.read_bytes()):
        record = Record()
        record.ParseFromString(raw)
        if record.WhichOneof("record_type") == kind:
            records.append(record)
    return records


def _records(data: bytes) -> Iterator[bytes]:
    position, pieces = HEADER_BYTES, b""
    while position + HEADER_BYTES <= len(data):
        left_in_block = BLOCK_BYTES - position % BLOCK_BYTES
        if left_in_block < HEADER_BYTES:
            position += left_in_block
            continue
        _, length, kind = struct.unpack_from("<IHB", data, position)
        position += HEADER_BYTES
        pieces += data[position : position + length]
        position += length
        if kind in (FULL, LAST):
            yield pieces
            pieces = b""
