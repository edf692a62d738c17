"""Stages read and write what transformers writes and reads."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from tests.inprocess.hf_models import CONFIGS, make_batch, run, save_checkpoint
from zorse_ds.errors import ModelError
from zorse_ds.integrations.huggingface import (
    CausalLMStages,
    weights_file_name,
    write_index_and_config,
    write_stage_weights,
)

CUT = [(0, 2), (2, 4), (4, 5)]


def save(stages: CausalLMStages, source: Any, folder: Path) -> dict[str, tuple[str, int]]:
    """Write all stages of CUT; the first owns what is tied."""
    weight_map: dict[str, tuple[str, int]] = {}
    for i, layers in enumerate(CUT):
        name = weights_file_name(i, len(CUT))
        written = write_stage_weights(stages.build(*layers), folder, name, owns_tied=i == 0)
        assert not written.keys() & weight_map.keys()
        weight_map.update(written)
    write_index_and_config(source, folder, weight_map, dtype=stages.dtype)
    return weight_map


def keys_on_disk(folder: Path) -> set[str]:
    """All keys in the weight files of a folder."""
    keys: set[str] = set()
    for path in folder.glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            keys.update(file.keys())
    return keys


def assert_reloads_equal(folder: Path, model: Any) -> None:
    """AutoModelForCausalLM finds every tensor, no other, and each as it was."""
    again, info = hf.AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    ours, theirs = again.state_dict(), model.state_dict()
    assert ours.keys() == theirs.keys()
    assert [k for k in ours if ours[k].dtype != theirs[k].dtype] == []
    assert [k for k in ours if not torch.equal(ours[k], theirs[k])] == []


@pytest.mark.parametrize("name", ["llama", "llama_tied", "gpt2", "gpt2_untied", "gpt_neox"])
def test_load_save_reload(name: str, tmp_path: Path) -> None:
    source, out = tmp_path / "in", tmp_path / "out"
    model = save_checkpoint(CONFIGS[name](), source)
    assert len(list(source.glob("*.safetensors"))) > 1
    stages = CausalLMStages.from_folder(source, dtype=torch.float64)
    weight_map = save(stages, source, out)
    assert_reloads_equal(out, model)
    assert keys_on_disk(out) == keys_on_disk(source) == set(weight_map)
    index = json.loads((out / "model.safetensors.index.json").read_text())
    theirs = json.loads((source / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == theirs["metadata"]["total_size"]
    assert all(path.stat().st_mode & 0o777 == 0o644 for path in out.glob("*.safetensors"))


@pytest.mark.parametrize(
    "name", ["mixtral", "qwen3_moe", "deepseek_v3", "gpt_oss", "qwen3_next", "gemma4"]
)
def test_experts_reload(name: str, tmp_path: Path) -> None:
    """Their weights have another form on disk, which is gone back to layer by layer."""
    source, out = tmp_path / "in", tmp_path / "out"
    model = save_checkpoint(CONFIGS[name](), source, torch.float32)
    save(CausalLMStages.from_folder(source), source, out)
    assert keys_on_disk(out) == keys_on_disk(source)
    assert_reloads_equal(out, model)


@pytest.mark.parametrize("name", ["llama_tied", "gpt2_untied"])
def test_save_of_random_weights(name: str, tmp_path: Path) -> None:
    config = CONFIGS[name]()
    stages = CausalLMStages.from_config(config, dtype=torch.bfloat16, seed=3)
    save(stages, config, tmp_path)
    whole = stages.build(0, 5)
    assert_reloads_equal(tmp_path, whole.model)
    assert json.loads((tmp_path / "config.json").read_text())["architectures"]
    assert (tmp_path / "generation_config.json").is_file()


def test_trained_dtype_is_in_the_config(tmp_path: Path) -> None:
    """A folder in bfloat16, trained in float32, must not be rounded when it is loaded again."""
    source, out = tmp_path / "in", tmp_path / "out"
    save_checkpoint(CONFIGS["llama"](), source, torch.bfloat16)
    stages = CausalLMStages.from_folder(source, dtype=torch.float32)
    save(stages, source, out)
    assert_reloads_equal(out, stages.build(0, 5).model)


def test_other_files_are_copied_as_they_are(tmp_path: Path) -> None:
    source, out = tmp_path / "in", tmp_path / "out"
    save_checkpoint(CONFIGS["llama"](), source)
    names = ["tokenizer.json", "tokenizer_config.json", "merges.txt", "chat_template.jinja"]
    for name in names:
        (source / name).write_text(f"text of {name}")
    (source / "training_args.bin").write_text("not a tokenizer")
    save(CausalLMStages.from_folder(source), source, out)
    assert [(out / name).read_text() for name in names] == [f"text of {n}" for n in names]
    assert not (out / "training_args.bin").exists()
    original = json.loads((source / "config.json").read_text())
    assert json.loads((out / "config.json").read_text()) == {**original, "dtype": "float32"}


@pytest.mark.parametrize("name", ["llama", "llama_tied", "gpt2", "gpt2_untied"])
def test_tie_flag_is_obeyed(name: str, tmp_path: Path) -> None:
    model = save_checkpoint(CONFIGS[name](), tmp_path)
    stages = CausalLMStages.from_folder(tmp_path, dtype=torch.float64)
    is_tied = model.config.tie_word_embeddings
    embeddings = stages.layer_names[0].split("+")[0] + ".weight"
    assert stages.tied_layers == (((0, 4),) if is_tied else ())
    names = [dict(stages.build(*layers).global_parameters()) for layers in [(0, 1), (4, 5)]]
    assert embeddings in names[0]
    assert (embeddings in names[1]) == is_tied
    assert ("lm_head.weight" in names[1]) != is_tied
    expected = {embeddings} if is_tied else set()
    for layers in [(0, 1), (4, 5), (0, 5)]:
        assert set(stages.build(*layers).tied_parameters()) == expected
    assert not stages.build(1, 4).tied_parameters()
    size = dict(model.named_parameters())[embeddings].numel()
    assert sum(stages.parameter_counts) == model.num_parameters() + is_tied * size


@pytest.mark.parametrize("name", ["llama", "llama_tied", "gpt2"])
def test_stages_hold_their_own_parameters_only(name: str, tmp_path: Path) -> None:
    model = save_checkpoint(CONFIGS[name](), tmp_path)
    expected = dict(model.named_parameters())
    stages = CausalLMStages.from_folder(tmp_path, dtype=torch.float64)
    seen: set[str] = set()
    for layer in range(5):
        stage = stages.build(layer, layer + 1)
        found = dict(stage.global_parameters())
        assert sum(p.numel() for p in stage.parameters()) == stages.parameter_counts[layer]
        assert all(torch.equal(found[key], expected[key]) for key in found)
        own = {key for key in found if stage.layer_of(key) == layer}
        assert own == found.keys() - (set(stage.tied_parameters()) if layer else set())
        seen |= own
    assert seen == expected.keys()


def change_config(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def drop_weight(folder: Path, key: str) -> None:
    for path in folder.glob("*.safetensors"):
        tensors = load_file(path)
        if tensors.pop(key, None) is not None:
            save_file(tensors, path, metadata={"format": "pt"})


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    save_checkpoint(CONFIGS["llama"](), tmp_path)
    return tmp_path


def test_refuses_folders_that_hold_no_model(checkpoint: Path) -> None:
    with pytest.raises(ModelError, match=r"nowhere is not a folder; expected"):
        CausalLMStages.from_folder(checkpoint / "nowhere")
    (checkpoint / "empty").mkdir()
    with pytest.raises(ModelError, match=r"empty/config\.json"):
        CausalLMStages.from_folder(checkpoint / "empty")
    shutil.copy(checkpoint / "config.json", checkpoint / "empty")
    (checkpoint / "empty" / "model.gguf").touch()
    with pytest.raises(ModelError, match=r"model\.gguf.*expected model\.safetensors"):
        CausalLMStages.from_folder(checkpoint / "empty")


def test_refuses_architectures_it_does_not_know(checkpoint: Path) -> None:
    for model_type in ("no-such-model", "t5", "vit"):
        change_config(checkpoint, model_type=model_type)
        with pytest.raises(ModelError, match=rf"config\.json.*'{model_type}'.*expected"):
            CausalLMStages.from_folder(checkpoint)


def test_refuses_quantized_weights(checkpoint: Path) -> None:
    change_config(checkpoint, quantization_config={"quant_method": "fp8"})
    with pytest.raises(ModelError, match="quantization_config"):
        CausalLMStages.from_folder(checkpoint)


def test_names_a_weight_file_that_is_not_there(checkpoint: Path) -> None:
    name = sorted(path.name for path in checkpoint.glob("*.safetensors"))[-1]
    (checkpoint / name).unlink()
    with pytest.raises(ModelError, match=f"names {name}, which is not there"):
        CausalLMStages.from_folder(checkpoint)


def test_names_a_weight_that_is_missing(checkpoint: Path) -> None:
    key = "model.layers.1.mlp.up_proj.weight"
    drop_weight(checkpoint, key)
    stages = CausalLMStages.from_folder(checkpoint)
    stages.build(0, 2)
    with pytest.raises(ModelError, match=f"lacks {key}"):
        stages.build(2, 3)


def test_refuses_weights_of_another_shape(checkpoint: Path) -> None:
    change_config(checkpoint, intermediate_size=48)
    with pytest.raises(ModelError, match="cannot be loaded"):
        CausalLMStages.from_folder(checkpoint).build(1, 2)


def test_refuses_a_head_that_is_tied_only_in_the_config(checkpoint: Path) -> None:
    change_config(checkpoint, tie_word_embeddings=True)
    stages = CausalLMStages.from_folder(checkpoint)
    with pytest.raises(ModelError, match=r"differs from model\.embed_tokens\.weight"):
        stages.build(4, 5)


def test_never_asks_a_hub(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Relative paths look like names on the hub; they are folders here."""
    monkeypatch.chdir(checkpoint.parent)
    stages = CausalLMStages.from_folder(checkpoint.name)
    assert run([stages.build(0, 5)], make_batch()).shape == (2, 7, 64)
