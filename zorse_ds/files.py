"""Reading and writing small files so that a mistake is named and a crash loses nothing."""

import json
import os
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

from zorse_ds.errors import ZorseError


def read_json(path: str | Path, error: type[ZorseError]) -> dict[str, Any]:
    """Read a JSON object; raise `error` with one sentence when there is none at `path`.

    A key given twice is refused: JSON would silently keep the last.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise error(f"{path} cannot be read (not UTF-8 text); expected a JSON file") from None
    except (OSError, ValueError) as problem:
        reason = getattr(problem, "strerror", None) or problem
        shown = str(path) if str(path).isprintable() else repr(str(path))
        raise error(f"{shown} cannot be read ({reason}); expected a JSON file") from None
    return parse_json(text, str(path), error)


def parse_json(text: str, where: str, error: type[ZorseError]) -> dict[str, Any]:
    """Parse a JSON object; `where` names the source in the sentence of `error`."""

    def refuse_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        counts = Counter(key for key, _ in pairs)
        repeated = sorted(key for key, count in counts.items() if count > 1)
        if repeated:
            raise error(f"{where}: key {repeated[0]!r} is given twice in one object; expected once")
        return dict(pairs)

    try:
        value = json.loads(text, object_pairs_hook=refuse_repeats)
    except json.JSONDecodeError as problem:
        raise error(
            f"{where} line {problem.lineno} column {problem.colno}: {problem.msg}; expected JSON"
        ) from None
    except RecursionError:
        raise error(f"{where} is nested too deeply; expected a flat JSON object") from None
    except ValueError:
        # Python refuses to read a number of thousands of digits.
        raise error(f"{where} holds a number that is too long; expected JSON") from None
    if not isinstance(value, dict):
        raise error(f"{where} holds a {type(value).__name__}; expected a JSON object {{...}}")
    return value


def write_text(path: str | Path, text: str) -> None:
    """Write `text` to `path` so that readers see the old file or the new one, never a part."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        Path(temporary).chmod(0o644)
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
