"""The patches for DeepSpeed: they apply, do what they say, and come off without a trace."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import deepspeed
import pytest
import torch

from tests.ranks.launched import (
    JOB,
    ROOT,
    environment,
    free_port,
    results_in,
    run_to_end,
    write_inputs,
)

PATCHES = ROOT / "patches" / f"deepspeed-{deepspeed.__version__.split('+')[0]}"
INSTALLED = Path(deepspeed.__file__).parent


def apply(patch: Path, folder: Path, *options: str) -> None:
    command = ["patch", "-p1", "--batch", "--fuzz=0", *options, "-i", str(patch)]
    subprocess.run(command, cwd=folder, check=True, capture_output=True)


def contents_of(package: Path) -> dict[str, bytes]:
    """Every file but compiled ones."""
    return {
        str(path.relative_to(package)): path.read_bytes()
        for path in package.rglob("*")
        if path.is_file() and path.suffix != ".pyc"
    }


@pytest.fixture
def packages(tmp_path: Path) -> Path:
    """A folder with a copy of the installed DeepSpeed."""
    shutil.copytree(INSTALLED, tmp_path / "packages" / "deepspeed")
    return tmp_path / "packages"


def test_plain_initialize_makes_the_engine_that_a_module_names(
    packages: Path, tmp_path: Path
) -> None:
    apply(PATCHES / "engine_class.patch", packages)
    arguments = ["--with_patch", *write_inputs(tmp_path)]
    shared = environment([packages]) | {"WORLD_SIZE": "2", "LOCAL_SIZE": "2"}
    shared |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
    command = [sys.executable, str(JOB), *arguments]
    ranks = [{"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(2)]
    run_to_end([(command, shared | rank) for rank in ranks], tmp_path, timeout_s=120)
    for result in results_in(tmp_path):
        assert Path(result["deepspeed"]).is_relative_to(packages)
        ours, theirs = result["ours"], result["theirs"]
        assert theirs["engine"] == "ZorseEngine"
        assert theirs["losses"] == ours["losses"]
        assert theirs["weights"].keys() == ours["weights"].keys()
        for name, weight in ours["weights"].items():
            assert torch.equal(theirs["weights"][name], weight)


@pytest.mark.parametrize("patch", sorted(PATCHES.glob("*.patch")), ids=lambda path: path.name)
def test_a_patch_comes_off_without_a_trace(patch: Path, packages: Path) -> None:
    before = contents_of(INSTALLED)
    apply(patch, packages)
    assert contents_of(packages / "deepspeed") != before
    apply(patch, packages, "-R")
    assert contents_of(packages / "deepspeed") == before
