"""What all tests share: a quiet, deterministic environment and a marker for each folder."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import settings

TESTS = Path(__file__).parent

# Set before any test module imports torch or a Hugging Face library, which read them on import. One
# OpenMP thread also keeps `tests/ranks` safe: a process that has a thread pool cannot be forked.
ENVIRONMENT = {
    "DS_ACCELERATOR": "cpu",
    "OMP_NUM_THREADS": "1",
    "WANDB_MODE": "offline",
    "TOKENIZERS_PARALLELISM": "false",
    "HF_HUB_OFFLINE": "1",
}
for name, value in ENVIRONMENT.items():
    os.environ.setdefault(name, value)

# Shared CPUs make deadlines meaningless, and a case that fails must fail on every machine.
settings.register_profile("zorse", deadline=None, derandomize=True, print_blob=True)
settings.load_profile("zorse")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Gives each test the marker of the folder it lies in, so `-m ranks` needs no decorators."""
    for item in items:
        folder = item.path.relative_to(TESTS).parts[0]
        item.add_marker(getattr(pytest.mark, folder))
