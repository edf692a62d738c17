"""Megatron's indexed pairs, written here byte by byte after the public format."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from tests.inprocess.data_tokenizer import make_tokenizer
from zorse_ds.errors import DataError
from zorse_ds.integrations.data import Holdout, IndexedSamples, IndexedTokens, prepare_text

CODES = {"u1": 1, "i2": 3, "i4": 4, "i8": 5, "u2": 8}
FORMATS = {"u1": "B", "i2": "h", "i4": "i", "i8": "q", "u2": "H"}


def write_pair(
    prefix: Path, documents: Sequence[Sequence[Sequence[int]]], kind: str = "i4", gap: int = 0
) -> None:
    """Documents of sequences of tokens; `gap` unused items lie behind each sequence."""
    sequences = [sequence for document in documents for sequence in document]
    item = struct.calcsize(f"<{FORMATS[kind]}")
    data, pointers = b"", []
    for sequence in sequences:
        pointers.append(len(data))
        data += struct.pack(f"<{len(sequence)}{FORMATS[kind]}", *sequence) + b"\x07" * gap * item
    firsts = [0]
    for document in documents:
        firsts.append(firsts[-1] + len(document))
    index = b"MMIDIDX\x00\x00" + struct.pack("<Q", 1) + struct.pack("<B", CODES[kind])
    index += struct.pack("<QQ", len(sequences), len(firsts))
    index += struct.pack(f"<{len(sequences)}i", *map(len, sequences))
    index += struct.pack(f"<{len(sequences)}q", *pointers)
    index += struct.pack(f"<{len(firsts)}q", *firsts)
    prefix.with_suffix(".bin").write_bytes(data)
    prefix.with_suffix(".idx").write_bytes(index)


def documents_of(seed: int) -> list[list[list[int]]]:
    rng = np.random.default_rng(seed)
    return [
        [rng.integers(0, 120, rng.integers(0, 9)).tolist() for _ in range(rng.integers(1, 4))]
        for _ in range(9)
    ]


def joined(documents: Sequence[Sequence[Sequence[int]]]) -> list[int]:
    return [token for document in documents for sequence in document for token in sequence]


@pytest.mark.parametrize("kind", list(CODES))
@pytest.mark.parametrize("gap", [0, 3])
def test_documents_read_back_equal(kind: str, gap: int, tmp_path: Path) -> None:
    documents = documents_of(5)
    write_pair(tmp_path / "data", documents, kind, gap)
    found = IndexedTokens(tmp_path / "data")
    assert len(found) == len(documents)
    assert [found[i].tolist() for i in range(len(found))] == [joined([d]) for d in documents]


@pytest.mark.parametrize("seq_len", [2, 5, 16, 1000])
@pytest.mark.parametrize("seed", range(4))
def test_samples_lose_no_token(seq_len: int, seed: int, tmp_path: Path) -> None:
    documents = documents_of(seed)
    write_pair(tmp_path / "data", documents, gap=seed)
    samples = prepare_text(
        str(tmp_path / "data.idx"),
        make_tokenizer(eos_token="<end>"),
        seq_len,
        cache_dir=tmp_path,
        builds=True,
        barrier=lambda: None,
    )
    rows = [samples[i]["input_ids"].tolist() for i in range(len(samples))]
    row = joined(documents)
    assert rows == [row[start : start + seq_len] for start in range(0, len(row), seq_len)]
    assert all((samples[i]["labels"] == samples[i]["input_ids"]).all() for i in range(len(samples)))
    with pytest.raises(IndexError):
        samples[len(samples)]


def test_documents_are_held_out_whole(tmp_path: Path) -> None:
    documents = [[[i] * 4] for i in range(10)]
    write_pair(tmp_path / "data", documents)
    tokens = IndexedTokens(tmp_path / "data")
    sides = [IndexedSamples(tokens, 4, Holdout(0.3, 1, held)) for held in (False, True)]
    found = [[int(s[i]["input_ids"][0]) for i in range(len(s))] for s in sides]
    assert [len(side) for side in found] == [7, 3]
    assert sorted(found[0] + found[1]) == list(range(10))


def broken(folder: Path, name: str) -> None:
    write_pair(folder / "data", documents_of(0))
    index, data = folder / "data.idx", folder / "data.bin"
    raw = index.read_bytes()
    if name == "no bin":
        data.unlink()
    elif name == "text":
        index.write_text("no index")
    elif name == "version":
        index.write_bytes(raw[:9] + struct.pack("<Q", 2) + raw[17:])
    elif name == "floats":
        index.write_bytes(raw[:17] + b"\x07" + raw[18:])
    elif name == "cut":
        index.write_bytes(raw[:-5])
    elif name == "short bin":
        data.write_bytes(data.read_bytes()[:-4])
    elif name == "documents":
        index.write_bytes(raw[:-8] + struct.pack("<q", 3))
    else:
        write_pair(folder / "data", [[[]]])


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("no bin", "data.bin does not exist; expected both halves"),
        ("text", "data.idx does not begin as an index does"),
        ("version", "has version 2 and the type code 4; expected version 1"),
        ("floats", "has version 1 and the type code 7; expected version 1 and a code of whole"),
        ("cut", "bytes; expected at least .*: it is cut off"),
        ("short bin", "data.bin has .* bytes, but its index points up to"),
        ("documents", "has documents that do not cover its"),
        ("empty", "holds no token; expected at least one"),
    ],
)
def test_a_damaged_pair_is_one_sentence(name: str, sentence: str, tmp_path: Path) -> None:
    broken(tmp_path, name)
    with pytest.raises(DataError, match=sentence) as caught:
        IndexedSamples(IndexedTokens(tmp_path / "data"), 4)
    assert "\n" not in str(caught.value)
