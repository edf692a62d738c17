"""Completing files of weights to a folder that `AutoModelForCausalLM.from_pretrained` reads."""

import copy
import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import GenerationConfig, PretrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from zorse_ds.errors import ModelError
from zorse_ds.files import read_json, write_text
from zorse_ds.integrations.huggingface.weight_files import SAFETENSORS

COPIED_PATTERNS = (
    "generation_config.json",
    "tokenizer*",
    "vocab*",
    "merges.txt",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template*",
    "spiece.model",
    "sentencepiece*.model",
)


def weights_file_name(index: int, num_files: int) -> str:
    """Name of the `index`-th (from 0) of `num_files` weight files."""
    return f"model-{index + 1:05d}-of-{num_files:05d}.safetensors"


def write_index_and_config(
    source: Path | PretrainedConfig,
    folder: Path,
    weight_map: Mapping[str, tuple[str, int]],
    *,
    dtype: torch.dtype,
) -> None:
    """Complete the weight files in `folder` to a checkpoint.

    `weight_map` is the union of what `write_stage_weights` returned, `dtype` that of the weights.
    Writes the index, config.json, and, out of the folder `source`, generation_config.json and the
    tokenizer's files as they are. Rank 0 alone calls this, after all weights are written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    index = {
        "metadata": {"total_size": sum(size for _, size in weight_map.values())},
        "weight_map": {key: weight_map[key][0] for key in sorted(weight_map)},
    }
    write_text(folder / SAFETENSORS.index, json.dumps(index, indent=2) + "\n")
    write_config(source, folder, dtype=dtype)


def write_config(source: Path | PretrainedConfig, folder: Path, *, dtype: torch.dtype) -> None:
    """Write config.json, and copy or make what else `source` has beside the weights."""
    if isinstance(source, PretrainedConfig):
        settings = _settings_of(source)
        GenerationConfig.from_model_config(source).save_pretrained(folder)
    else:
        settings = read_json(source / "config.json", ModelError)
        copy_other_files(source, folder)
    # Left as it was, it would have from_pretrained round weights trained in another dtype.
    settings.pop("torch_dtype", None)
    settings["dtype"] = str(dtype).removeprefix("torch.")
    write_text(folder / "config.json", json.dumps(settings, indent=2) + "\n")


def _settings_of(config: PretrainedConfig) -> dict[str, Any]:
    """The content of config.json for a configuration made in code."""
    config = copy.deepcopy(config)
    config.architectures = [MODEL_FOR_CAUSAL_LM_MAPPING[type(config)].__name__]
    settings: dict[str, Any] = json.loads(config.to_json_string(use_diff=True))
    return settings


def copy_other_files(source: Path, folder: Path) -> None:
    """Copy the tokenizer's and generation files; chat templates may be in a folder."""
    if source.resolve() == folder.resolve():
        return
    for pattern in COPIED_PATTERNS:
        for path in sorted(source.glob(pattern)):
            if path.is_file():
                shutil.copyfile(path, folder / path.name)
    templates = source / "additional_chat_templates"
    if templates.is_dir():
        shutil.copytree(templates, folder / templates.name, dirs_exist_ok=True)
