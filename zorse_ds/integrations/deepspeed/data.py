"""Global batches: the same on every rank, read only where they are needed."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_map
from torch.utils.data import IterableDataset, default_collate

from zorse_ds.core.order import DataPosition, SampleOrder
from zorse_ds.core.strict import listed
from zorse_ds.errors import DataError
from zorse_ds.ranges import Range
from zorse_ds.runtime.values import flatten

CollateFn = Callable[[list[Any]], Any]


class GlobalBatch(Protocol):
    """See `runtime.step.Batch`; it knows its size."""

    num_samples: int

    def load(self, samples: Range) -> tuple[Any, Any]:
        """`(inputs, labels)` of some samples."""


class _Collating:
    """Collates samples, and remembers how many tokens those had that were loaded."""

    def __init__(self, num_samples: int, collate_fn: CollateFn) -> None:
        self.num_samples, self._collate_fn = num_samples, collate_fn
        self.tokens: dict[Range, int] = {}

    def _collated(self, samples: Range, rows: list[Any]) -> tuple[Any, Any]:
        if all(isinstance(row, Mapping) and "input_ids" in row for row in rows):
            self.tokens[samples] = sum(len(row["input_ids"]) for row in rows)
        return as_pair(self._collate_fn(rows))


class IndexedBatch(_Collating):
    """Samples of a map-style data set, by id; nothing is read before `load`."""

    def __init__(
        self, dataset: Any, ids: Sequence[int] | np.ndarray, collate_fn: CollateFn
    ) -> None:
        super().__init__(len(ids), collate_fn)
        self._dataset, self._ids = dataset, ids

    def load(self, samples: Range) -> tuple[Any, Any]:
        """Read and collate the samples."""
        ids = [int(i) for i in self._ids[samples.as_slice()]]
        if hasattr(self._dataset, "__getitems__"):
            return self._collated(samples, self._dataset.__getitems__(ids))
        return self._collated(samples, [self._dataset[i] for i in ids])


class SampleBatch(_Collating):
    """Samples given one by one."""

    def __init__(self, samples: Sequence[Any], collate_fn: CollateFn) -> None:
        super().__init__(len(samples), collate_fn)
        self.value = samples

    def load(self, samples: Range) -> tuple[Any, Any]:
        """Collate the samples."""
        return self._collated(samples, list(self.value[samples.as_slice()]))


class CollatedBatch:
    """A batch that was collated as a whole: cut along dim 0 of every tensor."""

    def __init__(self, pair: tuple[Any, Any]) -> None:
        self.value = pair
        _, leaves = flatten(pair)
        sizes = {len(leaf) for leaf in leaves if isinstance(leaf, Tensor) and leaf.dim()}
        if not sizes or sizes == {0}:
            found = "0 samples" if sizes else "no tensors"
            raise DataError(f"a batch has {found}; expected tensors of at least one sample")
        if len(sizes) != 1:
            raise DataError(
                f"a batch has tensors with {sorted(sizes)} samples along dim 0; expected the same "
                "number in each"
            )
        self.num_samples = sizes.pop()

    def load(self, samples: Range) -> tuple[Any, Any]:
        """Slice the samples out."""

        def cut(leaf: Any) -> Any:
            return leaf[samples.as_slice()] if isinstance(leaf, Tensor) and leaf.dim() else leaf

        inputs, labels = tree_map(cut, self.value)
        return inputs, labels


class Columns:
    """The samples in a dict of equally long columns, as a slice of a `datasets` data set is."""

    def __init__(self, columns: Mapping[str, Any]) -> None:
        self._columns = columns
        sizes = {key: len(column) for key, column in columns.items()}
        if len(set(sizes.values())) != 1:
            raise DataError(
                f"a dict of samples has columns of lengths {sizes}; expected the same in each"
            )
        self._size = next(iter(sizes.values()))

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {key: column[index] for key, column in self._columns.items()}


class PlacedBatch:
    """Any batch, moved to a device after an optional function of the user's.

    Inputs in float32 are given the dtype that the rank's group computes in; labels stay.
    """

    def __init__(
        self,
        batch: GlobalBatch,
        device: torch.device,
        dtype: torch.dtype,
        batch_fn: Callable[[Any], Any] | None,
    ) -> None:
        self._batch, self._device, self._dtype, self._batch_fn = batch, device, dtype, batch_fn
        self.num_samples = batch.num_samples

    @property
    def num_tokens(self) -> int:
        """Of the samples that this rank has loaded, padding left out; 0 where nobody counts."""
        return sum(getattr(self._batch, "tokens", {}).values())

    def load(self, samples: Range) -> tuple[Any, Any]:
        """Load, transform, move."""
        pair = self._batch.load(samples)
        if self._batch_fn is not None:
            pair = as_pair(self._batch_fn(pair))

        def move(leaf: Any) -> Any:
            return leaf.to(self._device, non_blocking=True) if isinstance(leaf, Tensor) else leaf

        def cast(leaf: Any) -> Any:
            is_float = isinstance(leaf, Tensor) and leaf.dtype == torch.float32
            return leaf.to(self._dtype) if is_float else leaf

        inputs, labels = tree_map(move, pair)
        return tree_map(cast, inputs), labels


class ZorseLoader:
    """Global batches of a map-style data set in the one global order.

    Iterating gives the batches of an epoch as lazy objects, from where the last iteration ended;
    every rank iterates alike and reads only its own samples. `len` is the number of steps of an
    epoch. The last batch of an epoch may be short, unless `drop_last`.

    With `lengths`, tokens by sample, each batch is laid by length, the longest first: neighbours
    share micro-batches, which then pad less. A batch has the same samples, so the same update.
    """

    def __init__(
        self,
        dataset: Any,
        order: SampleOrder,
        collate_fn: CollateFn,
        lengths: np.ndarray | None = None,
    ) -> None:
        self.dataset = Columns(dataset) if _has_names(dataset) else dataset
        self.order = order
        self.collate_fn = collate_fn
        self._lengths = lengths
        self.position = DataPosition()
        """Behind the last batch that was handed out; may be set, as after loading."""
        self.fingerprint: str | None = None
        """What tells the data set from another; found when a checkpoint first needs it."""

    def __len__(self) -> int:
        return self.order.steps_per_epoch

    def __iter__(self) -> Iterator[IndexedBatch]:
        epoch = self.order.next_batch(self.position)[0].epoch
        while True:
            batch, behind = self.order.next_batch(self.position)
            if batch.epoch != epoch:
                return
            self.position = behind
            ids = batch.ids
            if self._lengths is not None:
                ids = ids[np.argsort(-self._lengths[ids], kind="stable")]
            yield IndexedBatch(self.dataset, ids, self.collate_fn)


def lengths_of(dataset: Any) -> np.ndarray:
    """Tokens of each sample: how long its `input_ids` are. Raises `DataError` if it has none."""
    table = getattr(dataset, "data", None)
    names = getattr(dataset, "column_names", [])
    if table is not None and "input_ids" in names and dataset._indices is None:
        # A column of Arrow is not read sample by sample.
        import pyarrow.compute as pc  # type: ignore[import-untyped]

        return np.asarray(pc.list_value_length(table.column("input_ids")))
    samples = Columns(dataset) if _has_names(dataset) else dataset
    try:
        return np.array([len(samples[i]["input_ids"]) for i in range(len(samples))])
    except (KeyError, TypeError, IndexError):
        raise DataError(
            "zorse.data.group_by_length is true, but the samples have no input_ids; expected those "
            "of a causal language model"
        ) from None


def num_samples_of(dataset: Any) -> int:
    """Length of a map-style data set. Raises `DataError` for any other."""
    if _has_names(dataset) and all(_is_column(value) for value in dataset.values()):
        return len(Columns(dataset))
    known = hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")
    if isinstance(dataset, IterableDataset) or _has_names(dataset) or not known:
        raise DataError(
            f"the data set is a {type(dataset).__name__}, which has no order to cut; expected one "
            "with __len__ and __getitem__, so that every rank can read its own samples"
        )
    return len(dataset)


def _has_names(dataset: Any) -> bool:
    """A dict whose keys are no sample numbers."""
    return isinstance(dataset, Mapping) and any(isinstance(key, str) for key in dataset)


def _is_column(value: Any) -> bool:
    return isinstance(value, Sequence | np.ndarray | Tensor) and not isinstance(value, str)


def check_dataset(dataset: Any) -> None:
    """Raise `DataError` for a data set that cannot be cut, or has no samples."""
    if num_samples_of(dataset) == 0:
        raise DataError("the data set has 0 samples; expected at least one to train on")


def as_batch(item: Any, collate_fn: CollateFn) -> IndexedBatch | SampleBatch | CollatedBatch:
    """One item of an iterator as a global batch.

    An item is a batch of a `ZorseLoader`, a list of samples (tuples or dicts), a dict of columns,
    or a collated `(inputs, labels)`; for a Hugging Face model also a dict with `labels`.
    """
    if isinstance(item, IndexedBatch | SampleBatch | CollatedBatch):
        return item
    if isinstance(item, list) and item and all(isinstance(it, tuple | Mapping) for it in item):
        return SampleBatch(item, collate_fn)
    if isinstance(item, Mapping) and item:
        return _batch_of_dict(item, collate_fn)
    if isinstance(item, tuple | list) and len(item) == 2:
        return CollatedBatch((item[0], item[1]))
    if isinstance(item, list) and item:
        return SampleBatch(item, collate_fn)
    empty = "n empty " if isinstance(item, list | tuple | Mapping) and not item else " "
    raise DataError(
        f"the data iterator gave a{empty}{type(item).__name__}; expected one global batch: a list "
        "of samples, (inputs, labels), or a dict with 'labels'"
    )


def _batch_of_dict(item: Mapping[str, Any], collate_fn: CollateFn) -> SampleBatch | CollatedBatch:
    """A dict of columns, or one collated batch; `DataError` for a single sample."""
    ids = item.get("input_ids")
    flat = isinstance(ids, Tensor) and ids.dim() == 1
    if "labels" in item and isinstance(item["labels"], Tensor) and not flat:
        inputs = {key: value for key, value in item.items() if key != "labels"}
        return CollatedBatch((inputs, item["labels"]))
    columns = [value for value in item.values() if _is_column(value)]
    rows = [value[0] for value in columns if len(value)]
    nested = any(hasattr(row, "__len__") and not isinstance(row, str) for row in rows)
    empty = not rows and all(isinstance(value, list) for value in item.values())
    if len(columns) == len(item) and not flat and (nested or empty):
        samples = Columns(item)
        if len(samples) == 0:
            raise DataError("a batch has 0 samples; expected at least one")
        return SampleBatch([samples[i] for i in range(len(samples))], collate_fn)
    raise DataError(
        f"the data iterator gave one dict with {listed(sorted(item))}, which looks like a single "
        "sample; expected one global batch: a list of such samples, or a collated dict of tensors "
        "with 'labels'"
    )


def as_pair(collated: Any) -> tuple[Any, Any]:
    """What a collator returned, as `(inputs, labels)`."""
    if isinstance(collated, tuple | list) and len(collated) == 2:
        return collated[0], collated[1]
    raise DataError(
        f"a collated micro-batch is a {type(collated).__name__}; expected (inputs, labels)"
    )


def default_collate_fn(samples: list[Any]) -> Any:
    """Stack samples `(inputs, labels)` as torch's data loader does."""
    try:
        return default_collate(samples)
    except (RuntimeError, TypeError) as error:
        raise DataError(
            f"samples cannot be stacked ({str(error).splitlines()[0]}); expected tensors of equal "
            "shape, or a collate_fn"
        ) from error
