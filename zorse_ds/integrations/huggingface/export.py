"""From a checkpoint of any plan to a Hugging Face folder, layer by layer, without any GPU."""

import shutil
from dataclasses import dataclass
from pathlib import Path

import torch

from zorse_ds.core.checkpoint.folder import MANIFEST_NAME, CheckpointFolder
from zorse_ds.core.checkpoint.manifest import BUFFER, VALUE
from zorse_ds.errors import CheckpointError
from zorse_ds.integrations.huggingface.adapter_saving import join_adapter_parts, write_adapter_part
from zorse_ds.integrations.huggingface.adapters import CONFIG_NAME, is_adapter
from zorse_ds.integrations.huggingface.loading import config_in
from zorse_ds.integrations.huggingface.saving import (
    copy_other_files,
    weights_file_name,
    write_index_and_config,
)
from zorse_ds.integrations.huggingface.stage import CausalLMStage
from zorse_ds.integrations.huggingface.stage_weights import write_stage_weights
from zorse_ds.integrations.huggingface.stages import CausalLMStages
from zorse_ds.integrations.huggingface.target import SaveTarget
from zorse_ds.ranges import Range
from zorse_ds.runtime.checkpoint.exchange import Alone
from zorse_ds.runtime.checkpoint.files import CheckpointReader
from zorse_ds.runtime.checkpoint.loading import open_checkpoint
from zorse_ds.runtime.checkpoint.saving import MODEL_FOLDER


@dataclass(frozen=True, slots=True)
class Exported:
    """What an export wrote."""

    checkpoint: Path
    folder: Path
    num_layers: int
    num_files: int
    num_bytes: int
    dtype: str


def find_checkpoint(path: str | Path, tag: str | None = None) -> Path:
    """A checkpoint given by itself, or by the folder it is in: the latest, or that of a tag.

    Raises `CheckpointError` when there is none.
    """
    path = Path(path)
    if tag is None and (path / MANIFEST_NAME).is_file():
        return path
    folder = CheckpointFolder(path)
    wanted = tag or folder.latest()
    if wanted is None:
        raise CheckpointError(
            f"{path} has neither {MANIFEST_NAME} nor a file 'latest'; expected a checkpoint, or a "
            "folder that engine.save_checkpoint was given"
        )
    return folder.find(wanted)


def export(
    checkpoint: Path,
    folder: str | Path,
    *,
    dtype: torch.dtype = torch.float32,
    merge_adapters: bool = False,
) -> Exported:
    """Write the weights of a checkpoint as a folder that transformers reads, one file a layer.

    Of a model with adapters these alone, as `PeftModel.from_pretrained` reads them, unless
    `merge_adapters`. Memory: one pipeline layer in `dtype`, and one tensor as it was saved. Raises
    `CheckpointError` for a checkpoint that is damaged or not of a Hugging Face model, `ModelError`
    for a folder that cannot be written; the folder is then as it was.
    """
    reader = open_checkpoint(checkpoint)
    source = checkpoint / MODEL_FOLDER
    if not source.is_dir():
        raise CheckpointError(
            f"{checkpoint} does not hold the configuration of a Hugging Face model; expected a "
            "checkpoint of a model from zorse_ds.from_pretrained or from_config"
        )
    adapters = source / CONFIG_NAME if (source / CONFIG_NAME).is_file() else None
    adapters_alone = adapters is not None and not merge_adapters
    stages = CausalLMStages.from_config(config_in(source), dtype=dtype, adapters=adapters)
    target = SaveTarget(folder, Alone())
    weight_map: dict[str, tuple[str, int]] = {}
    num_layers = stages.structure.num_layers
    try:
        for layer in range(num_layers):
            stage = _filled(stages, layer, reader, adapters_alone)
            with target.attempt():
                write = write_adapter_part if adapters_alone else _write_layer
                weight_map |= write(stage, target.unfinished, layer)
            target.agree(None)
        with target.attempt():
            if adapters_alone:
                _complete_adapters(source, target.unfinished)
            else:
                write_index_and_config(source, target.unfinished, weight_map, dtype=dtype)
            target.finish()
        target.agree(None)
    except BaseException:
        shutil.rmtree(target.unfinished, ignore_errors=True)
        raise
    return _exported(checkpoint, target.folder, num_layers, weight_map, dtype)


def _exported(
    checkpoint: Path,
    folder: Path,
    num_layers: int,
    weight_map: dict[str, tuple[str, int]],
    dtype: torch.dtype,
) -> Exported:
    return Exported(
        checkpoint,
        folder,
        num_layers,
        len({name for name, _ in weight_map.values()}),
        sum(size for _, size in weight_map.values()),
        str(dtype).removeprefix("torch."),
    )


def _write_layer(stage: CausalLMStage, folder: Path, layer: int) -> dict[str, tuple[str, int]]:
    name = weights_file_name(layer, stage.structure.num_layers)
    owns_tied = layer == 0 or not stage.structure.ties
    return write_stage_weights(stage, folder, name, owns_tied=owns_tied)


def _complete_adapters(source: Path, folder: Path) -> None:
    join_adapter_parts(folder)
    shutil.copyfile(source / CONFIG_NAME, folder / CONFIG_NAME)
    copy_other_files(source, folder)


def _filled(
    stages: CausalLMStages, layer: int, reader: CheckpointReader, adapters_alone: bool
) -> CausalLMStage:
    """One pipeline layer with the values of the checkpoint, or its adapters with theirs."""
    stage = stages.build(layer, layer + 1)
    with torch.no_grad():
        for name, parameter in stage.global_parameters():
            if adapters_alone and not is_adapter(name):
                continue
            found = reader.manifest.shapes.get(name)
            if found != tuple(parameter.shape) or not reader.lookup.has(VALUE, name):
                shown = "has no such parameter" if found is None else f"has shape {list(found)}"
                raise CheckpointError(
                    f"{reader.folder} {shown} for {name}, which has shape "
                    f"{list(parameter.shape)} in the configuration; expected all parameters, with "
                    "the frozen ones"
                )
            whole = Range(0, parameter.numel())
            reader.read_into(parameter.view(-1), VALUE, name, whole)
        for name, buffer in stage.global_buffers():
            if reader.lookup.has(BUFFER, name):
                buffer.copy_(reader.read_whole(BUFFER, name))
    return stage
