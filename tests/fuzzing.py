"""Inputs that are nearly right, for hypothesis: valid JSON or text with a few things changed.

`ZORSE_FUZZ` is how many inputs each test tries (default 80):

    ZORSE_FUZZ=2000 python -m pytest tests/unit/test_fuzz.py tests/inprocess/test_fuzz_config.py
"""

from __future__ import annotations

import copy
import json
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

from zorse_ds.errors import ZorseError

NUM_INPUTS = int(os.environ.get("ZORSE_FUZZ", "80"))
fuzzed = settings(
    max_examples=NUM_INPUTS,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)

_NUMBERS = st.one_of(
    st.integers(),
    st.integers(-3, 9),
    st.floats(),
    st.sampled_from([10**30, 10**400, 2**63, 1e308, 5e-324, -0.0, 1e-9]),
)
_ATOMS = st.one_of(st.none(), st.booleans(), _NUMBERS, st.text(max_size=8))
VALUES = st.recursive(
    _ATOMS,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4), st.dictionaries(st.text(max_size=6), inner, max_size=3)
    ),
    max_leaves=6,
)
"""JSON, and what Python's reader takes for it besides."""


def near(examples: Sequence[Any]) -> st.SearchStrategy[Any]:
    """One of the examples with up to three changes."""
    return _changed(st.sampled_from(examples).map(copy.deepcopy))


@st.composite
def _changed(draw: st.DrawFn, examples: st.SearchStrategy[Any]) -> Any:
    data = draw(examples)
    for _ in range(draw(st.integers(0, 3))):
        places = list(_places(data))
        if not places:
            return draw(VALUES)
        holder, key = draw(st.sampled_from(places))
        change = draw(st.sampled_from(["remove", "replace", "number", "rename", "repeat"]))
        _change(holder, key, change, draw(VALUES), draw(_NUMBERS), draw(st.text(max_size=6)))
    return data


def _change(holder: Any, key: Any, change: str, value: Any, number: Any, name: str) -> None:
    if change == "remove":
        del holder[key]
    elif change == "replace":
        holder[key] = value
    elif change == "number":
        holder[key] = number
    elif isinstance(holder, list):
        holder.insert(key, copy.deepcopy(holder[key]))
    elif change == "rename":
        holder[key[:-1] if len(name) % 2 else key + name] = holder.pop(key)
    else:
        holder[name] = copy.deepcopy(holder[key])


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Each holder and key inside."""
    entries = value.items() if isinstance(value, dict) else enumerate(value)
    for key, item in list(entries):
        yield value, key
        if isinstance(item, dict | list) and item:
            yield from _places(item)


@st.composite
def texts(draw: st.DrawFn, examples: Sequence[str]) -> bytes:
    """One of the texts with some bytes changed, cut or repeated."""
    data = bytearray(draw(st.sampled_from(examples)).encode())
    for _ in range(draw(st.integers(0, 4))):
        if not data:
            break
        at = draw(st.integers(0, len(data) - 1))
        until = draw(st.integers(at, min(len(data), at + 20)))
        data[at:until] = draw(st.one_of(st.binary(max_size=4), st.just(bytes(data[at:until]) * 2)))
    return bytes(data)


def as_json(values: Sequence[Any]) -> list[str]:
    return [json.dumps(value) for value in values]


def only_own_errors(read: Callable[[], Any]) -> Any:
    """What `read` returns, or None where it raised an error of the product that can be printed."""
    try:
        return read()
    except ZorseError as error:
        assert str(error).strip()
        assert str(error).encode()
        return None
