"""Checks that files and functions stay small enough to be read in one go.

A file has at most 350 lines and a function at most 50, docstrings and blank lines included; nine of
ten functions have at most 25 lines (tests are spared the last rule). Exit code 1 if any is broken.
"""

from __future__ import annotations

import argparse
import ast
import math
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

MAX_FILE_LINES = 350
MAX_FUNCTION_LINES = 50
MAX_P90_LINES = 25

FOLDERS = ("zorse_ds", "launch", "benchmarks", "tools", "tests")
FOLDERS_WITHOUT_P90 = ("tests",)


@dataclass(frozen=True)
class Function:
    """One function or method; `lines` counts from `def` to its last line."""

    path: Path
    name: str
    line: int
    lines: int


def functions_of(path: Path, source: str) -> Iterator[Function]:
    """All functions of one file, nested ones too."""
    for node in ast.walk(ast.parse(source, filename=str(path))):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            last = node.end_lineno or node.lineno
            yield Function(path, node.name, node.lineno, last - node.lineno + 1)


def percentile_90(lengths: Sequence[int]) -> int:
    """The smallest length that at least nine tenths of `lengths` do not exceed; 0 for none."""
    ordered = sorted(lengths)
    return ordered[math.ceil(0.9 * len(ordered)) - 1] if ordered else 0


def source_files(root: Path) -> Iterator[Path]:
    """The Python and shell files under the folders of the budget, in a fixed order."""
    for folder in FOLDERS:
        yield from sorted(p for p in (root / folder).rglob("*") if p.suffix in (".py", ".sh"))


def problems_of(root: Path) -> list[str]:
    """One sentence for each broken limit under `root`."""
    problems = []
    judged: list[Function] = []
    for path in source_files(root):
        source = path.read_text(encoding="utf-8")
        shown = path.relative_to(root)
        num_lines = len(source.splitlines())
        if num_lines > MAX_FILE_LINES:
            problems.append(f"{shown}: {num_lines} lines; at most {MAX_FILE_LINES}")
        functions = list(functions_of(shown, source)) if path.suffix == ".py" else []
        problems += [
            f"{f.path}:{f.line}: {f.name} has {f.lines} lines; at most {MAX_FUNCTION_LINES}"
            for f in functions
            if f.lines > MAX_FUNCTION_LINES
        ]
        if shown.parts[0] not in FOLDERS_WITHOUT_P90:
            judged += functions
    return problems + p90_problems(judged)


def p90_problems(functions: Sequence[Function]) -> list[str]:
    """The complaint about the 90th percentile with the functions to shorten, or nothing."""
    p90 = percentile_90([f.lines for f in functions])
    if p90 <= MAX_P90_LINES:
        return []
    longest = sorted(functions, key=lambda f: -f.lines)
    over = [f for f in longest if f.lines > MAX_P90_LINES]
    return [
        f"90th percentile of function length is {p90}; at most {MAX_P90_LINES}. "
        f"{len(over)} of {len(functions)} functions are longer:"
    ] + [f"  {f.path}:{f.line}: {f.name} has {f.lines} lines" for f in over]


def main() -> int:
    """Prints every broken limit; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("root", nargs="?", type=Path, default=Path(__file__).parents[1])
    root = parser.parse_args().root
    num_files = len(list(source_files(root)))
    problems = problems_of(root)
    for problem in problems:
        print(problem)
    print(f"{num_files} files checked, {'over' if problems else 'within'} the size budget")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
