"""Stages compute what the unsplit model computes: logits and gradients to the last bit."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers as hf

from tests.inprocess.hf_models import (
    CONFIGS,
    SIZES,
    StageCache,
    all_cuts,
    assert_same_step,
    make_batch,
    run,
    save_checkpoint,
)
from zorse_ds.integrations.huggingface import CausalLMStages

EVERY_CUT = ("llama", "llama_tied", "gpt2", "gpt2_untied")
# The embeddings alone, the head alone, both in the middle of other stages.
SOME_CUTS = ([(0, 5)], [(0, 1), (1, 4), (4, 5)], [(0, 2), (2, 3), (3, 5)])


@pytest.mark.parametrize("name", EVERY_CUT)
def test_every_cut_into_up_to_four_stages(name: str, tmp_path: Path) -> None:
    model = save_checkpoint(CONFIGS[name](), tmp_path)
    cache = StageCache(CausalLMStages.from_folder(tmp_path, dtype=torch.float64))
    cuts = list(all_cuts(5))
    assert len(cuts) == 15
    for cut in cuts:
        for kind in ("plain", "padded", "packed"):
            assert_same_step(cache.pipeline(cut), model, make_batch(kind))


@pytest.mark.parametrize("name", sorted(set(CONFIGS) - set(EVERY_CUT)))
def test_families(name: str, tmp_path: Path) -> None:
    model = save_checkpoint(CONFIGS[name](), tmp_path)
    stages = CausalLMStages.from_folder(tmp_path, dtype=torch.float64)
    cache = StageCache(stages)
    kinds = ["plain", "padded"]
    if "position_ids" in stages.structure.accepted_inputs:
        kinds.append("packed")
    for cut in SOME_CUTS:
        for kind in kinds:
            assert_same_step(cache.pipeline(cut), model, make_batch(kind))


@pytest.mark.parametrize("name", ["mistral", "gpt2", "gemma2"])
def test_eager_attention(name: str, tmp_path: Path) -> None:
    save_checkpoint(CONFIGS[name](), tmp_path)
    model = hf.AutoModelForCausalLM.from_pretrained(
        tmp_path, dtype=torch.float64, attn_implementation="eager"
    )
    for tensor in model.parameters():
        tensor.data = tensor.data.clone()
    stages = CausalLMStages.from_folder(tmp_path, dtype=torch.float64, attn_implementation="eager")
    assert_same_step(StageCache(stages).pipeline(SOME_CUTS[1]), model, make_batch("padded"))


def test_experts_stored_one_by_one(tmp_path: Path) -> None:
    """On disk each expert has a tensor of its own, in memory all share one."""
    config = hf.MixtralConfig(**SIZES, num_local_experts=4)
    model = save_checkpoint(config, tmp_path, torch.float32)
    stages = CausalLMStages.from_folder(tmp_path)
    assert_same_step(StageCache(stages).pipeline(SOME_CUTS[2]), model, make_batch("padded"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_lower_precision(dtype: torch.dtype, tmp_path: Path) -> None:
    model = save_checkpoint(CONFIGS["llama"](), tmp_path, dtype)
    stages = CausalLMStages.from_folder(tmp_path, dtype=dtype)
    assert_same_step(StageCache(stages).pipeline(SOME_CUTS[2]), model, make_batch("padded"))


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_autocast(name: str, tmp_path: Path) -> None:
    model = save_checkpoint(CONFIGS[name](), tmp_path, torch.float32)
    pipeline = StageCache(CausalLMStages.from_folder(tmp_path)).pipeline(SOME_CUTS[2])
    batch = make_batch("padded")
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(run(pipeline, batch), model(**batch, use_cache=False).logits)
