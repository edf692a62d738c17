"""Messages as bytes and back, and values taken apart and put together, to the bit."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import Tensor

from zorse_ds.errors import ModelError
from zorse_ds.ranges import Range, consecutive
from zorse_ds.runtime.values import (
    Message,
    cut,
    extent_of,
    flatten,
    merge,
    pad_alike,
    trim,
    unflatten,
    unpad,
)
from zorse_ds.runtime.wire import (
    HEADER_BYTES,
    decode_header,
    encode_header,
    fill,
    header_frames,
    missing_header_bytes,
    payload_bytes,
    payload_of,
)

DTYPES = [
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.uint16,
    torch.uint32,
    torch.uint64,
    torch.bool,
    torch.complex64,
    torch.complex128,
]


def message_of(value: Any, extent: int = 0) -> Message:
    """A message that carries a value whole."""
    structure, leaves = flatten(value)
    flags = [isinstance(leaf, Tensor) for leaf in leaves]
    return Message(structure, leaves, flags, [not flag for flag in flags], extent)


def sent(message: Message) -> Message:
    """What the other side makes of the bytes."""
    frame, rest = header_frames(encode_header(message))
    assert frame.dtype == torch.uint8 and frame.numel() == HEADER_BYTES
    assert missing_header_bytes(frame) == (0 if rest is None else rest.numel())
    decoded = decode_header(frame, rest)
    payload = payload_of(message)
    assert payload_bytes(decoded) == (0 if payload is None else payload.numel())
    arrived = payload.clone() if payload is not None else None
    return fill(decoded, arrived)


def bits(tensor: Tensor) -> Tensor:
    """The bytes of a tensor, for NaN is not equal to itself."""
    return tensor.resolve_conj().contiguous().view(-1).view(torch.uint8)


def assert_arrives(value: Any, extent: int = 0) -> None:
    """The value, its flags and its extent."""
    message = message_of(value, extent)
    arrived = sent(message)
    assert arrived.structure == message.structure
    assert (arrived.per_sample, arrived.needs_grad) == (message.per_sample, message.needs_grad)
    assert arrived.extent == extent
    for found, expected in zip(arrived.leaves, message.leaves, strict=True):
        assert type(found) is type(expected)
        if isinstance(expected, Tensor):
            assert isinstance(found, Tensor)
            assert (found.dtype, found.shape) == (expected.dtype, expected.shape)
            assert bits(found).equal(bits(expected))
        else:
            assert repr(found) == repr(expected)
    repeated = unflatten(arrived.structure, arrived.leaves)
    assert type(repeated) is type(value)


def random_tensor(dtype: torch.dtype, *shape: int) -> Tensor:
    """Random bits of a dtype; bool takes 0 and 1 only."""
    if dtype == torch.bool:
        return torch.randint(2, shape).bool()
    count = torch.Size(shape).numel() * dtype.itemsize
    return torch.randint(256, (count,), dtype=torch.uint8).view(dtype).view(shape)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_all_dtypes_alone_and_together(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    one = random_tensor(dtype, 3, 5)
    assert_arrives(one)
    assert_arrives((one, torch.ones(1, dtype=torch.int8), one[:1], torch.ones(3).double(), one))


def test_every_dtype_in_one_message() -> None:
    torch.manual_seed(1)
    assert_arrives([random_tensor(dtype, 1, 3) for dtype in [*DTYPES, *reversed(DTYPES)]])


@pytest.mark.parametrize(
    "value",
    [
        torch.tensor(3.5),
        torch.tensor(True),
        torch.empty(0),
        torch.empty(2, 0, 3, dtype=torch.int16),
        (torch.empty(0), torch.empty(0, 4)),
        (torch.empty(0), torch.tensor(2), torch.ones(2, 2), torch.empty(3, 0).bool()),
        (),
        {},
        None,
        [None, 1, -(2**60), 0.1, float("inf"), float("nan"), True, False, "", 'ä\n"quoted"'],
    ],
    ids=lambda value: "".join(repr(value).split())[:40],
)
def test_small_and_empty_values(value: Any) -> None:
    assert_arrives(value, extent=5)


def test_tensors_that_are_not_contiguous() -> None:
    torch.manual_seed(2)
    whole = torch.randn(4, 6)
    turned = torch.randn(3, 2, dtype=torch.complex64)
    values = (
        whole.T,
        whole[:, 1:3],
        whole[::2],
        whole[0].expand(3, 6),
        turned.conj(),
        turned.conj().imag,
    )
    for value in values:
        assert_arrives(value)
    assert_arrives(values)


def test_nested_structures() -> None:
    tensor = torch.arange(6).view(2, 3)
    value = {
        "a": [(tensor, None, {"b": tensor.double(), "c": [(), [], {}]}), 2.5],
        "*": ("*", "tuple", ["list", {"dict": "dict"}]),
        "": tensor[0],
    }
    assert_arrives(value)
    message = sent(message_of(value))
    repeated = unflatten(message.structure, message.leaves)
    assert repr(repeated) == repr(value)


@pytest.mark.parametrize("num_leaves", [1, 20, 60, 61, 62, 63, 64, 500, 5000])
def test_headers_of_any_length(num_leaves: int) -> None:
    value = [torch.tensor([[i]]) for i in range(num_leaves)]
    assert_arrives(value)
    size = len(encode_header(message_of(value)))
    assert (header_frames(encode_header(message_of(value)))[1] is None) == (size <= 1024 - 16)


@pytest.mark.parametrize("extra", [-1, 0, 1])
def test_a_header_at_the_edge_of_its_frame(extra: int) -> None:
    empty = len(encode_header(message_of("")))
    text = "x" * (HEADER_BYTES - 16 - empty + extra)
    frame, rest = header_frames(encode_header(message_of(text)))
    assert frame.numel() == HEADER_BYTES
    assert (0 if rest is None else rest.numel()) == max(0, extra)
    assert_arrives(text)


def random_value(size: int) -> Any:
    """Per-sample and shared leaves in a structure."""
    return {
        "hidden": torch.randn(size, 4, 2),
        "rest": (torch.arange(size), None, [torch.ones(1, 4), 3], torch.rand(size, 1) > 0.5),
        "number": torch.tensor(2.0),
    }


@pytest.mark.parametrize("seed", range(20), ids=lambda seed: f"seed{seed}")
def test_cut_and_merged_again(seed: int) -> None:
    """Pieces along the sample axis, put together in order, are the whole."""
    rng = random.Random(seed)
    torch.manual_seed(seed)
    sizes = [rng.randint(1, 4) for _ in range(rng.randint(1, 5))]
    total = sum(sizes) + 2
    value = random_value(total)
    structure, leaves = flatten(value)
    windows = consecutive(sizes, start=1)
    pieces = [sent(cut(structure, leaves, total, window, 7)) for window in windows]
    merged = merge(pieces, sizes)
    assert merged.extent == 7
    whole = unflatten(merged.structure, merged.leaves)
    kept = slice(1, total - 1)
    assert whole["hidden"].equal(value["hidden"][kept])
    assert whole["rest"][0].equal(value["rest"][0][kept])
    assert whole["rest"][3].equal(value["rest"][3][kept])
    assert whole["rest"][2][0].equal(value["rest"][2][0])
    assert whole["rest"][1:3:2] == (None,) and whole["rest"][2][1] == 3
    assert whole["number"].equal(value["number"])


def test_cut_says_what_needs_a_gradient() -> None:
    leaves = [torch.ones(3, 2, requires_grad=True), torch.ones(3, 2), torch.ones(5), 4]
    message = cut(["tuple", *"****"], leaves, 3, Range(1, 3), 0)
    assert message.needs_grad == [True, False, False, False]
    assert message.per_sample == [True, True, False, False]
    assert [leaf.shape[0] for leaf in message.leaves[:3]] == [2, 2, 5]  # type: ignore[union-attr]
    assert not message.leaves[0].requires_grad  # type: ignore[union-attr]


def test_pieces_of_unequal_length_are_padded_on_the_right() -> None:
    pieces = [torch.ones(2, 3, 2), torch.ones(1, 5, 1), torch.ones(3, 1, 4)]
    padded = pad_alike(pieces)
    assert [tuple(tensor.shape) for tensor in padded] == [(2, 5, 4), (1, 5, 4), (3, 5, 4)]
    for tensor, piece in zip(padded, pieces, strict=True):
        assert tensor.sum() == piece.numel()
        assert unpad(tensor, piece.shape).equal(piece)
    masks = pad_alike([torch.ones(1, 2).bool(), torch.ones(1, 3).bool()])
    assert masks[0].tolist() == [[True, True, False]]
    extents = merge([message_of(piece, extent=piece.shape[1]) for piece in pieces], [2, 1, 3])
    assert extents.extent == 5
    assert extents.leaves[0].equal(torch.cat(padded))  # type: ignore[union-attr]


def test_one_row_for_all_is_repeated_where_it_must_be() -> None:
    short, long = torch.ones(1, 2), torch.ones(1, 4)
    messages = [Message("*", [row], [False], [False]) for row in (short, long)]
    merged = merge(messages, [2, 3])
    assert merged.leaves[0].tolist() == [[1, 1, 0, 0]] * 2 + [[1] * 4] * 3  # type: ignore[union-attr]
    assert merged.per_sample == [True]
    alike = merge([messages[0], messages[0]], [2, 3])
    assert alike.leaves[0] is short and alike.per_sample == [False]


def test_one_piece_that_needs_a_gradient_is_enough() -> None:
    messages = [Message("*", [torch.ones(2)], [True], [needs]) for needs in (False, True, False)]
    assert merge(messages, [2, 2, 2]).needs_grad == [True]


@pytest.mark.parametrize(("first", "second"), [(1, True), (1, 1.0), (1, "1"), (None, 0), (2, 3)])
def test_constants_that_differ_are_refused(first: Any, second: Any) -> None:
    messages = [Message("*", [leaf], [False], [False]) for leaf in (first, second)]
    with pytest.raises(ModelError, match="beside something else at the same place"):
        merge(messages, [1, 1])


def test_constants_that_are_not_a_number_are_alike() -> None:
    messages = [Message("*", [float("nan")], [False], [False]) for _ in range(2)]
    assert repr(merge(messages, [1, 1]).leaves) == "[nan]"


def test_extent_and_trim() -> None:
    ids, labels = torch.ones(2, 6), torch.ones(2, 4)
    assert extent_of({"n": torch.ones(2), "ids": ids}) == 6
    assert extent_of(torch.ones(3)) == 0
    value = (torch.ones(2, 6, 3), torch.ones(2, 5), torch.ones(2))
    shapes = [tuple(leaf.shape) for leaf in trim(value, 6, 4, labels)]
    assert shapes == [(2, 4, 3), (2, 5), (2,)]
    assert trim(value, 6, 4, torch.ones(2)) is value
    assert trim(value, 6, 6, labels) is value
    assert trim(value, 6, 0, labels) is value
