"""What README.md shows is true: commands run, plans parse, names exist, links lead somewhere.

Commands run in the order shown, in one folder: an empty one into which the top-level entries of the
repository are linked, and into which JSON blocks are written that the line before them names, as in

    `plan.json`:

A block whose fence carries `no-test` after its language (```bash no-test) is shown only: for what
needs a GPU, a cluster or a download.
"""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import zorse_ds
from zorse_ds.integrations.recipe.schema import Recipe

ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"
PLAN_KEYS = {"version", "groups", "stages"}
COMMAND_TIMEOUT_S = 240

FENCE = re.compile(r"^```(?P<info>[^\n`]*)\n(?P<body>.*?)^```[ \t]*$", re.MULTILINE | re.DOTALL)
FILE_NAME = re.compile(r"`([\w.\-]+\.json)`[^`\n]*\Z")
LINK = re.compile(r"!?\[[^\]]*\]\(\s*<?([^)\s>]+)>?[^)]*\)")
EXTERNAL = re.compile(r"^([a-z][a-z0-9+.-]*:|#)", re.IGNORECASE)


@dataclass(frozen=True)
class Block:
    """A fenced block of the README; `file_name` is what the line before it calls it, or empty."""

    language: str
    body: str
    line: int
    file_name: str


def blocks_of(text: str) -> list[Block]:
    """The fenced blocks that are to be tested."""
    blocks = []
    for match in FENCE.finditer(text):
        language, *words = match["info"].split() or [""]
        if "no-test" in words:
            continue
        before = text[: match.start()]
        name = FILE_NAME.search(before.rstrip())
        blocks.append(
            Block(language, match["body"], before.count("\n") + 1, name[1] if name else "")
        )
    return blocks


def zorse_commands_of(blocks: list[Block]) -> list[str]:
    """The `zorse …` lines of the bash blocks, continued lines joined, prompts removed."""
    lines = [
        line.strip().removeprefix("$ ")
        for block in blocks
        if block.language in ("bash", "sh", "console")
        for line in block.body.replace("\\\n", " ").splitlines()
    ]
    return [line for line in lines if line.split(maxsplit=1)[:1] == ["zorse"]]


def plans_in(value: Any) -> list[dict[str, Any]]:
    """Every object in a JSON value that is a plan: alone, or inside a DeepSpeed configuration."""
    if isinstance(value, list):
        return [plan for item in value for plan in plans_in(item)]
    if not isinstance(value, dict):
        return []
    if value.keys() >= PLAN_KEYS:
        return [value]
    return [plan for item in value.values() for plan in plans_in(item)]


def relative_links_of(text: str) -> list[str]:
    """Link and picture targets inside the repository, without their anchors."""
    prose = re.sub(r"`[^`\n]*`", "", FENCE.sub("", text))
    targets = [t for t in LINK.findall(prose) if not EXTERNAL.match(t)]
    return sorted({target.split("#")[0] for target in targets})


def zorse_names_of(source: str) -> set[str]:
    """The X of every `zorse_ds.X` and `from zorse_ds import X`."""
    tree = ast.parse(source)
    names = {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Name)
        and node.value.id == "zorse_ds"
    }
    imports = [n for n in ast.walk(tree) if isinstance(n, ast.ImportFrom)]
    return names | {a.name for n in imports if n.module == "zorse_ds" for a in n.names}


def placeholders_of(text: str) -> list[str]:
    """Lines that wait for a number: a name between pairs of @ signs."""
    return [line for line in text.splitlines() if "@@" in line]


def modules_run_in(text: str) -> set[str]:
    """The X.Y of every `python -m X.Y` of this repository."""
    return set(re.findall(r"python -m ((?:benchmarks|tools|zorse_ds)[\w.]*\w)", text))


TEXT = README.read_text(encoding="utf-8") if README.exists() else ""
BLOCKS = blocks_of(TEXT)
JSON_BLOCKS = [block for block in BLOCKS if block.language == "json"]
PYTHON_BLOCKS = [block for block in BLOCKS if block.language == "python"]


DOCUMENTS = [ROOT / "README.md", ROOT / "CHANGELOG.md"]


def by_line(block: Block) -> str:
    return f"line{block.line}"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the commands of the README run, one after the other."""
    path = tmp_path_factory.mktemp("readme")
    for entry in ROOT.iterdir():
        if not entry.name.startswith("."):
            (path / entry.name).symlink_to(entry)
    for block in JSON_BLOCKS:
        if block.file_name and not (path / block.file_name).exists():
            (path / block.file_name).write_text(block.body, encoding="utf-8")
    return path


def test_readme_exists() -> None:
    assert TEXT.strip(), f"{README.name} is missing or empty"


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_nothing_is_left_to_fill_in(document: Path) -> None:
    assert placeholders_of(document.read_text(encoding="utf-8")) == []


@pytest.mark.parametrize("name", sorted(modules_run_in(TEXT)))
def test_module_exists(name: str) -> None:
    path = ROOT.joinpath(*name.split("."))
    assert path.with_suffix(".py").is_file() or (path / "__main__.py").is_file()


@pytest.mark.parametrize("command", zorse_commands_of(BLOCKS))
def test_command_runs(command: str, folder: Path) -> None:
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    result = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", command],
        cwd=folder,
        env=os.environ | {"PATH": path},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=COMMAND_TIMEOUT_S,
        check=False,
    )
    assert result.returncode == 0, f"{result.stdout}\n{result.stderr}"


@pytest.mark.parametrize("block", JSON_BLOCKS, ids=by_line)
def test_json_is_valid_and_its_plans_parse(block: Block) -> None:
    for plan in plans_in(json.loads(block.body)):
        zorse_ds.Plan.from_dict(plan)


def test_the_recipe_parses() -> None:
    values = [json.loads(block.body) for block in JSON_BLOCKS]
    (recipe,) = [value for value in values if {"model", "data"} <= set(value)]
    parsed = Recipe.from_dict(recipe).model_dump(mode="json")
    assert all(parsed[key] == value for key, value in recipe.items() if type(value) is not dict)


@pytest.mark.parametrize("block", PYTHON_BLOCKS, ids=by_line)
def test_python_compiles_and_names_what_exists(block: Block) -> None:
    missing = [name for name in zorse_names_of(block.body) if not hasattr(zorse_ds, name)]
    assert missing == []


@pytest.mark.parametrize("target", relative_links_of(TEXT))
def test_link_leads_somewhere(target: str) -> None:
    assert (ROOT / target).exists()
