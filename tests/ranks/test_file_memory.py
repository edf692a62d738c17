"""Resident memory while a model is loaded and exported: the own stage and one tensor, at most."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import transformers as hf
from safetensors.torch import load_file

import zorse_ds
from benchmarks.resident import growth_of
from tests.ranks.harness import run_ranks
from zorse_ds.core.plan import Plan

MIB = 2**20
SLACK_BYTES = 8 * MIB
"""For what is no tensor: objects of Python, tables of contents, pages of libraries."""
SIZES = {"hidden_size": 384, "intermediate_size": 1024, "vocab_size": 16384}
LORA = {"r": 4, "target_modules": "all-linear"}
KINDS: dict[str, dict[str, Any]] = {
    "full": {},
    "bfloat16": {"dtype": torch.bfloat16},
    "merged": {"adapters": LORA},
}


def plan_of(num_blocks: int) -> Plan:
    """Two ranks that share the first stage's parameters, and one."""
    cut = num_blocks // 2 + 1
    return Plan.from_dict(
        {
            "global_batch_size": 4,
            "groups": [
                {
                    "name": "a",
                    "zero_level": 3,
                    "gpus": [{"rank": rank, "micro_batches": [2]} for rank in (0, 1)],
                },
                {"name": "b", "gpus": [{"rank": 2, "micro_batches": [4]}]},
            ],
            "stages": [
                {"group": "a", "layers": [0, cut]},
                {"group": "b", "layers": [cut, num_blocks + 2]},
            ],
        }
    )


def save_model(folder: Path, num_blocks: int, **sizes: int) -> None:
    config = hf.LlamaConfig(
        num_hidden_layers=num_blocks,
        num_attention_heads=4,
        num_key_value_heads=4,
        tie_word_embeddings=False,
        **sizes,
    )
    hf.AutoModelForCausalLM.from_config(config).save_pretrained(folder)


class Seen(NamedTuple):
    """Of one rank, in bytes."""

    stage: int
    largest: int
    """Tensor, as it is stored or as it is held."""
    loading: int
    exporting: int


def load_and_export(folder: Path, name: str, kind: str, num_blocks: int) -> Seen:
    options = KINDS[kind]
    model, loading = growth_of(
        lambda: zorse_ds.from_pretrained(folder / name, plan_of(num_blocks), **options)
    )
    held = list(model.parameters())
    seen = (
        sum(p.nbytes for p in held),
        max(p.numel() for p in held) * torch.float32.itemsize,
    )
    config = {"optimizer": {"type": "SGD", "params": {"lr": 0.1}}, "steps_per_print": None}
    engine, *_ = zorse_ds.initialize(model=model, config=config)
    del model, held
    out, merge = folder / f"{name} {kind}", kind == "merged"
    _, exporting = growth_of(lambda: engine.save_pretrained(out, merge_adapters=merge))
    engine.destroy()
    return Seen(*seen, loading, exporting)


def work(rank: int, folder: Path) -> dict[str, Seen]:
    """A small model first, so that what is loaded once does not count."""
    found = {}
    for kind in KINDS:
        load_and_export(folder, "small", kind, 2)
        found[kind] = load_and_export(folder, "large", kind, 8)
    return found


def test_it_is_the_own_stage_and_one_tensor(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save_model(tmp_path / "small", 2, hidden_size=16, intermediate_size=32, vocab_size=64)
    save_model(tmp_path / "large", 8, **SIZES)
    ranks = run_ranks(3, work, tmp_path, timeout_s=300)
    with capsys.disabled():
        for rank, found in enumerate(ranks):
            for kind, seen in found.items():
                shown = {key: round(value / MIB) for key, value in seen._asdict().items()}
                print(f"rank {rank}, {kind}, MiB: {shown}")
    for rank, found in enumerate(ranks):
        for kind, seen in found.items():
            assert seen.loading <= seen.stage + seen.largest + SLACK_BYTES, (rank, kind)
            # What a group shares is made whole; what a rank has is written as it lies, unless
            # adapters are merged into it, a layer at a time.
            gathered = seen.stage if rank < 2 else 0
            more = seen.largest if kind == "merged" else 0
            assert seen.exporting <= gathered + more + SLACK_BYTES, (rank, kind)
    before = load_file(tmp_path / "large" / "model.safetensors")
    for kind in KINDS:
        model = hf.AutoModelForCausalLM.from_pretrained(tmp_path / f"large {kind}").state_dict()
        assert model.keys() == before.keys()
        # New adapters change nothing.
        assert all(torch.equal(model[n], t.to(model[n].dtype)) for n, t in before.items())
