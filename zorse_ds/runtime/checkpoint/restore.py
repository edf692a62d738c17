"""From a checkpoint, written under any plan, to what this rank holds under its own."""

from collections.abc import Iterator, Mapping
from collections.abc import Set as AbstractSet
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from zorse_ds.core.checkpoint.manifest import BUFFER, OPTIMIZER_PREFIX, VALUE, Manifest
from zorse_ds.core.checkpoint.plain import decode
from zorse_ds.errors import CheckpointError
from zorse_ds.runtime.bucket import Bucket
from zorse_ds.runtime.checkpoint.capture import tensor_of
from zorse_ds.runtime.checkpoint.files import CheckpointReader
from zorse_ds.runtime.checkpoint.holdings import (
    Place,
    RankState,
    buffers_of,
    holdings_of,
    places_in,
)

_SHOWN = 3


def model_problems(
    manifest: Manifest,
    own: Mapping[str, tuple[int, ...]],
    frozen: AbstractSet[str],
    where: str,
    strict: bool,
) -> list[str]:
    """What tells the model in a checkpoint from one with parameters `own` (name → shape).

    `frozen`: those of `own` that are not trained, which a checkpoint may leave out. Unless
    `strict`, only shapes are compared.
    """
    optional = frozen if manifest.frozen_left_out else set()
    missing = [name for name in own if name not in manifest.parameters and name not in optional]
    unknown = [name for name in manifest.parameters if name not in own]
    problems = []
    if missing and strict:
        problems.append(f"{where} lacks {_listed(missing)}, which the model has")
    if unknown and strict:
        problems.append(f"{where} holds {_listed(unknown)}, which the model lacks")
    for name, shape in own.items():
        saved = manifest.shapes.get(name, shape)
        if saved != shape:
            found = f"{name} has shape {list(saved)} in {where}, but {list(shape)} in the model"
            problems.append(found)
            break
    return [f"{problem}; expected a checkpoint of the same model" for problem in problems]


def _listed(names: list[str]) -> str:
    shown = ", ".join(names[:_SHOWN])
    rest = len(names) - _SHOWN
    return f"{shown} and {rest} more parameters" if rest > 0 else shown


def read_values(reader: CheckpointReader, state: RankState) -> None:
    """Fill masters, other parameters and buffers; what the checkpoint lacks stays as it is."""
    with torch.no_grad():
        for holding in holdings_of(state):
            if holding.window.size and reader.lookup.has(VALUE, holding.name):
                reader.read_into(holding.values, VALUE, holding.name, holding.window)
        for name, buffer, _ in buffers_of(state):
            if reader.lookup.has(BUFFER, name):
                saved = reader.read_whole(BUFFER, name)
                if saved.shape == buffer.shape:
                    buffer.copy_(saved)


def optimizer_state(
    reader: CheckpointReader, manifest: Manifest, state: RankState
) -> dict[Parameter, dict[str, Any]]:
    """What the inner optimizer keeps for each master of this rank, as the checkpoint has it.

    Raises `CheckpointError` where no state can stand for all parameters of a master.
    """
    if state.optimizer is None:
        return {}
    found = {}
    for bucket in state.optimizer.buckets:
        places = [place for place in places_in(bucket) if place.at.size]
        own = dict(_tensors(reader, bucket, places))
        own |= _agreed_scalars(manifest, places)
        if own:
            found[bucket.master] = own
    return found


def _tensors(
    reader: CheckpointReader, bucket: Bucket, places: list[Place]
) -> Iterator[tuple[str, Tensor]]:
    names = [place.holding.name for place in places]
    kinds = {kind for name in names for kind in reader.lookup.kinds_of(name)}
    for kind in sorted(kind for kind in kinds if kind.startswith(OPTIMIZER_PREFIX)):
        lacking = [name for name in names if not reader.lookup.has(kind, name)]
        if lacking:
            raise _partial(lacking[0], kind.removeprefix(OPTIMIZER_PREFIX))
        tensor = torch.empty_like(bucket.master.detach())
        for place in places:
            part = tensor[place.at.as_slice()]
            reader.read_into(part, kind, place.holding.name, place.holding.window)
        yield kind.removeprefix(OPTIMIZER_PREFIX), tensor


def _agreed_scalars(manifest: Manifest, places: list[Place]) -> dict[str, Any]:
    """What all parameters of a master have in common."""
    if not places:
        return {}
    first, *others = (place.holding.name for place in places)
    expected = manifest.parameters.get(first, {})
    for name in others:
        found = manifest.parameters.get(name, {})
        if found.keys() != expected.keys():
            key = sorted(found.keys() ^ expected.keys())[0]
            raise _partial(name if key in expected else first, key)
        for key in found:
            if found[key] != expected[key]:
                raise CheckpointError(
                    f"the optimizer's {key} is {_shown(expected[key])} for {first}, but "
                    f"{_shown(found[key])} for {name}, because a stage left out a step; expected a "
                    "plan that keeps them in stages of their own, or load_optimizer_states=False"
                )
    return {key: decode(value, tensor_of) for key, value in expected.items()}


def _shown(value: Any) -> Any:
    return value["value"] if isinstance(value, dict) and "value" in value else value


def _partial(name: str, key: str) -> CheckpointError:
    return CheckpointError(
        f"the checkpoint has no {key} of the optimizer for {name}, but for parameters trained "
        "beside it; expected one for each, or load_optimizer_states=False"
    )
