"""Writing the adapters of all stages as one that `PeftModel.from_pretrained` reads."""

import copy
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from zorse_ds.integrations.huggingface.adapters import (
    WEIGHTS_NAME,
    Adapters,
    is_adapter,
    name_on_disk,
)
from zorse_ds.integrations.huggingface.stage import CausalLMStage

_PART = "adapter-part-{:05d}.safetensors"


def write_adapter_part(
    stage: CausalLMStage, folder: Path, index: int
) -> dict[str, tuple[str, int]]:
    """Write the adapters of the `index`-th stage; one that has none writes no file.

    Returns, for each tensor, the file it will be in and its bytes.
    """
    tensors = {
        name_on_disk(name): parameter.detach().cpu().contiguous().clone()
        for name, parameter in stage.model.named_parameters()
        if is_adapter(name)
    }
    if tensors:
        save_file(tensors, folder / _PART.format(index), metadata={"format": "pt"})
    return {name: (WEIGHTS_NAME, tensor.nbytes) for name, tensor in tensors.items()}


def join_adapter_parts(folder: Path) -> None:
    """Make one file of all parts. Rank 0 alone calls this, after all are written."""
    parts = sorted(folder.glob(_PART.replace("{:05d}", "*")))
    tensors: dict[str, torch.Tensor] = {}
    for part in parts:
        tensors |= load_file(part)
    save_file(dict(sorted(tensors.items())), folder / WEIGHTS_NAME, metadata={"format": "pt"})
    (folder / WEIGHTS_NAME).chmod(0o644)
    for part in parts:
        part.unlink()


def write_adapter_config(adapters: Adapters, folder: Path, base: Path | None) -> None:
    """Write adapter_config.json: the user's own, with the base it belongs to."""
    config = copy.deepcopy(adapters.config)
    config.base_model_name_or_path = None if base is None else str(base.absolute())
    config.inference_mode = True
    config.save_pretrained(str(folder))
