"""Bytes of one layer for one micro-batch: measured ones of a profile, else counted from its shape.

The count is of what autograd saves in a Hugging Face Llama block with fused attention (`sdpa`: the
flash or the memory-efficient kernel), and of what our loss keeps at the head. Weights, their
gradients and optimizer state are not in it: they depend on the plan.
"""

from collections.abc import Callable
from dataclasses import dataclass

from zorse_ds.core.model import LayerShape
from zorse_ds.core.plan import Dtype
from zorse_ds.core.profile import LayerBytes, Profile
from zorse_ds.cost.dtypes import DTYPE_BYTES

_FLOAT32_BYTES = 4
_ID_BYTES = 8
"""Of an input id or a label."""


@dataclass(frozen=True, slots=True)
class LayerBytesFigures:
    """Bytes of one layer for one micro-batch."""

    saved: int
    """Activations that wait for backward, without recompute. The layer's input counts where
    autograd saves it (float32: the input of a block is the first thing its norm saves), the output
    does not: it is the next layer's."""
    boundary: int
    """What leaves the layer: the hidden state, or the loss at the head (0)."""
    workspace: int
    """The most that forward or backward holds beside `saved` at once, without the gradient that
    arrives or leaves."""


BytesOf = Callable[[str, LayerShape, Dtype, int, int], LayerBytesFigures]
"""`(kind, shape, dtype, seq_len, size)`: of one layer for `size` samples of `seq_len` tokens."""


def counted_bytes(
    kind: str, shape: LayerShape, dtype: Dtype, seq_len: int, size: int
) -> LayerBytesFigures:
    """From the shape alone; with `e` bytes an element, all a token.

    Saved by a norm: its input in float32, the normalised and the weighted value, the root:
    `4h + 2eh + 4` (with two feed-forward matrices, LayerNorm: `2eh + 8`). Attention: q, k, v, what
    it returns, and a float32 logarithm a head: `2e(q + kv) + 4·heads`. Feed-forward: `4ef` with a
    gate (gate, its activation, up, product), else `2ef`. Head: a norm, float32 log-probabilities
    `4V`, a label. Embedding: the ids.
    Workspace: `2ef` in a block, `8V` at the head (two float32 gradients of logits, or logits and
    their copy), or the gradient of the largest matrix where that is more (of an embedding: of its
    table).
    """
    tokens = seq_len * size
    element = DTYPE_BYTES[dtype]
    hidden = element * shape.hidden
    if shape.role == "embedding":
        table = element * shape.num_params
        return LayerBytesFigures(_ID_BYTES * tokens, hidden * tokens, max(table, hidden * tokens))
    if shape.role == "head":
        saved = _norm_bytes(shape, element) + _FLOAT32_BYTES * shape.vocab + _ID_BYTES
        return LayerBytesFigures(saved * tokens, 0, _workspace(shape, element, tokens))
    saved = 2 * _norm_bytes(shape, element) + _attention_bytes(shape, element)
    saved += element * shape.ffn * (4 if shape.num_ffn_matrices == 3 else 2)
    return LayerBytesFigures(saved * tokens, hidden * tokens, _workspace(shape, element, tokens))


def bytes_of(profile: Profile | None) -> BytesOf:
    """What a profile measured, entry by entry; `counted_bytes` for what it lacks.

    At a length other than the measured ones the count is scaled by measured over counted at the
    nearest measured length.
    """
    entries: dict[tuple[str, Dtype], list[LayerBytes]] = {}
    for entry in () if profile is None else profile.bytes:
        entries.setdefault((entry.kind, entry.dtype), []).append(entry)

    def lookup(
        kind: str, shape: LayerShape, dtype: Dtype, seq_len: int, size: int
    ) -> LayerBytesFigures:
        counted = counted_bytes(kind, shape, dtype, seq_len, size)
        measured = entries.get((kind, dtype))
        if not measured:
            return counted
        entry = min(measured, key=lambda each: (abs(each.seq_len - seq_len), each.seq_len))
        return _from_entry(entry, shape, dtype, (seq_len, size), counted)

    return lookup


def _from_entry(
    entry: LayerBytes,
    shape: LayerShape,
    dtype: Dtype,
    at: tuple[int, int],
    counted: LayerBytesFigures,
) -> LayerBytesFigures:
    seq_len, size = at

    def scaled(per_sample: int) -> int:
        """All three grow in proportion to the length: fused attention keeps no square."""
        return round(per_sample * size * seq_len / entry.seq_len)

    gradient = _matrix_gradient_bytes(shape, DTYPE_BYTES[dtype], seq_len * size)
    if shape.role == "embedding":
        gradient = counted.workspace
    return LayerBytesFigures(
        scaled(entry.saved_bytes),
        scaled(entry.boundary_bytes),
        max(scaled(entry.workspace_bytes), gradient),
    )


def _norm_bytes(shape: LayerShape, element: int) -> int:
    if shape.num_ffn_matrices == 3:
        return (_FLOAT32_BYTES + 2 * element) * shape.hidden + _FLOAT32_BYTES
    return 2 * element * shape.hidden + 2 * _FLOAT32_BYTES


def _attention_bytes(shape: LayerShape, element: int) -> int:
    width = (shape.heads + shape.kv_heads) * shape.head_dim
    return 2 * element * width + _FLOAT32_BYTES * shape.heads


def _workspace(shape: LayerShape, element: int, tokens: int) -> int:
    hidden = element * shape.hidden
    if shape.role == "head":
        values = 2 * _FLOAT32_BYTES * shape.vocab
    else:
        # Forward: the output, and the sum inside the second norm in float32.
        values = max(2 * element * shape.ffn, hidden + _FLOAT32_BYTES * shape.hidden)
    return max(values * tokens, _matrix_gradient_bytes(shape, element, tokens))


def _matrix_gradient_bytes(shape: LayerShape, element: int, tokens: int) -> int:
    """What backward holds while the gradient of the largest matrix waits to be added."""
    if shape.role == "head":
        logits = (element - _FLOAT32_BYTES) * shape.vocab
        return element * shape.hidden * shape.vocab + (logits + element * shape.hidden) * tokens
    return element * shape.ffn * (shape.hidden + tokens)
