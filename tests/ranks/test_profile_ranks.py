"""`zorse profile` under a launcher: each type is measured by one rank, and rank 0 has all."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf

from tests.ranks.harness import run_ranks
from zorse_ds.cli import profile_devices
from zorse_ds.errors import ProfileError

TYPES = ("A", "B", "A")


def profiled(rank: int, folder: str, max_length: int) -> dict[str, Any]:
    torch.set_num_threads(1)
    # In this forked rank alone: the cards that it and the others have.
    profile_devices.type_name = lambda device: TYPES[rank]
    counted: list[str] = []
    measure = profile_devices.measure_layers

    def counting(model: Any, name: str, *others: Any) -> Any:
        counted.append(name)
        return measure(model, name, *others)

    profile_devices.measure_layers = counting
    try:
        found = profile_devices.measure_on_ranks(
            Path(folder), None, None, (max_length,), (1, 2), 0.01
        )
    except ProfileError as error:
        return {"error": str(error)}
    times = None if found is None else [entry.gpu_type for entry in found.times]
    return {"measured": counted, "times": times}


@pytest.fixture
def folder(tmp_path: Path) -> str:
    hf.LlamaConfig(
        hidden_size=32,
        intermediate_size=64,
        num_attention_heads=4,
        num_hidden_layers=2,
        vocab_size=64,
        max_position_embeddings=64,
    ).save_pretrained(tmp_path)
    return str(tmp_path)


def test_each_type_is_measured_once(folder: str) -> None:
    results = run_ranks(3, profiled, folder, 16, timeout_s=200)
    assert [result["measured"] for result in results] == [["A"], ["B"], []]
    kinds = 3
    assert results[0]["times"] == ["A"] * kinds + ["B"] * kinds
    assert [result["times"] for result in results[1:]] == [None, None]


def test_a_failure_ends_all_ranks_with_its_sentence(folder: str) -> None:
    results = run_ranks(3, profiled, folder, 128, timeout_s=200)
    for result in results:
        assert result["error"].startswith("rank 0 (A): the length is 128; expected at most 64")
