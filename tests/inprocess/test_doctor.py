"""`zorse doctor`: what it says of a model from its configuration, against the real stages."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import transformers as hf

from tests.inprocess.hf_models import CONFIGS, SIZES, make_batch
from tools.tiny_configs import REFUSED
from zorse_ds.cli import main
from zorse_ds.core.plan import Plan
from zorse_ds.integrations.huggingface import CausalLMStages
from zorse_ds.integrations.huggingface.doctor import diagnose
from zorse_ds.profiler import environment
from zorse_ds.schedule.compile import compile_trace


@pytest.fixture
def zorse(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    """The program in this process: exit code, output, errors."""

    def run(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["zorse", *arguments])
        with pytest.raises(SystemExit) as ended:
            main()
        code = ended.value.code
        return (int(code or 0), *capsys.readouterr())

    return run


def saved(config: Any, folder: Path) -> str:
    config.save_pretrained(folder)
    return str(folder)


def test_json_lists_layers_ties_and_what_travels(zorse: Any, tmp_path: Path) -> None:
    folder = saved(hf.LlamaConfig(**SIZES, tie_word_embeddings=True, dtype="bfloat16"), tmp_path)
    code, text, _ = zorse("doctor", "--model", folder, "--json")
    facts = json.loads(text)
    assert (code, facts["understood"], facts["architecture"]) == (0, True, "LlamaForCausalLM")
    assert [layer["name"] for layer in facts["layers"]] == [
        "model.embed_tokens", *(f"model.layers.{i}" for i in range(3)), "model.norm+lm_head",
    ]  # fmt: skip
    assert [layer["num_params"] for layer in facts["layers"]] == [1024, 2336, 2336, 2336, 1040]
    assert facts["num_params"] == 1024 + 3 * 2336 + 16
    assert facts["tied"] == ["lm_head.weight is model.embed_tokens.weight: layers 4 and 0"]
    assert "weights were saved in bfloat16" in "\n".join(facts["notes"])
    assert {each["name"]: each["is_tested"] for each in facts["libraries"]}["torch"]
    assert facts["devices"]


@pytest.mark.parametrize("family", CONFIGS)
def test_what_travels_is_what_stages_hand_on(family: str, tmp_path: Path) -> None:
    boundary = diagnose(saved(CONFIGS[family](), tmp_path)).boundary
    hidden, *optional = boundary
    stage = CausalLMStages.from_config(CONFIGS[family]()).build(0, 2)
    batch = make_batch("padded") if optional else make_batch()
    value, mask, positions = stage(batch)
    assert f"(b, t, {value.shape[2]})" == hidden.shape
    assert (mask is not None) == ("attention_mask" in [each.name for each in optional])
    assert positions is None
    assert all(each.is_optional and each.shape == "(b, t)" for each in optional)
    takes_positions = "position_ids" in stage.structure.accepted_inputs
    assert takes_positions == ("position_ids" in [each.name for each in optional])


@pytest.mark.parametrize("family", CONFIGS)
def test_the_printed_plan_is_valid_and_even(family: str, tmp_path: Path, zorse: Any) -> None:
    folder = saved(CONFIGS[family](), tmp_path)
    code, text, _ = zorse("doctor", "--model", folder, "--plan")
    assert code == 0
    plan = Plan.from_dict(json.loads(text))
    sizes = [layer.num_params for layer in diagnose(folder).layers]
    assert (plan.num_layers, plan.world_size) == (len(sizes), 2)
    compile_trace(plan)
    cut = plan.stages[0].layers.stop
    uneven = [abs(sum(sizes[:stop]) - sum(sizes[stop:])) for stop in range(1, len(sizes))]
    assert uneven[cut - 1] == min(uneven)


def test_the_table_joins_blocks_that_are_alike(zorse: Any, tmp_path: Path) -> None:
    code, text, _ = zorse("doctor", "--model", saved(CONFIGS["gpt2"](), tmp_path))
    assert code == 0
    words = [line.split() for line in text.splitlines()]
    assert ["1-3", "transformer.h.0-2", "block", "3,280", "9,840"] in words
    joined = " ".join(text.split())
    assert "GPT2LMHeadModel is understood: 11,920 parameters in 5 pipeline layers" in joined
    assert "dropout is on (attn_pdrop 0.1, embd_pdrop 0.1, resid_pdrop 0.1)" in joined
    # A long path may be broken anywhere.
    assert f"zorsedoctor--model{tmp_path}--plan" in "".join(text.split())


def test_notes_tell_attention_experts_and_inputs(tmp_path: Path) -> None:
    moe = hf.MixtralConfig(**SIZES, num_local_experts=4, num_experts_per_tok=2)
    notes = "\n".join(diagnose(saved(moe, tmp_path / "moe")).notes)
    assert "mixture of experts in 3 blocks: a token uses 56% of their parameters" in notes
    gemma = "\n".join(diagnose(saved(CONFIGS["gemma2"](), tmp_path / "gemma")).notes)
    assert "sliding attention in 2 blocks, full attention in 1 blocks; the window is 3" in gemma
    mamba = "\n".join(diagnose(saved(CONFIGS["mamba"](), tmp_path / "mamba")).notes)
    assert "no block has attention that grows with the square" in mamba
    assert "its forward takes no position_ids" in mamba


def test_a_model_that_cannot_be_cut_is_refused_with_the_reason(zorse: Any, tmp_path: Path) -> None:
    config = REFUSED["gemma3n"]()
    code, text, errors = zorse("doctor", "--model", saved(config, tmp_path), "--json")
    facts = json.loads(text)
    assert (code, facts["understood"]) == (2, False)
    assert "hidden_size_per_layer_input" in facts["reason"]
    assert errors.splitlines() == [facts["reason"]]


@pytest.mark.parametrize("options", [[], ["--plan"]])
def test_a_folder_without_configuration_is_one_sentence(
    options: list[str], zorse: Any, tmp_path: Path
) -> None:
    code, _, errors = zorse("doctor", "--model", str(tmp_path), *options)
    assert (code, len(errors.splitlines())) == (2, 1)
    assert f"{tmp_path}/config.json cannot be read" in errors
    code, _, errors = zorse("doctor", "--plan")
    assert (code, "without --model" in errors) == (2, True)


def test_versions_outside_the_tested_range_are_told(
    zorse: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    needs = ["torch>=99", "no_such_library>=1", "numpy>=1", "ruff==0; extra == 'dev'"]
    monkeypatch.setattr(environment.metadata, "requires", lambda _: needs)
    found = {each.name: each for each in environment.libraries()}
    assert list(found) == ["torch", "no_such_library", "numpy"]
    assert [each.is_tested for each in found.values()] == [False, False, True]
    code, text, _ = zorse("doctor")
    assert code == 0
    assert ">=99 not tested" in " ".join(text.split())
    assert "no_such_library - >=1 missing" in " ".join(text.split())
