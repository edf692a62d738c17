"""Strict parsing of hand-written JSON: pydantic's findings in the product's own sentences."""

import difflib
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar, cast, get_args

from pydantic import BaseModel, ConfigDict, ValidationError
from pydantic_core import ErrorDetails

_FEW_KEYS = 8
"""More than these hide what a sentence says at its end."""


class StrictModel(BaseModel):
    """Frozen record without coercion, without unknown keys, without NaN."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, allow_inf_nan=False, populate_by_name=True
    )
    other_names: ClassVar[Mapping[str, str]] = {}
    """What keys are called elsewhere → here: suggested, not taken."""


def nearest(found: object, choices: Iterable[str]) -> str | None:
    """The choice that looks most like `found`, or None when it is no text or none comes close."""
    if not isinstance(found, str):
        return None
    matches = difflib.get_close_matches(found, list(choices), n=1, cutoff=0.5)
    return matches[0] if matches else None


def listed(choices: Sequence[object]) -> str:
    """`'a', 'b' or 'c'`."""
    words = [repr(choice) for choice in choices]
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} or {words[-1]}"


def suggestion(found: object, choices: Iterable[str]) -> str:
    """`; did you mean 'x'?`, or nothing when no choice is near."""
    near = nearest(found, choices)
    return f"; did you mean {near!r}?" if near else ""


def path_text(location: Sequence[int | str]) -> str:
    """`("stages", 1, "layers")` as `stages[1].layers`."""
    text = ""
    for step in location:
        if isinstance(step, int):
            text += f"[{step}]"
        else:
            name = step if step.isprintable() and step else repr(step)
            text += f".{name}" if text else name
    return text or "the file"


def problems_of(error: ValidationError, model: type[BaseModel]) -> list[str]:
    """One sentence for every finding of pydantic: where, found, expected, nearest."""
    details = error.errors(include_url=False)
    several: dict[tuple[int | str, ...] | None, list[ErrorDetails]] = {}
    for detail in details:
        several.setdefault(_chosen_at(detail), []).append(detail)
    single = [detail for detail in details if not _is_choice(several, detail)]
    sentences = [_sentence(detail, model) for detail in single]
    found = [(where, of) for where, of in several.items() if where is not None and len(of) > 1]
    return sentences + [_no_choice(where, of) for where, of in found]


def _is_choice(several: Mapping[Any, Sequence[ErrorDetails]], detail: ErrorDetails) -> bool:
    where = _chosen_at(detail)
    return where is not None and len(several[where]) > 1


def _chosen_at(detail: ErrorDetails) -> tuple[int | str, ...] | None:
    """Where a value may be of several types, of which pydantic names each behind the place."""
    *where, label = detail["loc"] or ("",)
    is_label = isinstance(label, str) and (label in _TYPE_LABELS or "[" in label)
    return tuple(where) if is_label and detail["type"] in _EXPECTED_TYPES else None


def _no_choice(where: tuple[int | str, ...], details: Sequence[ErrorDetails]) -> str:
    kinds = [_EXPECTED_TYPES[detail["type"]] for detail in details]
    return f"{path_text(where)} is {_shown(details[0]['input'])}; expected {' or '.join(kinds)}"


def without_faults(
    data: dict[str, Any], error: ValidationError, model: type[BaseModel]
) -> dict[str, Any] | None:
    """A copy of `data` without the entries that `error` complains of, or None if none is left.

    It lets the checks that come after parsing speak too, so that all problems are told at once.
    Entries of lists are kept (their position means something): then the answer is None.
    """
    rest: Any = data
    for detail in error.errors(include_url=False):
        location = detail["loc"]
        if detail["type"] == "missing" or not location or not isinstance(location[-1], str):
            return None
        rest = _without(rest, location)
    try:
        model.model_validate(rest)
    except ValidationError:
        return None
    return cast(dict[str, Any], rest)


def _without(value: Any, location: Sequence[int | str]) -> Any:
    """A copy of `value` that lacks the entry at `location`; only what lies on the way is copied."""
    first, *deeper = location
    if isinstance(value, dict) and first in value:
        others = {key: item for key, item in value.items() if key != first}
        return {**others, first: _without(value[first], deeper)} if deeper else others
    if isinstance(value, list) and isinstance(first, int) and deeper:
        return [_without(item, deeper) if i == first else item for i, item in enumerate(value)]
    return value


def _sentence(detail: ErrorDetails, model: type[BaseModel]) -> str:
    where = path_text(detail["loc"])
    kind, found, context = detail["type"], detail["input"], detail.get("ctx", {})
    if kind == "extra_forbidden":
        return _unknown_key(where, detail["loc"][-1], _record_at(model, detail["loc"][:-1]))
    if kind == "missing":
        return f"{where} is missing; expected it beside {_shown(found)}"
    if kind == "literal_error":
        choices = re.findall("'([^']+)'", context["expected"])
        near = suggestion(found, choices)
        return f"{where} is {_shown(found)}; expected {context['expected']}{near}"
    return f"{where} is {_shown(found)}; expected {_expected(detail['msg'], kind, context)}"


_TYPE_LABELS = ("str", "int", "float", "bool", "constrained-str", "constrained-int")
_EXPECTED_TYPES = {
    "int_type": "a whole number",
    "float_type": "a number",
    "string_type": "a text",
    "list_type": "a list",
    "tuple_type": "a list",
    "dict_type": "an object {...}",
    "model_type": "an object {...}",
    "bool_type": "true or false",
    "finite_number": "a finite number",
}


def _expected(message: str, kind: str, context: dict[str, Any]) -> str:
    if kind == "greater_than_equal":
        return f"at least {context['ge']}"
    if kind == "less_than_equal":
        return f"at most {context['le']}"
    if kind == "greater_than":
        return f"more than {context['gt']}"
    if kind == "less_than":
        return f"less than {context['lt']}"
    if kind == "string_too_short":
        return "a text that is not empty"
    return _EXPECTED_TYPES.get(kind, message.removeprefix("Value error, "))


def _shown(value: object) -> str:
    try:
        text = repr(value)
    except (RecursionError, ValueError):
        # Nested thousands deep, or a number of thousands of digits.
        return "too long to show"
    return text if len(text) <= 80 else f"{text[:77]}..."


def _unknown_key(where: str, key: int | str, record: type[BaseModel]) -> str:
    known = [field.alias or name for name, field in record.model_fields.items()]
    here = getattr(record, "other_names", {}).get(key)
    near = f"; did you mean {here!r}?" if here else suggestion(key, known)
    if near and len(known) > _FEW_KEYS:
        return f"{where} is not a known key{near} (known are {listed(known)})"
    return f"{where} is not a known key; expected one of {listed(known)}{near}"


def _record_at(model: type[BaseModel], location: Sequence[int | str]) -> type[BaseModel]:
    """The kind of record that is at `location`."""
    current: Any = model
    for step in location:
        if isinstance(step, str) and step in current.model_fields:
            current = _record_in(current.model_fields[step].annotation) or current
    return cast(type[BaseModel], current)


def _record_in(annotation: Any) -> type[BaseModel] | None:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    for argument in get_args(annotation):
        found = _record_in(argument)
        if found is not None:
            return found
    return None
