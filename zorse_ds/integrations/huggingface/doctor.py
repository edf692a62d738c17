"""What `zorse doctor` tells of a model: how it is cut, and what to know before training it."""

from collections import Counter
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from transformers import PretrainedConfig

from zorse_ds.core.model import ModelShape
from zorse_ds.core.plan import Plan
from zorse_ds.integrations.huggingface.block_shape import layer_type
from zorse_ds.integrations.huggingface.shape import DescribedModel, describe_model
from zorse_ds.integrations.huggingface.stage import INPUT_NAMES

NUM_SAMPLES = 4
"""Global batch of the example plan, in micro-batches of one sample."""


@dataclass(frozen=True)
class Layer:
    """One pipeline layer as a person sees it."""

    index: int
    name: str
    """Path of its module, several joined by `+`."""
    kind: str
    num_params: int


@dataclass(frozen=True)
class Boundary:
    """A tensor that travels from stage to stage for each micro-batch."""

    name: str
    shape: str
    """`b` samples of `t` tokens."""
    is_optional: bool
    """Whether it travels only when the samples have it."""


@dataclass(frozen=True)
class Diagnosis:
    """What the configuration of an understood model says."""

    architecture: str
    layers: tuple[Layer, ...]
    tied: tuple[str, ...]
    """Each a sentence part: the parameter, and the layers that share it."""
    boundary: tuple[Boundary, ...]
    notes: tuple[str, ...]
    shape: ModelShape
    plan: Plan
    """A valid one for two equal ranks."""


def diagnose(folder: str | Path) -> Diagnosis:
    """Read and probe the configuration in `folder`; weights are neither needed nor read.

    Raises `ModelError` when there is none, or with the reason why the model cannot be cut.
    """
    model = describe_model(folder)
    shape, structure = model.shape, model.structure
    rows = zip(structure.layer_names, shape.layers, shape.shapes, strict=True)
    last = structure.num_layers - 1
    return Diagnosis(
        architecture=structure.model_class.__name__,
        layers=tuple(Layer(i, name, kind, s.num_params) for i, (name, kind, s) in enumerate(rows)),
        tied=tuple(
            f"{target} is {source}: layers {last} and 0" for target, source in structure.ties
        ),
        boundary=_boundary(model),
        notes=tuple(_notes(model)),
        shape=shape,
        plan=example_plan(shape),
    )


def example_plan(shape: ModelShape) -> Plan:
    """A plan for two equal ranks, cut where parameters are as even as whole layers allow."""
    sizes = [each.num_params for each in shape.shapes]
    whole = sum(sizes)
    cut = min(range(1, len(sizes)), key=lambda stop: abs(2 * sum(sizes[:stop]) - whole))
    edges = pairwise((0, cut, len(sizes)))
    names = ("first", "second")
    return Plan.from_dict(
        {
            "version": 1,
            "global_batch_size": NUM_SAMPLES,
            "schedule": "1f1b",
            "groups": [
                {"name": name, "gpus": [{"rank": rank, "micro_batches": [1] * NUM_SAMPLES}]}
                for rank, name in enumerate(names)
            ],
            "stages": [
                {"group": name, "layers": list(edge)}
                for name, edge in zip(names, edges, strict=True)
            ],
        }
    )


def _boundary(model: DescribedModel) -> tuple[Boundary, ...]:
    loss = model.structure.router_loss
    optional = [name for name in INPUT_NAMES if name in model.structure.accepted_inputs]
    return (
        Boundary("hidden state", f"(b, t, {model.shape.hidden})", is_optional=False),
        *(Boundary(name, "(b, t)", is_optional=True) for name in optional),
        *(() if loss is None else (Boundary("router sums", f"(b, 1, {loss.width})", False),)),
    )


def _notes(model: DescribedModel) -> list[str]:
    found = (_attention(model), _experts(model), _dtype(model.config), _dropout(model.config))
    return [*(note for note in found if note), *_missing_inputs(model)]


def _attention(model: DescribedModel) -> str:
    counts = Counter(
        layer_type(model.config, i).replace("_", " ") for i in range(model.structure.num_blocks)
    )
    window = getattr(model.config, "sliding_window", None)
    told = ", ".join(f"{kind} in {count} blocks" for kind, count in counts.items())
    if any(shape.heads for shape in model.shape.shapes):
        width = f"; the window is {window} tokens" if "sliding attention" in counts else ""
        return f"{told}{width}"
    return "no block has attention that grows with the square of the length"


def _experts(model: DescribedModel) -> str | None:
    blocks = [shape for shape in model.shape.shapes if shape.active_params is not None]
    if not blocks:
        return None
    share = sum(shape.used_params for shape in blocks) / sum(shape.num_params for shape in blocks)
    return (
        f"mixture of experts in {len(blocks)} blocks: a token uses {100 * share:.0f}% of their "
        "parameters, all of which are held and have optimizer state"
    )


def _dtype(config: PretrainedConfig) -> str | None:
    dtype = getattr(config, "dtype", None)
    if dtype is None:
        return None
    name = str(dtype).removeprefix("torch.")
    return f"weights were saved in {name}; from_pretrained holds them in the dtype it is given"


def _dropout(config: PretrainedConfig) -> str | None:
    rates = {
        name: value
        for name, value in sorted(config.to_dict().items())
        if ("dropout" in name or "pdrop" in name)
        and isinstance(value, float)
        and value > 0
        # Of heads that a causal language model does not have.
        and not name.startswith(("summary_", "classifier_"))
    }
    if not rates:
        return None
    told = ", ".join(f"{name} {rate:g}" for name, rate in rates.items())
    return f"dropout is on ({told}): each rank draws its own, so runs of other plans differ by it"


def _missing_inputs(model: DescribedModel) -> list[str]:
    return [
        f"its forward takes no {name}; samples must come without it"
        for name in INPUT_NAMES[1:]
        if name not in model.structure.accepted_inputs
    ]
