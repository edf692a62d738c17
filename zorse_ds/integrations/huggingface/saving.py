"""Writing a checkpoint that `AutoModelForCausalLM.from_pretrained` reads, one file a stage."""

import copy
import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import GenerationConfig, PretrainedConfig
from transformers.core_model_loading import revert_weight_conversion
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from zorse_ds.errors import ModelError
from zorse_ds.files import read_json, write_text
from zorse_ds.integrations.huggingface.adapters import has_adapters, is_adapter, merged_weights
from zorse_ds.integrations.huggingface.stage import CausalLMStage
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


def write_stage_weights(
    stage: CausalLMStage, folder: Path, file_name: str, *, owns_tied: bool
) -> dict[str, tuple[str, int]]:
    """Write the weights of a stage to `folder / file_name`, whole or not at all.

    Returns, for each key on disk, the file and the bytes of its tensor. Tied parameters are
    written, under the name of the embeddings, only when `owns_tied`; exactly one of the stages
    that hold them should. Writes no file when that leaves nothing. Memory: one more copy of those
    tensors that are not contiguous, not on the CPU, or into which an adapter is merged.
    """
    tensors = _tensors_on_disk(stage, owns_tied)
    if not tensors:
        return {}
    folder.mkdir(parents=True, exist_ok=True)
    temporary = folder / f".{file_name}.{os.getpid()}"
    try:
        save_file(tensors, temporary, metadata={"format": "pt"})
        temporary.chmod(0o644)
        temporary.replace(folder / file_name)
    finally:
        temporary.unlink(missing_ok=True)
    return {key: (file_name, tensor.nbytes) for key, tensor in tensors.items()}


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


def _tensors_on_disk(stage: CausalLMStage, owns_tied: bool) -> dict[str, torch.Tensor]:
    """What a stage writes: its own layers' tensors, under the names and in the form on disk."""
    structure = stage.structure
    dropped = {target for target, _ in structure.ties}
    dropped.update(stage.model._keys_to_ignore_on_save or ())
    if not owns_tied:
        dropped |= structure.tied_sources
    kept = {}
    merged = merged_weights(stage.model) if has_adapters(stage.model) else {}
    for own_name, own in stage.model.state_dict().items():
        if is_adapter(own_name):
            continue
        name = own_name.replace(".base_layer.", ".")
        tensor = merged.get(name, own)
        # Buffers beside the layers are alike on all stages; they go with layer 0.
        layer = structure.find_layer(name) or 0
        local = stage.start <= layer < stage.stop or name in structure.tied_sources
        if local and name not in dropped:
            kept[name] = tensor
    converted = revert_weight_conversion(stage.model, kept)
    return {key: _alone(tensor) for key, tensor in converted.items()}


def _alone(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor on the CPU, contiguous, and sharing no memory with others."""
    tensor = tensor.detach().cpu().contiguous()
    return tensor if tensor.untyped_storage().nbytes() == tensor.nbytes else tensor.clone()


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
