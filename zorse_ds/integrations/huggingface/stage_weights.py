"""Writing the weights of one stage as one safetensors file, a pipeline layer at a time."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Self

from torch import Tensor
from transformers.core_model_loading import revert_weight_conversion

from zorse_ds.integrations.huggingface.adapters import (
    has_adapters,
    is_adapter,
    lora_layers,
    merged_weight,
)
from zorse_ds.integrations.huggingface.stage import CausalLMStage
from zorse_ds.ranges import consecutive
from zorse_ds.runtime.safetensors_format import bytes_of, entry_of, header_of, write_all

if TYPE_CHECKING:
    from peft.tuners.lora import LoraLayer


@dataclass(frozen=True, slots=True)
class _Weight:
    """A parameter or buffer of the stage, and the adapter to be merged into it."""

    tensor: Tensor
    adapter: "LoraLayer | None"

    def whole(self) -> Tensor:
        """As it is written; new memory where an adapter is merged."""
        return self.tensor if self.adapter is None else merged_weight(self.adapter)


_Layer = dict[str, _Weight]
"""What is written of one pipeline layer, by the model's own names."""


def write_stage_weights(
    stage: CausalLMStage, folder: Path, file_name: str, *, owns_tied: bool
) -> dict[str, tuple[str, int]]:
    """Write the weights of a stage to `folder / file_name`, whole or not at all.

    Returns, for each key on disk, the file and the bytes of its tensor. Tied parameters are
    written, under the name of the embeddings, only when `owns_tied`; exactly one of the stages
    that hold them should. Writes no file when that leaves nothing. Memory: one tensor, or one
    pipeline layer where its weights are stored in another form or adapters are merged into them.
    """
    layers = _layers_of(stage, owns_tied)
    empty = {name: w.tensor.to("meta") for own in layers for name, w in own.items()}
    table = _as_stored(stage, empty)
    if not table:
        return {}
    folder.mkdir(parents=True, exist_ok=True)
    temporary = folder / f".{file_name}.{os.getpid()}"
    try:
        with _Writer(temporary, table) as writer:
            for own in layers:
                writer.write(_as_stored(stage, {name: w.whole() for name, w in own.items()}))
        temporary.chmod(0o644)
        temporary.replace(folder / file_name)
    finally:
        temporary.unlink(missing_ok=True)
    return {key: (file_name, tensor.nbytes) for key, tensor in table.items()}


def _layers_of(stage: CausalLMStage, owns_tied: bool) -> list[_Layer]:
    """The own layers' tensors; tied ones, and buffers beside the layers, go with layer 0."""
    structure = stage.structure
    dropped = {target for target, _ in structure.ties}
    dropped.update(stage.model._keys_to_ignore_on_save or ())
    if not owns_tied:
        dropped |= structure.tied_sources
    adapters = dict(lora_layers(stage.model)) if has_adapters(stage.model) else {}
    found: dict[int, _Layer] = {}
    for own_name, tensor in stage.model.state_dict().items():
        if is_adapter(own_name):
            continue
        name = own_name.replace(".base_layer.", ".")
        layer = structure.find_layer(name) or 0
        local = stage.start <= layer < stage.stop or name in structure.tied_sources
        if local and name not in dropped:
            adapter = adapters.get(name.removesuffix(".weight"))
            found.setdefault(layer, {})[name] = _Weight(tensor, adapter)
    return [found[layer] for layer in sorted(found)]


def _as_stored(stage: CausalLMStage, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Tensors under the names and in the form on disk, undoing what loading does to them."""
    return dict(revert_weight_conversion(stage.model, tensors))


class _Writer:
    """A safetensors file of the tensors whose shapes `table` tells, written in any order."""

    def __init__(self, path: Path, table: Mapping[str, Tensor]) -> None:
        sizes = [tensor.nbytes for tensor in table.values()]
        self._missing = dict(zip(table, consecutive(sizes), strict=True))
        header = header_of(
            {
                name: entry_of(tensor.dtype, tuple(tensor.shape), self._missing[name])
                for name, tensor in table.items()
            }
        )
        self._data_start = len(header)
        self._file = path.open("wb", buffering=0)
        write_all(self._file, memoryview(header))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._file.close()
        assert kind or not self._missing, f"{list(self._missing)} are in no layer"

    def write(self, tensors: Mapping[str, Tensor]) -> None:
        """Put tensors in their places."""
        for name, tensor in tensors.items():
            span = self._missing.pop(name)
            own = tensor.detach().cpu().contiguous()
            assert own.nbytes == span.size, f"{name} is of another size than was told"
            self._file.seek(self._data_start + span.start)
            write_all(self._file, bytes_of(own))
