"""The shape of a Hugging Face model for planning: exact parameters of each pipeline layer.

From the configuration alone: the model is built on the meta device and probed as it is before
training, so a model that cannot be cut is refused here already.
"""

import math
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from transformers import PretrainedConfig, PreTrainedModel

from zorse_ds.core.model import LayerShape, ModelShape
from zorse_ds.integrations.huggingface.adapters import AdapterSource, find_targets, read_adapters
from zorse_ds.integrations.huggingface.block_shape import (
    Shapes,
    block_shape,
    has_experts,
    layer_type,
)
from zorse_ds.integrations.huggingface.loading import build_on_meta, config_in
from zorse_ds.integrations.huggingface.probe import probe
from zorse_ds.integrations.huggingface.structure import ModelStructure


@dataclass(frozen=True)
class DescribedModel:
    """What a configuration says of a model: `shape` for planning, `structure` for cutting it."""

    shape: ModelShape
    structure: ModelStructure
    config: PretrainedConfig
    """Of the language model."""


def model_shape(
    source: str | Path | PretrainedConfig, adapters: AdapterSource | None = None
) -> ModelShape:
    """The shape of the model in a checkpoint's folder, with weights or without.

    `source` may be a transformers configuration too. Blocks with the same parameters and the same
    kind of attention are one kind. With `adapters`, which `read_adapters` takes, these alone are
    trained. Raises `ModelError` when there is no configuration, or its
    model is not understood.
    """
    return describe_model(source, adapters).shape


def describe_model(
    source: str | Path | PretrainedConfig, adapters: AdapterSource | None = None
) -> DescribedModel:
    """The shape together with how the model is cut. Raises `ModelError` as `model_shape` does."""
    if isinstance(source, PretrainedConfig):
        config, name, where = source, source.model_type, f"the {type(source).__name__} given"
    else:
        folder = Path(source)
        config, name, where = config_in(folder), folder.resolve().name, f"{folder}/config.json"
    model = build_on_meta(config, where, None)
    shapes = _shapes_of(model)
    # The given one, since building on the meta device sets a dtype of its own.
    text_config = config.get_text_config(decoder=True)
    structure = probe(model)
    trained: list[int] | None = None
    if adapters is not None:
        found = find_targets(build_on_meta(config, where, None), read_adapters(adapters))
        trained = found.sizes_by_layer(structure)
    shape = _shape(name, text_config, structure, shapes, trained)
    return DescribedModel(shape, structure, text_config)


def _shapes_of(model: PreTrainedModel) -> Shapes:
    return {
        name: tuple(parameter.shape)
        for name, parameter in model.named_parameters(remove_duplicate=False)
    }


def _shape(
    name: str,
    config: PretrainedConfig,
    structure: ModelStructure,
    shapes: Shapes,
    trained: list[int] | None,
) -> ModelShape:
    by_layer: list[dict[str, tuple[int, ...]]] = [{} for _ in range(structure.num_layers)]
    for parameter, shape in shapes.items():
        by_layer[structure.layer_of(parameter)][parameter] = shape
    blocks = [
        {name.removeprefix(f"{structure.blocks_path}.{i}."): shape for name, shape in each.items()}
        for i, each in enumerate(by_layer[1:-1])
    ]
    kinds, names = _block_kinds(config, blocks, None if trained is None else trained[1:-1])
    ends = {
        "embedding": _with_trained(_end("embedding", config, by_layer[0]), trained, 0),
        "head": _with_trained(_end("head", config, by_layer[-1]), trained, -1),
    }
    tied = _count({source: shapes[source] for source in structure.tied_sources})
    return ModelShape(
        name=name,
        kinds={"embedding": ends["embedding"], **kinds, "head": ends["head"]},
        layers=("embedding", *names, "head"),
        tied=bool(structure.ties),
        tied_params=tied if structure.ties else None,
    )


def _end(role: str, config: PretrainedConfig, shapes: Shapes) -> LayerShape:
    return LayerShape(
        role="embedding" if role == "embedding" else "head",
        hidden=int(config.hidden_size),
        num_params=_count(shapes),
        vocab=int(config.vocab_size),
    )


def _count(shapes: Shapes) -> int:
    return sum(math.prod(shape) for shape in shapes.values())


def _with_trained(shape: LayerShape, trained: list[int] | None, layer: int) -> LayerShape:
    """The layer with its adapter, which alone is trained."""
    if trained is None:
        return shape
    own = trained[layer]
    sizes = {"num_params": shape.num_params + own, "trainable_params": own}
    if shape.active_params is not None:
        sizes["active_params"] = shape.active_params + own
    return shape.model_copy(update=sizes)


def _block_kinds(
    config: PretrainedConfig,
    blocks: list[dict[str, tuple[int, ...]]],
    trained: list[int] | None,
) -> tuple[dict[str, LayerShape], list[str]]:
    """The kinds of blocks by name, and each block's kind."""
    signs = [
        (layer_type(config, i), tuple(sorted(each.items())), trained[i] if trained else 0)
        for i, each in enumerate(blocks)
    ]
    first = {sign: signs.index(sign) for sign in dict.fromkeys(signs)}
    names = _names([(sign[0], blocks[index]) for sign, index in first.items()])
    of_sign = dict(zip(first, names, strict=True))
    kinds = {
        of_sign[sign]: _with_trained(
            block_shape(_config_of_block(config, index), blocks[index]), trained, index
        )
        for sign, index in first.items()
    }
    return kinds, [of_sign[sign] for sign in signs]


def _config_of_block(config: PretrainedConfig, index: int) -> PretrainedConfig:
    """The configuration of one block, for some families let blocks differ."""
    views = getattr(config, "per_layer_config", None)
    return config if not views else views[index]


def _names(kinds: list[tuple[str, Shapes]]) -> list[str]:
    """A name for each kind: `block` with what tells it from the others, and else a number."""
    attention = [kind.removesuffix("_attention") for kind, _ in kinds]
    experts = ["moe" if has_experts(shapes) else "dense" for _, shapes in kinds]
    told = [words for words in (attention, experts) if len(set(words)) > 1]
    names = ["_".join(("block", *(words[i] for words in told))) for i in range(len(kinds))]
    seen: Counter[str] = Counter()
    numbered = []
    for name in names:
        seen[name] += 1
        numbered.append(name if seen[name] == 1 else f"{name}_{seen[name]}")
    return numbered
