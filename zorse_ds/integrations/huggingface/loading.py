"""Reading a Hugging Face folder: configuration, model class, and the weights of one stage.

Nothing here talks to a hub. A stage reads its own tensors only: its class is the model's own class
that prunes itself once built on the meta device, and that class' `from_pretrained` then finds,
renames and converts what is left, as it would for the whole model.
"""

import copy
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.initialization import no_tie_weights
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from zorse_ds.errors import ModelError
from zorse_ds.files import read_json
from zorse_ds.integrations.huggingface.initialise import initialise
from zorse_ds.integrations.huggingface.prune import prune
from zorse_ds.integrations.huggingface.stored_weights import stored_weights
from zorse_ds.integrations.huggingface.structure import ModelStructure
from zorse_ds.integrations.huggingface.weight_files import weight_format


def read_config(folder: Path) -> PretrainedConfig:
    """The configuration in a folder; ModelError when the folder is not a known model with weights.

    Looks at names only; no weight is read.
    """
    config = config_in(folder)
    weight_format(folder)
    return config


def config_in(folder: Path) -> PretrainedConfig:
    """The configuration in a folder, with weights or without; ModelError when it is not known."""
    if not folder.is_dir():
        found = "is a file" if folder.is_file() else "is not a folder"
        raise ModelError(
            f"{folder} {found}; expected the folder of a Hugging Face checkpoint on this machine"
        )
    path = folder / "config.json"
    model_type = read_json(path, ModelError).get("model_type")
    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except (ValueError, KeyError, OSError, TypeError) as problem:
        raise ModelError(
            f"{path}: model_type is {model_type!r}, which transformers {transformers.__version__} "
            f"does not read ({_first_line(problem)}); expected a causal language model it knows"
        ) from problem
    return config


def build_on_meta(
    config: PretrainedConfig, where: str, attn_implementation: str | None
) -> PreTrainedModel:
    """The whole causal language model of a configuration, without memory for its weights."""
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise ModelError(
            f"{where}: model_type is {config.model_type!r}, which has no causal language model in "
            f"transformers {transformers.__version__}; expected one that has"
        )
    if getattr(config, "quantization_config", None):
        raise ModelError(
            f"{where}: quantization_config is set; expected weights in a floating-point type"
        )
    try:
        with torch.device("meta"):
            model: PreTrainedModel = AutoModelForCausalLM.from_config(
                copy.deepcopy(config),
                dtype=torch.float32,
                trust_remote_code=False,
                **_attention(attn_implementation),
            )
    except Exception as problem:  # any mistake in a config shows up somewhere in the model's code
        raise ModelError(
            f"{where}: no model can be built of this configuration ({_first_line(problem)}); "
            "expected one that AutoModelForCausalLM.from_config takes"
        ) from problem
    if type(model.config) is not type(config):
        raise ModelError(
            f"{where} describes a model of several kinds of input ({type(config).__name__}); "
            "expected the configuration of its language model alone"
        )
    return model


def load_stage_model(
    folder: Path,
    config: PretrainedConfig,
    structure: ModelStructure,
    layers: tuple[int, int],
    *,
    dtype: torch.dtype,
    attn_implementation: str | None,
) -> PreTrainedModel:
    """Layers [start, stop) with their weights from `folder`, on the CPU, in evaluation mode.

    Memory: the layers' own, and one tensor. Raises ModelError when a parameter of theirs is not in
    the folder or has another shape, or a file is damaged.
    """
    model_class = _pruning_class(structure, *layers)
    weights = stored_weights(folder)
    try:
        with _one_at_a_time():
            model, info = model_class.from_pretrained(
                None,
                state_dict=weights,
                config=copy.deepcopy(config),
                dtype=dtype,
                output_loading_info=True,
                **_attention(attn_implementation),
            )
    except ModelError:
        raise
    except Exception as problem:  # files may be damaged in any way, and fail in any code
        raise ModelError(
            f"{folder}: layers {list(layers)} cannot be loaded ({_first_line(problem)}); expected "
            f"weights that fit {structure.model_class.__name__} and config.json"
        ) from problem
    missing = _missing_keys(model, structure, info)
    if missing:
        raise ModelError(
            f"{folder} lacks {', '.join(missing)}; expected every parameter of "
            f"{structure.model_class.__name__} in its weights"
        )
    _check_ties(model, structure, layers, str(folder))
    for tensor in [*model.parameters(), *model.buffers()]:
        # What was cut out of a larger tensor may lie at an address that is not aligned: CPU kernels
        # then round differently, and results would depend on how weights are stored.
        if tensor.untyped_storage().nbytes() > tensor.nbytes:
            tensor.data = tensor.data.clone()
    return model


def create_stage_model(
    config: PretrainedConfig,
    structure: ModelStructure,
    layers: tuple[int, int],
    *,
    dtype: torch.dtype,
    attn_implementation: str | None,
    seed: int,
) -> PreTrainedModel:
    """Layers [start, stop) with random weights, on the CPU.

    Raises ModelError when the model's initialisation needs layers that are not there.
    """
    model_class = _pruning_class(structure, *layers)
    try:
        with torch.device("meta"), no_tie_weights():
            model: PreTrainedModel = model_class._from_config(
                copy.deepcopy(config), dtype=dtype, **_attention(attn_implementation)
            )
        initialise(model, structure, *layers, seed)
    except AttributeError as problem:  # some models initialise blocks from outside, by name
        raise ModelError(
            f"layers {list(layers)} of {structure.model_class.__name__} cannot be initialised on "
            f"their own ({_first_line(problem)}); expected a model that does so module by module"
        ) from problem
    return model


def _pruning_class(structure: ModelStructure, start: int, stop: int) -> type[PreTrainedModel]:
    """A subclass of the model's class whose instances hold layers [start, stop) only."""
    base = structure.model_class

    class PrunedModel(base):  # type: ignore[valid-type, misc]
        # Weights of other stages are in the files; what is missing is checked instead.
        _keys_to_ignore_on_load_unexpected = (r".*",)

        def __init__(self, config: PretrainedConfig, *args: Any, **kwargs: Any) -> None:
            super().__init__(config, *args, **kwargs)
            prune(self, structure, start, stop)
            _report_all_missing(self)

    # transformers looks up key renames by class name, and only for classes of its own modules.
    PrunedModel.__name__ = base.__name__
    PrunedModel.__qualname__ = base.__qualname__
    PrunedModel.__module__ = base.__module__
    return PrunedModel


@contextmanager
def _one_at_a_time() -> Iterator[None]:
    """Have transformers read one tensor after the other, not all ahead in several threads."""
    name = "HF_DEACTIVATE_ASYNC_LOAD"
    before = os.environ.get(name)
    os.environ[name] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


def _report_all_missing(model: PreTrainedModel) -> None:
    """Have from_pretrained name every missing tensor, and remember which it would pass over."""
    model.ignored_when_missing = model._keys_to_ignore_on_load_missing
    model._keys_to_ignore_on_load_missing = set()


def _missing_keys(
    model: PreTrainedModel, structure: ModelStructure, info: dict[str, Any]
) -> list[str]:
    """Tensors that got no value from the files, buffers that the model can make up excepted."""
    parameters = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    optional = [re.compile(pattern) for pattern in model.ignored_when_missing]
    missing = {
        name
        for name in info["missing_keys"]
        if name in parameters or not any(pattern.search(name) for pattern in optional)
    }
    tensors = [*model.named_parameters(remove_duplicate=False), *model.named_buffers()]
    missing.update(name for name, tensor in tensors if tensor.is_meta)
    missing.update(key[0] for key in info["mismatched_keys"])
    return sorted({structure.global_name(name) for name in missing})


def _check_ties(
    model: PreTrainedModel, structure: ModelStructure, layers: tuple[int, int], where: str
) -> None:
    """ModelError when a head that the configuration ties has weights of its own in the files."""
    if layers[1] < structure.num_layers:
        return
    for target, source in structure.ties:
        if model.get_parameter(target) is not model.get_parameter(source):
            raise ModelError(
                f"{where} holds a {target} that differs from {source}; expected "
                "tie_word_embeddings to be false in config.json, or the two to be equal"
            )


def _attention(attn_implementation: str | None) -> dict[str, str]:
    """Keyword arguments that choose an attention implementation, none for the default."""
    return {} if attn_implementation is None else {"attn_implementation": attn_implementation}


def _first_line(problem: Exception) -> str:
    """The first line of an exception's message: some of transformers' are pages long."""
    return (str(problem).strip() or type(problem).__name__).splitlines()[0]
