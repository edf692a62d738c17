"""A message as bytes: a small header that says what follows, and one payload."""

import json
from typing import Any

import torch
from torch import Tensor

from zorse_ds.runtime.values import Leaf, Message

HEADER_BYTES = 1024
"""Every header message has this size; a longer header is followed by the rest of it."""
_LENGTHS = 16
_ALIGNMENT = 16
_DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in vars(torch).values()
    if isinstance(dtype, torch.dtype)
}


def encode_header(message: Message) -> bytes:
    """What the receiver must know to allocate the payload and rebuild the message."""
    leaves = [_leaf_to_json(leaf) for leaf in message.leaves]
    flags = [
        2 * own + grad for own, grad in zip(message.per_sample, message.needs_grad, strict=True)
    ]
    return json.dumps([message.structure, leaves, flags, message.extent]).encode()


def _leaf_to_json(leaf: Leaf) -> Any:
    if isinstance(leaf, Tensor):
        return [str(leaf.dtype).removeprefix("torch."), list(leaf.shape)]
    return {"constant": leaf}


def header_frames(header: bytes) -> tuple[Tensor, Tensor | None]:
    """The header as one uint8 tensor of `HEADER_BYTES`, and the rest of it if it is longer."""
    framed = len(header).to_bytes(_LENGTHS, "little") + header
    first, rest = framed[:HEADER_BYTES], framed[HEADER_BYTES:]
    frame = torch.frombuffer(bytearray(first.ljust(HEADER_BYTES, b"\0")), dtype=torch.uint8)
    return frame, torch.frombuffer(bytearray(rest), dtype=torch.uint8) if rest else None


def missing_header_bytes(frame: Tensor) -> int:
    """How many bytes of a header follow its first frame."""
    length = int.from_bytes(bytes(frame[:_LENGTHS].tolist()), "little")
    return max(0, _LENGTHS + length - HEADER_BYTES)


def decode_header(frame: Tensor, rest: Tensor | None) -> Message:
    """The message with meta tensors for leaves: shapes and dtypes, no data yet."""
    raw = frame.numpy().tobytes() + (rest.numpy().tobytes() if rest is not None else b"")
    length = int.from_bytes(raw[:_LENGTHS], "little")
    structure, leaves, flags, extent = json.loads(raw[_LENGTHS : _LENGTHS + length])
    decoded: list[Leaf] = [
        leaf["constant"]
        if isinstance(leaf, dict)
        else torch.empty(leaf[1], dtype=_DTYPES[leaf[0]], device="meta")
        for leaf in leaves
    ]
    return Message(structure, decoded, [f >= 2 for f in flags], [f % 2 == 1 for f in flags], extent)


def payload_of(message: Message) -> Tensor | None:
    """All tensors as one contiguous uint8 tensor; a single tensor is not copied if contiguous."""
    tensors = [leaf for leaf in message.leaves if isinstance(leaf, Tensor) and leaf.numel()]
    plain = [tensor.resolve_conj().resolve_neg().contiguous() for tensor in tensors]
    parts = [tensor.view(-1).view(torch.uint8) for tensor in plain]
    if len(parts) < 2:
        return parts[0] if parts else None
    payload = parts[0].new_empty(sum(_aligned(part.numel()) for part in parts))
    start = 0
    for part in parts:
        payload[start : start + part.numel()] = part
        start += _aligned(part.numel())
    return payload


def payload_bytes(message: Message) -> int:
    """Size of the payload that a decoded header announces."""
    sizes = [leaf.nbytes for leaf in message.leaves if isinstance(leaf, Tensor) and leaf.numel()]
    return sizes[0] if len(sizes) == 1 else sum(map(_aligned, sizes))


def fill(message: Message, payload: Tensor | None) -> Message:
    """Replace the meta tensors of a decoded header by views of the payload."""
    start = 0
    leaves: list[Leaf] = []
    for leaf in message.leaves:
        if isinstance(leaf, Tensor) and leaf.numel():
            assert payload is not None
            view = payload[start : start + leaf.nbytes].view(leaf.dtype).view(leaf.shape)
            leaves.append(view)
            start += _aligned(leaf.nbytes)
        elif isinstance(leaf, Tensor):
            leaves.append(
                torch.empty_like(leaf, device="cpu" if payload is None else payload.device)
            )
        else:
            leaves.append(leaf)
    return Message(
        message.structure, leaves, message.per_sample, message.needs_grad, message.extent
    )


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT
