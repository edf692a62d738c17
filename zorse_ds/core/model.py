"""The shape of a model, as far as time and memory depend on it: sizes of its pipeline layers."""

import json
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, ValidationError

from zorse_ds.core.strict import StrictModel, problems_of
from zorse_ds.errors import ModelError
from zorse_ds.files import read_json, write_text

Role = Literal["embedding", "block", "head"]


class LayerShape(StrictModel):
    """One kind of pipeline layer."""

    role: Role
    hidden: int = Field(ge=1)
    num_params: int = Field(ge=0)
    """All parameters the layer holds."""
    active_params: int | None = None
    """Those a token uses (mixture of experts); default: all."""
    trainable_params: Annotated[int, Field(ge=0)] | None = None
    """Those that are trained (of adapters, say), the others being frozen; default: all."""
    ffn: int = 0
    """Inner width of the feed-forward part; of the active experts together."""
    heads: int = 0
    kv_heads: int = 0
    head_dim: int = 0
    num_ffn_matrices: Literal[2, 3] = 3
    """3 with a gate (Llama), 2 without (GPT)."""
    vocab: int = 0
    """Of the embedding and the head."""

    @property
    def used_params(self) -> int:
        """Parameters that a token meets."""
        return self.num_params if self.active_params is None else self.active_params

    @property
    def trained_params(self) -> int:
        """Parameters that have gradients and optimizer state."""
        return self.num_params if self.trainable_params is None else self.trainable_params

    def forward_flops(self, seq_len: int) -> float:
        """Of one sample: `2·P·S` for the matrices and `4·S²·h` for attention (design, facts)."""
        if self.role == "embedding":
            return 0.0
        attention = 4.0 * seq_len**2 * self.heads * self.head_dim if self.role == "block" else 0.0
        return 2.0 * self.used_params * seq_len + attention


def llama_block(hidden: int, ffn: int, heads: int, kv_heads: int | None = None) -> LayerShape:
    """A decoder block with gated feed-forward, RMS norms and no biases."""
    kv_heads = kv_heads or heads
    head_dim = hidden // heads
    attention = 2 * hidden * heads * head_dim + 2 * hidden * kv_heads * head_dim
    return LayerShape(
        role="block",
        hidden=hidden,
        num_params=attention + 3 * hidden * ffn + 2 * hidden,
        ffn=ffn,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
    )


def _as_tuple(value: object) -> object:
    return tuple(value) if isinstance(value, list) else value


class ModelShape(StrictModel):
    """A model as pipeline layers: embedding, blocks, final norm with head."""

    name: str
    kinds: dict[str, LayerShape]
    layers: Annotated[tuple[str, ...], BeforeValidator(_as_tuple)]
    """The kind of each pipeline layer."""
    tied: bool = False
    """The head's matrix is the embedding's: counted in both, held twice in a pipeline."""
    tied_params: Annotated[int, Field(ge=0)] | None = None
    """How many parameters both have, where tied; default: all of the embedding layer."""

    @classmethod
    def llama(
        cls, name: str, blocks: int, hidden: int, ffn: int, heads: int, *,
        kv_heads: int | None = None, vocab: int = 32000, tied: bool = False,
    ) -> "ModelShape":  # fmt: skip
        """A model of equal Llama blocks."""
        kinds = {
            "embedding": LayerShape(
                role="embedding", hidden=hidden, num_params=vocab * hidden, vocab=vocab
            ),
            "block": llama_block(hidden, ffn, heads, kv_heads),
            "head": LayerShape(
                role="head", hidden=hidden, num_params=vocab * hidden + hidden, vocab=vocab
            ),
        }
        return cls(
            name=name, kinds=kinds, layers=("embedding", *["block"] * blocks, "head"), tied=tied
        )

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> "ModelShape":
        """Validate plain data. Raises `ModelError`."""
        try:
            shape = cls.model_validate(data)
        except ValidationError as error:
            raise ModelError("\n".join(problems_of(error, cls))) from None
        unknown = [kind for kind in shape.layers if kind not in shape.kinds]
        if unknown or not shape.layers:
            found = repr(unknown[0]) if unknown else "empty"
            raise ModelError(f"layers is or holds {found}; expected names of kinds")
        return shape

    @classmethod
    def load(cls, path: str | Path) -> "ModelShape":
        """Read a shape file. Raises `ModelError`."""
        return cls.from_dict(read_json(path, ModelError))

    def save(self, path: str | Path) -> None:
        """Write the shape as JSON, atomically."""
        write_text(path, json.dumps(self.model_dump(mode="json", exclude_defaults=True)) + "\n")

    @property
    def num_layers(self) -> int:
        """How many pipeline layers there are."""
        return len(self.layers)

    @cached_property
    def shapes(self) -> tuple[LayerShape, ...]:
        """The shape of each pipeline layer."""
        return tuple(self.kinds[kind] for kind in self.layers)

    @property
    def hidden(self) -> int:
        """Width of what travels between layers."""
        return self.shapes[0].hidden

    @property
    def num_params(self) -> int:
        """Parameters of the whole model, a tied matrix once."""
        whole = sum(shape.num_params for shape in self.shapes)
        both = self.shapes[0].num_params if self.tied_params is None else self.tied_params
        return whole - both if self.tied else whole

    @property
    def tied_layers(self) -> tuple[tuple[int, ...], ...]:
        """What `compile_trace` takes: for each set of shared parameters, its layers."""
        return ((0, self.num_layers - 1),) if self.tied else ()
