"""Plain data as JSON and back; from a range to the pieces that hold it; manifests; checksums."""

from __future__ import annotations

import json
import math
import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zorse_ds.core.checkpoint.lookup import Lookup
from zorse_ds.core.checkpoint.manifest import DataFile, Manifest, Piece
from zorse_ds.core.checkpoint.plain import Scalar, TensorRef, decode, encode
from zorse_ds.core.checkpoint.sums import SUMS_NAME, sums_text, verified_names
from zorse_ds.errors import CheckpointError
from zorse_ds.ranges import Range, consecutive

LEAVES = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text()
KEYS = st.text() | st.integers() | st.tuples(st.integers(), st.text()) | st.just("!")
PLAIN = st.recursive(
    LEAVES,
    lambda inner: (
        st.lists(inner) | st.lists(inner).map(tuple) | st.dictionaries(KEYS, inner, max_size=4)
    ),
    max_leaves=12,
)


@given(PLAIN)
def test_plain_data_comes_back_the_same(value: Any) -> None:
    found = decode(json.loads(json.dumps(encode(value, "state"))))
    assert repr(found) == repr(value)


def test_counters_scalars_and_references_come_back() -> None:
    value = {
        "milestones": Counter({3: 2, 7: 1}),
        "step": Scalar("float32", 3.0),
        "ema": [TensorRef("client/0")],
        "nan": math.nan,
    }
    found = decode(json.loads(json.dumps(encode(value, "state"))))
    assert repr(found) == repr(value) and type(found["milestones"]) is Counter


def test_anything_else_is_refused_by_its_place() -> None:
    with pytest.raises(CheckpointError) as caught:
        encode({"a": [1, {"b": open}]}, "client_state")
    assert str(caught.value) == (
        "client_state.a[1].b is a builtin_function_or_method, which a checkpoint cannot hold; "
        "expected numbers, texts, lists, tuples, dicts or tensors"
    )


def piece(name: str, window: Range, offset: int = 0) -> Piece:
    return Piece(
        name=name,
        kind="value",
        start=window.start,
        stop=window.stop,
        dtype="float32",
        offset=offset,
        num_bytes=4 * window.size,
        checksum="",
    )


def manifest_of(cut: list[Range], rng: random.Random) -> Manifest:
    """The pieces of one tensor, over some files in any order."""
    pieces = [piece("w", window) for window in cut]
    rng.shuffle(pieces)
    files = tuple(
        DataFile(
            name=f"f{i}",
            num_bytes=0,
            header_bytes=0,
            header_checksum="",
            pieces=tuple(pieces[i::3]),
        )
        for i in range(3)
    )
    return Manifest(tag="t", plan={}, versions={}, shapes={}, parameters={}, state={}, files=files)


@pytest.mark.parametrize("seed", range(30))
def test_any_range_is_found_in_any_cut(seed: int) -> None:
    rng = random.Random(seed)
    cut = list(consecutive([rng.randint(1, 5) for _ in range(rng.randint(1, 9))]))
    lookup = Lookup(manifest_of(cut, rng), "here")
    size = cut[-1].stop
    start = rng.randint(0, size)
    wanted = Range(start, rng.randint(start, size))
    found = [i for hit in lookup.find("value", "w", wanted) for i in range(*hit.common)]
    assert found == list(range(*wanted))
    assert all(hit.common.size for hit in lookup.find("value", "w", wanted))


@pytest.mark.parametrize("seed", range(10))
def test_a_gap_is_named(seed: int) -> None:
    rng = random.Random(seed)
    cut = list(consecutive([rng.randint(1, 5) for _ in range(rng.randint(2, 9))]))
    gone = cut.pop(rng.randrange(len(cut)))
    lookup = Lookup(manifest_of(cut, rng), "here")
    whole = Range(0, max(gone.stop, cut[-1].stop))
    with pytest.raises(CheckpointError, match=f"here lacks elements {gone.start} to"):
        list(lookup.find("value", "w", whole))


def test_a_manifest_comes_back_the_same() -> None:
    manifest = manifest_of([Range(0, 3), Range(3, 4)], random.Random(0))
    assert Manifest.from_json(manifest.to_json(), "m") == manifest


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"version": 2}, "m: version is 2; expected 1"),
        ({"tagg": 1}, "m: tagg is not a known key"),
        ({"files": [{"name": "../x"}]}, r"m: files\[0\].name is '../x'"),
        ({"shapes": {"w": [-1]}}, "m: shapes.w"),
    ],
)
def test_a_strange_manifest_is_refused(change: dict[str, Any], sentence: str) -> None:
    data = json.loads(manifest_of([Range(0, 3)], random.Random(0)).to_json()) | change
    with pytest.raises(CheckpointError, match=sentence):
        Manifest.from_json(json.dumps(data), "m")


def small_files(root: Path) -> Path:
    """Two files and their sums."""
    (root / "model").mkdir()
    (root / "manifest.json").write_text("{}")
    (root / "model" / "config.json").write_text('{"a": 1}')
    names = ["manifest.json", "model/config.json"]
    (root / SUMS_NAME).write_text(sums_text(root, names))
    return root


def test_sums_are_read_by_sha256sum(tmp_path: Path) -> None:
    root = small_files(tmp_path)
    assert verified_names(root) == ["manifest.json", "model/config.json"]
    empty = "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"
    (root / "empty").write_bytes(b"")
    assert sums_text(root, ["empty"]) == f"{empty}  empty\n"


@pytest.mark.parametrize("name", ["manifest.json", "model/config.json", SUMS_NAME])
def test_every_flipped_bit_of_a_small_file_is_found(name: str, tmp_path: Path) -> None:
    root = small_files(tmp_path)
    path = root / name
    data = path.read_bytes()
    for at in range(len(data)):
        for bit in (0, 5, 7):
            path.write_bytes(data[:at] + bytes([data[at] ^ (1 << bit)]) + data[at + 1 :])
            with pytest.raises(CheckpointError, match="is damaged"):
                if "manifest.json" not in verified_names(root):
                    raise CheckpointError("SHA256SUMS is damaged")
    path.write_bytes(data[:-1])
    with pytest.raises(CheckpointError, match="is damaged"):
        verified_names(root)
