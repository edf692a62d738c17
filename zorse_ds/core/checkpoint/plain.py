"""Plain data as JSON and back, the same: nothing is executed when a checkpoint is read.

JSON has no tuples, no keys but texts and no tensors: those are wrapped in an object with the key
`"!"`. What is neither is refused when it is saved.
"""

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from zorse_ds.errors import CheckpointError

_MARK = "!"


@dataclass(frozen=True, slots=True)
class Scalar:
    """A tensor of no dimension, by value."""

    dtype: str
    value: float | int | bool


@dataclass(frozen=True, slots=True)
class TensorRef:
    """A tensor that is saved beside the JSON, under `name`."""

    name: str


Keep = Callable[[Any], Scalar | TensorRef | None]
"""What stands for a value that is not plain, or None where nothing can."""


def encode(value: Any, where: str, keep: Keep = lambda value: None) -> Any:
    """JSON data for `value`: None, bool, int, float, str, list, tuple, dict, and what `keep` takes.

    Raises `CheckpointError` that names the place, `where` and below, of anything else.
    """
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, int | float):
        return int(value) if isinstance(value, int) else float(value)
    if isinstance(value, list):
        return [encode(item, f"{where}[{i}]", keep) for i, item in enumerate(value)]
    if isinstance(value, tuple):
        return {_MARK: "tuple", "items": encode(list(value), where, keep)}
    if isinstance(value, Mapping):
        return _encode_mapping(value, where, keep)
    kept = value if isinstance(value, Scalar | TensorRef) else keep(value)
    if isinstance(kept, Scalar):
        return {_MARK: "scalar", "dtype": kept.dtype, "value": kept.value}
    if isinstance(kept, TensorRef):
        return {_MARK: "tensor", "name": kept.name}
    raise CheckpointError(
        f"{where} is a {type(value).__name__}, which a checkpoint cannot hold; expected numbers, "
        "texts, lists, tuples, dicts or tensors"
    )


def decode(data: Any, revive: Callable[[Scalar | TensorRef], Any] = lambda kept: kept) -> Any:
    """The value that `encode` was given; `revive` makes tensors again."""
    if isinstance(data, list):
        return [decode(item, revive) for item in data]
    if not isinstance(data, dict):
        return data
    kind = data.get(_MARK)
    if kind is None:
        return {key: decode(item, revive) for key, item in data.items()}
    if kind == "tuple":
        return tuple(decode(data["items"], revive))
    if kind in ("dict", "counter"):
        pairs = {decode(key, revive): decode(item, revive) for key, item in data["items"]}
        return Counter(pairs) if kind == "counter" else pairs
    return revive(
        TensorRef(data["name"]) if kind == "tensor" else Scalar(data["dtype"], data["value"])
    )


def _encode_mapping(value: Mapping[Any, Any], where: str, keep: Keep) -> Any:
    is_counter = isinstance(value, Counter)
    if not is_counter and _MARK not in value and all(isinstance(key, str) for key in value):
        return {key: encode(item, f"{where}.{key}", keep) for key, item in value.items()}
    pairs = [
        [encode(key, f"a key of {where}"), encode(item, f"{where}[{key!r}]", keep)]
        for key, item in value.items()
    ]
    return {_MARK: "counter" if is_counter else "dict", "items": pairs}
