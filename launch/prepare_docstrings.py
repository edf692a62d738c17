"""Write the docstrings of Python's standard library as training text.

    python launch/prepare_docstrings.py build/docstrings

Makes train.jsonl and heldout.jsonl, one object {"name": ..., "text": ...} a line. Nothing is
downloaded and no module is imported; the same Python always gives the same text.
"""

import argparse
import ast
import hashlib
import json
import shutil
import sys
import sysconfig
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from rich.progress import track

MIN_CHARACTERS = 40
HELDOUT_EVERY = 20
SKIPPED_FOLDERS = {"test", "tests", "idlelib", "idle_test", "site-packages", "dist-packages"}


class Document(NamedTuple):
    """One docstring: the dotted name of what it describes, and signature plus docstring."""

    name: str
    text: str


def source_files() -> list[Path]:
    """Return the standard library's Python files in the order of their names."""
    root = Path(sysconfig.get_path("stdlib"))
    files = (file.relative_to(root) for file in root.rglob("*.py"))
    # What a system adds beside the library (configuration of its build) is not the library.
    listed = (
        file
        for file in files
        if file.parts[0].removesuffix(".py") in sys.stdlib_module_names
        and not SKIPPED_FOLDERS.intersection(file.parts)
        and not file.name.startswith("_sysconfigdata")
    )
    return [root / file for file in sorted(listed, key=Path.as_posix)]


def documents_of(file: Path) -> Iterator[Document]:
    """Yield every docstring of a file that is long enough, in the order of the file."""
    with warnings.catch_warnings():
        # Parsing somebody else's source: its deprecated escapes are not our user's concern.
        warnings.simplefilter("ignore")
        tree = ast.parse(file.read_bytes())
    parts = file.relative_to(sysconfig.get_path("stdlib")).with_suffix("").parts
    module = ".".join(part for part in parts if part != "__init__")
    yield from _walk(tree, module)


def _walk(node: ast.AST, name: str) -> Iterator[Document]:
    if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
        docstring = (ast.get_docstring(node) or "").strip()
        if len(docstring) >= MIN_CHARACTERS:
            yield Document(name, f"{_header(node, name)}\n\n{docstring}\n")
    for child in ast.iter_child_nodes(node):
        inner = getattr(child, "name", None) if _is_definition(child) else None
        yield from _walk(child, f"{name}.{inner}" if inner else name)


def _is_definition(node: ast.AST) -> bool:
    return isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)


def _header(node: ast.AST, name: str) -> str:
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        return f"function {name}({ast.unparse(node.args)})"
    return f"{'class' if isinstance(node, ast.ClassDef) else 'module'} {name}"


def is_heldout(document: Document) -> bool:
    """Decide by the text alone, so that no text changes sides when others come or go."""
    digest = hashlib.sha256(document.text.encode()).digest()
    return int.from_bytes(digest[:8]) % HELDOUT_EVERY == 0


def collect(files: list[Path]) -> list[Document]:
    """Return all documents of `files`, each docstring once, under the first name it has."""
    unique: dict[str, Document] = {}
    for file in track(files, description="reading docstrings"):
        for document in documents_of(file):
            body = document.text.split("\n\n", 1)[1]
            unique.setdefault(body, document)
    return list(unique.values())


def write(folder: Path, documents: list[Document]) -> dict[str, int]:
    """Write both files beside `folder`, then rename; return the number of documents in each."""
    splits = {
        "train": [document for document in documents if not is_heldout(document)],
        "heldout": [document for document in documents if is_heldout(document)],
    }
    folder.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(dir=folder.parent, prefix=f".{folder.name}."))
    try:
        temporary.chmod(0o755)
        for name, chosen in splits.items():
            lines = (json.dumps(document._asdict(), ensure_ascii=False) for document in chosen)
            text = "".join(f"{line}\n" for line in lines)
            (temporary / f"{name}.jsonl").write_text(text, encoding="utf-8")
        temporary.rename(folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return {name: len(chosen) for name, chosen in splits.items()}


def main() -> None:
    """Parse the command line and write both files, unless they are already there."""
    parser = argparse.ArgumentParser(description="Write the standard library's docstrings.")
    parser.add_argument("folder", type=Path, help="where to write, e.g. build/docstrings")
    folder = parser.parse_args().folder
    if (folder / "train.jsonl").is_file() and (folder / "heldout.jsonl").is_file():
        print(f"{folder} is there already")
        return
    if folder.exists():
        raise SystemExit(f"{folder} exists but lacks the text; remove it or name another")
    counts = write(folder, collect(source_files()))
    print(f"{folder} written: " + ", ".join(f"{name} {count}" for name, count in counts.items()))


if __name__ == "__main__":
    main()
