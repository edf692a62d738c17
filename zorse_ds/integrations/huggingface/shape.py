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


def model_shape(source: str | Path | PretrainedConfig) -> ModelShape:
    """The shape of the model in a checkpoint's folder, with weights or without.

    `source` may be a transformers configuration too. Blocks with the same parameters and the same
    kind of attention are one kind. Raises `ModelError` when there is no configuration, or its
    model is not understood.
    """
    return describe_model(source).shape


def describe_model(source: str | Path | PretrainedConfig) -> DescribedModel:
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
    return DescribedModel(_shape(name, text_config, structure, shapes), structure, text_config)


def _shapes_of(model: PreTrainedModel) -> Shapes:
    return {
        name: tuple(parameter.shape)
        for name, parameter in model.named_parameters(remove_duplicate=False)
    }


def _shape(
    name: str, config: PretrainedConfig, structure: ModelStructure, shapes: Shapes
) -> ModelShape:
    by_layer: list[dict[str, tuple[int, ...]]] = [{} for _ in range(structure.num_layers)]
    for parameter, shape in shapes.items():
        by_layer[structure.layer_of(parameter)][parameter] = shape
    blocks = [
        {name.removeprefix(f"{structure.blocks_path}.{i}."): shape for name, shape in each.items()}
        for i, each in enumerate(by_layer[1:-1])
    ]
    kinds, names = _block_kinds(config, blocks)
    ends = {
        "embedding": _end("embedding", config, by_layer[0]),
        "head": _end("head", config, by_layer[-1]),
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


def _block_kinds(
    config: PretrainedConfig, blocks: list[dict[str, tuple[int, ...]]]
) -> tuple[dict[str, LayerShape], list[str]]:
    """The kinds of blocks by name, and each block's kind."""
    signs = [(layer_type(config, i), tuple(sorted(each.items()))) for i, each in enumerate(blocks)]
    first = {sign: signs.index(sign) for sign in dict.fromkeys(signs)}
    names = _names([(sign[0], blocks[index]) for sign, index in first.items()])
    of_sign = dict(zip(first, names, strict=True))
    kinds = {of_sign[sign]: block_shape(config, blocks[index]) for sign, index in first.items()}
    return kinds, [of_sign[sign] for sign in signs]


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
