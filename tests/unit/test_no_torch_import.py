"""Planning and the command line start fast: they load no training or logging library."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

HEAVY = ("torch", "deepspeed", "transformers", "datasets", "wandb")
LIGHT_MODULES = (
    "zorse_ds",
    "zorse_ds.core",
    "zorse_ds.schedule",
    "zorse_ds.simulator",
    "zorse_ds.cli",
)


def loaded_by(module: str, candidates: tuple[str, ...]) -> list[str]:
    """Which of `candidates` a fresh interpreter has loaded after `import module`."""
    script = (
        f"import {module}, sys; print(*(m for m in {candidates!r} if m in sys.modules), sep=',')"
    )
    result = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=False
    )
    assert result.returncode == 0, result.stderr
    return [name for name in result.stdout.strip().split(",") if name]


@pytest.mark.parametrize("module", LIGHT_MODULES)
def test_import_loads_nothing_heavy(module: str) -> None:
    assert loaded_by(module, HEAVY) == []


def test_the_check_sees_what_a_module_loads() -> None:
    assert loaded_by("json.tool", ("json", "torch")) == ["json"]


def imported_packages(path: Path) -> set[str]:
    """Top-level packages that the file imports anywhere."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names.add(node.module.split(".")[0])
    return names


def test_unit_tests_import_nothing_heavy() -> None:
    offenders = {
        path.name: heavy
        for path in Path(__file__).parent.rglob("*.py")
        if (heavy := imported_packages(path) & set(HEAVY))
    }
    assert offenders == {}
