"""The manifest of a checkpoint: what was saved, and which bytes of which file hold each range."""

import json
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, ValidationError

from zorse_ds.core.strict import StrictModel, problems_of
from zorse_ds.errors import CheckpointError
from zorse_ds.files import parse_json
from zorse_ds.ranges import Range

VALUE = "value"
"""Kind of a parameter's elements, in the precision of the master."""
BUFFER = "buffer"
"""Kind of a tensor that is saved with the model but not trained."""
STATE = "state"
"""Kind of tensors and bytes that belong to no parameter."""
OPTIMIZER_PREFIX = "optimizer."
"""Kinds of an optimizer's tensors: `optimizer.exp_avg` and so on."""

Shape = Annotated[
    tuple[Annotated[int, Field(ge=0)], ...],
    BeforeValidator(lambda value: tuple(value) if isinstance(value, list) else value),
]


class Piece(StrictModel):
    """A range of one flattened tensor and the bytes that hold it."""

    name: str
    kind: str
    start: int = Field(ge=0)
    stop: int = Field(ge=0)
    dtype: str
    """As torch names it, without `torch.`."""
    offset: int = Field(ge=0)
    """Of the first byte, from the start of the file."""
    num_bytes: int = Field(ge=0)
    checksum: str

    @property
    def window(self) -> Range:
        """The elements it holds."""
        return Range(self.start, self.stop)


class DataFile(StrictModel):
    """One safetensors file: a header that others read, then the pieces without gaps."""

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]*$")
    num_bytes: int = Field(ge=0)
    header_bytes: int = Field(ge=0)
    header_checksum: str
    pieces: Annotated[
        tuple[Piece, ...],
        BeforeValidator(lambda value: tuple(value) if isinstance(value, list) else value),
    ]


class Manifest(StrictModel):
    """Everything about a checkpoint but the tensors themselves."""

    format: Literal["zorse-checkpoint"] = "zorse-checkpoint"
    version: Literal[1] = 1
    tag: str
    plan: dict[str, Any]
    versions: dict[str, str]
    """Of the programs that wrote it, for people."""
    shapes: dict[str, Shape]
    """Of every parameter, buffer and other tensor."""
    parameters: dict[str, dict[str, Any]]
    """Parameter → what its optimizer keeps beside tensors, as `plain.encode` gives it."""
    frozen_left_out: bool = False
    """Parameters that are not trained were not saved, by request."""
    state: Any
    """Counters, schedules and data position, as `plain.encode` gives it."""
    files: Annotated[
        tuple[DataFile, ...],
        BeforeValidator(lambda value: tuple(value) if isinstance(value, list) else value),
    ]

    def to_json(self) -> str:
        """The text of the file; `from_json` reads it."""
        return json.dumps(self.model_dump(mode="json"), separators=(",", ":")) + "\n"

    @classmethod
    def from_json(cls, text: str, where: str) -> "Manifest":
        """Parse a manifest. Raises `CheckpointError` that names `where` and each problem."""
        data = parse_json(text, where, CheckpointError)
        try:
            return cls.model_validate(data)
        except ValidationError as error:
            problems = problems_of(error, cls)
            raise CheckpointError("\n".join(f"{where}: {each}" for each in problems)) from None

    def optimizer_kinds(self) -> set[str]:
        """All kinds of optimizer tensors that any parameter has."""
        kinds = {piece.kind for file in self.files for piece in file.pieces}
        return {kind for kind in kinds if kind.startswith(OPTIMIZER_PREFIX)}
