"""Reading the messages of a conversation, in the two forms that data sets have them."""

import json
from collections.abc import Mapping
from typing import Any

from zorse_ds.core.strict import listed, suggestion
from zorse_ds.errors import DataError

Message = dict[str, Any]

_ROLES = ("system", "developer", "user", "assistant", "tool")
_SHAREGPT = {"human": "user", "gpt": "assistant", "function_call": "assistant"}
"""Names of roles beside "from" and "value"."""


def read_messages(value: Any, where: str, template: Any) -> list[Message]:
    """Messages with `role` and `content`, without the keys that are null.

    Roles are the usual ones and those that the template names. Raises `DataError`.
    """
    if not isinstance(value, list) or not value:
        raise DataError(f"{where} is {_shown(value)}; expected a list of messages")
    text = template if isinstance(template, str) else json.dumps(template)
    return [_read(message, f"{where}[{i}]", text) for i, message in enumerate(value)]


def _read(message: Any, where: str, template: str) -> Message:
    if not isinstance(message, Mapping):
        raise DataError(f"{where} is {_shown(message)}; expected an object with role and content")
    found = {key: own for key, own in message.items() if own is not None}
    if "role" not in found and "from" in found:
        role = found.pop("from")
        found = {"role": _SHAREGPT.get(role, role), "content": found.pop("value", None), **found}
    role = found.get("role")
    if role not in _ROLES and not (
        isinstance(role, str) and (f"'{role}'" in template or f'"{role}"' in template)
    ):
        near = suggestion(role, _ROLES) if isinstance(role, str) else ""
        raise DataError(f"{where}.role is {role!r}; expected one of {listed(_ROLES)}{near}")
    found["content"] = _content(found.get("content"), where, "tool_calls" in found)
    return found


def _content(content: Any, where: str, may_lack: bool) -> str:
    """The text of a message, which may be in parts."""
    if isinstance(content, list) and all(
        isinstance(part, Mapping) and part.get("type") == "text" for part in content
    ):
        content = "".join(part.get("text") or "" for part in content)
    if content is None and may_lack:
        return ""
    if not isinstance(content, str):
        raise DataError(f"{where}.content is {_shown(content)}; expected a text")
    return content


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:37]}..."
