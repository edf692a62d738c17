"""Measured seconds and bytes of a model's layers; written by `zorse profile`, or by hand."""

import json
from pathlib import Path
from typing import Annotated, Any

from pydantic import BeforeValidator, Field, ValidationError

from zorse_ds.core.model import ModelShape
from zorse_ds.core.plan import Dtype
from zorse_ds.core.strict import StrictModel, problems_of
from zorse_ds.errors import ProfileError
from zorse_ds.files import read_json, write_text


def _as_tuple(value: object) -> object:
    return tuple(value) if isinstance(value, list) else value


Seconds = Annotated[tuple[Annotated[float, Field(gt=0)], ...], BeforeValidator(_as_tuple)]


class LayerTimes(StrictModel):
    """Seconds of one layer kind on one GPU type, against the micro-batch size."""

    gpu_type: str
    kind: str
    """A kind of the model's `ModelShape`."""
    dtype: Dtype
    seq_len: int = Field(ge=1)
    micro_batches: Annotated[tuple[Annotated[int, Field(ge=1)], ...], BeforeValidator(_as_tuple)]
    """Ascending; between two of them times are interpolated, beyond the last extrapolated."""
    forward_s: Seconds
    backward_s: Seconds
    """Without recompute."""


class LayerBytes(StrictModel):
    """Bytes of one layer kind per sample at one length (linear in the micro-batch size)."""

    kind: str
    dtype: Dtype
    seq_len: int = Field(ge=1)
    saved_bytes: int = Field(ge=0)
    """Activations that wait for backward, per sample, without recompute."""
    boundary_bytes: int = Field(ge=0)
    """What leaves the layer, per sample."""
    workspace_bytes: int = Field(ge=0)
    """Temporaries at the layer's peak beyond what is saved, per sample."""


class OptimizerTimes(StrictModel):
    """Seconds of the optimizer per parameter on one GPU type."""

    gpu_type: str
    step_s_per_param: float = Field(gt=0)


class Profile(StrictModel):
    """What was measured for one model. Raises `ProfileError` on malformed input."""

    model: ModelShape
    times: Annotated[tuple[LayerTimes, ...], BeforeValidator(_as_tuple)] = ()
    bytes: Annotated[tuple[LayerBytes, ...], BeforeValidator(_as_tuple)] = ()
    optimizer: Annotated[tuple[OptimizerTimes, ...], BeforeValidator(_as_tuple)] = ()
    versions: dict[str, str] = Field(default_factory=dict)
    """Of the libraries that ran."""

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> "Profile":
        """Validate plain data. Raises `ProfileError` that tells all problems."""
        try:
            profile = cls.model_validate(data)
        except ValidationError as error:
            raise ProfileError("\n".join(problems_of(error, cls))) from None
        problems = [problem for i, each in enumerate(profile.times) for problem in _faults(i, each)]
        if problems:
            raise ProfileError("\n".join(problems))
        return profile

    @classmethod
    def load(cls, path: str | Path) -> "Profile":
        """Read a profile. Raises `ProfileError`, each sentence with the path."""
        data = read_json(path, ProfileError)
        try:
            return cls.from_dict(data)
        except ProfileError as error:
            lines = str(error).splitlines()
            raise ProfileError("\n".join(f"{path}: {line}" for line in lines)) from None

    def save(self, path: str | Path) -> None:
        """Write the profile as JSON, atomically."""
        text = json.dumps(self.model_dump(mode="json", exclude_defaults=True), indent=1)
        write_text(path, text + "\n")


def _faults(index: int, times: LayerTimes) -> list[str]:
    sizes = times.micro_batches
    if not sizes or list(sizes) != sorted(set(sizes)):
        return [f"times[{index}].micro_batches is {list(sizes)}; expected ascending sizes"]
    return [
        f"times[{index}].{name} has {len(seconds)} figures; expected {len(sizes)}, one a size"
        for name, seconds in (("forward_s", times.forward_s), ("backward_s", times.backward_s))
        if len(seconds) != len(sizes)
    ]
