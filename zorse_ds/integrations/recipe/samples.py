"""The samples of a recipe: tokenised once before the launch, opened by every rank."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import datasets
from transformers import AutoTokenizer

from zorse_ds.errors import ModelError
from zorse_ds.integrations.data import Holdout, SampleStream, prepare_text
from zorse_ds.integrations.recipe.schema import Recipe


@dataclass(frozen=True)
class Samples:
    """What is trained on, prepared or streamed, and what is measured on if anything."""

    train: datasets.Dataset | None
    stream: SampleStream | None
    validation: datasets.Dataset | None

    def num_steps(self, recipe: Recipe, global_batch: int) -> int:
        """Steps of the whole run; the last batch of an epoch may be short."""
        if recipe.steps is not None:
            return recipe.steps
        assert recipe.epochs is not None and self.train is not None, "a recipe has one of the two"
        return recipe.epochs * -(-len(self.train) // global_batch)


def load_tokenizer(folder: str) -> Any:
    """The tokenizer beside a model; `ModelError` when there is none."""
    if not Path(folder).is_dir():
        raise ModelError(f"{folder} is not a folder; expected one of a Hugging Face model")
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder)
    except Exception as problem:  # transformers fails in many ways when a file is missing
        raise ModelError(
            f"{folder} has no tokenizer that transformers can read "
            f"({str(problem).strip().splitlines()[0]}); expected one beside the model"
        ) from problem
    if not len(tokenizer):
        raise ModelError(f"{folder} has no tokenizer; expected one beside the model")
    return tokenizer


def load_samples(
    recipe: Recipe,
    tokenizer: Any,
    global_batch: int,
    *,
    builds: bool = True,
    streams: bool = True,
    barrier: Callable[[], None] | None = None,
) -> Samples:
    """Tokenise what is not in the cache, and open it. Collective where `barrier` is given.

    A stream is opened where `streams`, and its first row looked at. Raises `DataError`.
    """
    data = recipe.data

    def prepare(source: str, holdout: Holdout | None) -> datasets.Dataset:
        return prepare_text(
            source,
            tokenizer,
            recipe.seq_len,
            cache_dir=data.cache,
            builds=builds,
            barrier=barrier or _alone,
            text_column=data.text_column,
            num_proc=data.num_proc,
            holdout=holdout,
        )

    train = validation = stream = None
    if data.validation_share is None:
        if data.streaming:
            stream = _stream_of(recipe, tokenizer, global_batch) if streams else None
        else:
            train = prepare(data.train, None)
        if data.validation is not None:
            validation = prepare(data.validation, None)
    else:
        train, validation = (
            prepare(data.train, Holdout(data.validation_share, data.seed, is_held))
            for is_held in (False, True)
        )
    if validation is not None and data.max_validation_samples is not None:
        validation = validation.select(range(min(len(validation), data.max_validation_samples)))
    return Samples(train, stream, validation)


def _stream_of(recipe: Recipe, tokenizer: Any, global_batch: int) -> SampleStream:
    data = recipe.data
    return SampleStream(
        data.train,
        tokenizer,
        recipe.seq_len,
        global_batch,
        text_column=data.text_column,
        shuffle_buffer=data.shuffle_buffer if data.shuffle else 0,
        seed=data.seed % 2**63,
    )


def _alone() -> None:
    """A single process waits for nobody."""
