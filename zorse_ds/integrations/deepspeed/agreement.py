"""All ranks compare what they are about to run, and what they were given, before they act on it.

Each function raises on every rank or on none, so nobody waits for a rank that gave up.
"""

import hashlib
import json
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import import_module
from importlib.metadata import version
from typing import Any

import deepspeed
import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from zorse_ds.core.plan import Plan
from zorse_ds.errors import DataError, WorldError
from zorse_ds.integrations.deepspeed.data import (
    CollatedBatch,
    CollateFn,
    IndexedBatch,
    SampleBatch,
    as_batch,
)
from zorse_ds.runtime.dist_world import DistWorld

_OWN_TO_A_RANK = ("tensorboard", "wandb", "csv_monitor", "comet")
"""Sections of the config that may differ: one rank writes, and paths may be a host's own."""


@contextmanager
def together(doing: str) -> Iterator[None]:
    """Collective: what fails inside on one rank fails on all, so that nobody waits for it.

    The rank itself raises its own error, the others a `WorldError` that tells it.
    """
    problem: Exception | None = None
    try:
        yield
    except Exception as error:
        problem = error
    told = None if problem is None else f"{type(problem).__name__}: {problem}".split("\n")[0]
    facts = _gathered(told)
    if problem is not None:
        raise problem
    failed = {rank: fact for rank, fact in enumerate(facts) if fact is not None}
    if failed:
        rank, fact = next(iter(failed.items()))
        raise WorldError(f"{doing} failed on ranks {list(failed)}; rank {rank} says {fact}")


def agree_on_model(plan: Plan, layer_names: Sequence[str], fingerprint: str) -> None:
    """Collective: raise `WorldError` if a rank has another plan, model, weights or version."""
    _agree(
        {
            "zorse_ds version": import_module("zorse_ds").__version__,
            "torch version": torch.__version__,
            "deepspeed version": deepspeed.__version__,
            "transformers version": version("transformers"),
            "plan": json.dumps(plan.to_dict(), sort_keys=True),
            "pipeline layers": " ".join(layer_names),
            "model's files": fingerprint,
        }
    )


def agree_on_config(config: Mapping[str, Any]) -> None:
    """Collective: raise `WorldError` if a rank has another DeepSpeed config."""
    shared = {key: value for key, value in config.items() if key not in _OWN_TO_A_RANK}
    zorse = shared.get("zorse")
    if isinstance(zorse, dict):
        # The plan itself is compared, not the path that it was read from.
        shared["zorse"] = {key: value for key, value in zorse.items() if key != "plan"}
    _agree(
        {f"config's {key}": json.dumps(shared[key], sort_keys=True, default=str) for key in shared}
    )


def agree_on_data(dataset: Any) -> None:
    """Collective: raise `WorldError` if a rank has another training set: size or some samples.

    Samples that a rank itself does not read twice alike (augmentation) are not compared.
    """
    _agree({"training_data": facts_of_data(dataset)})


def facts_of_data(dataset: Any) -> str:
    """What tells a data set from another: its size, and a checksum of three samples.

    Samples that are not read twice alike count as random.
    """
    if dataset is None:
        return "none"
    if not (hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")) or not len(dataset):
        return type(dataset).__name__
    ids = sorted({0, len(dataset) // 2, len(dataset) - 1})
    if isinstance(dataset, dict):
        return f"dict of {len(dataset)}"
    first, again = (_checksum([dataset[i] for i in ids]) for _ in range(2))
    return f"{len(dataset)} samples, {f'checksum {first:08x}' if first == again else 'random'}"


def agree_on_trace(digest: str) -> None:
    """Collective: raise `WorldError` if a rank compiled another trace."""
    _agree({"trace digest": digest})


def agree_on_batch(world: DistWorld, batch: SampleBatch | CollatedBatch | None) -> None:
    """Collective: a user's iterator must give every rank the same batch, or end on all of them.

    `batch` is None where the iterator ended. Raises `DataError`.
    """
    own = (0, 0) if batch is None else (batch.num_samples, _checksum(batch.value))
    facts: list[Any] = world.gather_objects(own)
    sizes = [size for size, _ in facts]
    ended = [rank for rank, size in enumerate(sizes) if not size]
    if 0 < len(ended) < len(sizes):
        raise DataError(
            f"the data iterator ended on ranks {ended} but not on the others; expected the same "
            "global batches on every rank"
        )
    if len(set(sizes)) > 1:
        raise DataError(
            f"the data iterators of the ranks gave {min(sizes)} to {max(sizes)} samples; expected "
            "the same global batch on every rank"
        )
    if len(set(facts)) > 1:
        raise DataError(
            "the data iterators gave the ranks different samples; expected the same global batch "
            "on every rank, for example a shuffling loader with a generator of the same seed"
        )


def next_batch(
    world: DistWorld,
    data_iter: Any,
    collate_fn: CollateFn,
    purpose: str,
    most: int | None = None,
) -> IndexedBatch | SampleBatch | CollatedBatch:
    """Collective: the next global batch of an iterator, the same on every rank.

    Raises `DataError` on every rank alike when there is none for `purpose`, or when it has more
    than `most` samples.
    """
    if data_iter is None:
        raise DataError("there is no data; expected training_data, set_dataloader or data_iter")
    try:
        batch = as_batch(next(data_iter), collate_fn)
    except StopIteration:
        agree_on_batch(world, None)
        raise DataError(
            f"the data iterator has ended, but {purpose} needs a batch; expected one global "
            "batch a call, or set_dataloader, which begins again when its loader ends"
        ) from None
    if not isinstance(batch, IndexedBatch):
        agree_on_batch(world, batch)
    if most is not None and batch.num_samples > most:
        raise DataError(
            f"the data iterator gave {batch.num_samples} samples for {purpose}, but the plan's "
            f"global_batch_size is {most}; expected at most {most} in one global batch"
        )
    return batch


def _checksum(value: Any) -> int:
    """Of all values in it: random batches that differ are as good as sure to be found."""
    return zlib.crc32(json.dumps(value, default=_stand_in, skipkeys=True).encode())


def _stand_in(value: Any) -> Any:
    """What JSON cannot hold: a checksum of a tensor's bits, the items of a mapping, or a name."""
    if isinstance(value, np.ndarray):
        return zlib.crc32(np.ascontiguousarray(value).view(np.uint8).data)
    if isinstance(value, Tensor):
        raw = value.detach().contiguous().view(-1).view(torch.uint8)
        return zlib.crc32(raw.cpu().numpy().data)
    return dict(value) if isinstance(value, Mapping) else type(value).__name__


def _agree(own: dict[str, str]) -> None:
    facts = _gathered(own)
    for key in dict.fromkeys(key for fact in facts for key in fact):
        if any(fact.get(key) != facts[0].get(key) for fact in facts):
            raise WorldError(_disagreement(key, [fact.get(key) for fact in facts]))


def from_first_rank(own: Any) -> Any:
    """What the first rank has. Collective: every rank."""
    return _gathered(own)[0]


def _gathered(own: Any) -> list[Any]:
    facts: list[Any] = [None] * dist.get_world_size()
    # A group of its own on the host: the process groups of a plan do not exist yet.
    group = dist.new_group(backend="gloo")
    dist.all_gather_object(facts, own, group=group)
    dist.destroy_process_group(group)
    return facts


def _disagreement(key: str, values: Sequence[str | None]) -> str:
    ranks: dict[str | None, list[int]] = {}
    for rank, value in enumerate(values):
        ranks.setdefault(value, []).append(rank)
    found = ", ".join(f"{_short(value)} on ranks {at}" for value, at in ranks.items())
    return f"the ranks disagree about the {key}: {found}; expected the same on every rank"


def _short(value: str | None) -> str:
    if value is None:
        return "nothing"
    return value if len(value) <= 40 else f"sha256 {hashlib.sha256(value.encode()).hexdigest()[:8]}"
