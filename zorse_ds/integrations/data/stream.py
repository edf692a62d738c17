"""Data that are read while training goes on: global batches of a source too large to prepare."""

from collections.abc import Iterator
from typing import Any

from zorse_ds.errors import DataError
from zorse_ds.integrations.data.chat import chat_column, check_tokenizer, tokenise_rows
from zorse_ds.integrations.data.packing import tokenise_texts
from zorse_ds.integrations.data.source import Source, load_stream

Sample = dict[str, list[int]]


class SampleStream:
    """Global batches (lists of `batch_size` samples) of a source, over and over, without end.

    Samples are those of `prepare_text`: texts packed into `seq_len` tokens, of which what is left
    of an epoch is carried into the next, or conversations and prompts with completions. Every rank
    reads the whole source alike, so the order depends on no plan; with `shuffle_buffer` rows are
    drawn at random from that many, by `seed` and epoch.

    `state_dict` is plain data: loaded into a new stream of the same source, that one goes on with
    the same batches. Raises `DataError` for data of no known form or without a sample.
    """

    def __init__(
        self,
        source: Source,
        tokenizer: Any,
        seq_len: int,
        batch_size: int,
        *,
        split: str | None = None,
        text_column: str = "text",
        shuffle_buffer: int = 0,
        seed: int = 1234,
    ) -> None:
        self._source, self._tokenizer, self._seq_len = source, tokenizer, seq_len
        self._batch_size, self._text_column = batch_size, text_column
        self._dataset = load_stream(source, split, text_column=text_column)
        if shuffle_buffer:
            self._dataset = self._dataset.shuffle(seed=seed, buffer_size=shuffle_buffer)
        self._is_shuffled = shuffle_buffer > 0
        self._rows: Iterator[dict[str, Any]] | None = None
        self._epoch = self._num_rows = 0
        self._rest: list[int] = []
        self._pending: list[Sample] = []
        self.num_batches = 0
        """Handed out so far."""

    def __iter__(self) -> Iterator[list[Sample]]:
        return self

    def __next__(self) -> list[Sample]:
        epochs_ended = 0
        while len(self._pending) < self._batch_size:
            row = self._next_row()
            if row is None:
                epochs_ended += 1
                if epochs_ended > self._batch_size and not self._pending and not self._rest:
                    raise DataError(f"{self._source} holds no sample; expected at least one")
            else:
                self._pending += self._samples_of(row)
        batch, self._pending = self._pending[: self._batch_size], self._pending[self._batch_size :]
        self.num_batches += 1
        return batch

    def skip_to(self, num_batches: int) -> None:
        """Read on to where so many batches have been handed out, as if they had been."""
        while self.num_batches < num_batches:
            next(self)

    def state_dict(self) -> dict[str, Any]:
        """Where the stream is, as plain data."""
        # datasets' own state leaves out what is in the buffer of a shuffle.
        has_state = self._rows is not None and not self._is_shuffled
        return {
            "dataset": self._dataset.state_dict() if has_state else None,
            "epoch": self._epoch,
            "num_rows": self._num_rows,
            "rest": list(self._rest),
            "pending": [dict(sample) for sample in self._pending],
            "num_batches": self.num_batches,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from there."""
        self._epoch, self.num_batches = state["epoch"], state["num_batches"]
        self._rest, self._pending = list(state["rest"]), list(state["pending"])
        self._num_rows = state["num_rows"]
        self._dataset.set_epoch(self._epoch)
        if state["dataset"] is not None:
            self._dataset.load_state_dict(state["dataset"])
        self._rows = iter(self._dataset)
        if state["dataset"] is None:
            # Rows are read again, but not tokenised.
            for _ in range(self._num_rows):
                next(self._rows)

    def _next_row(self) -> dict[str, Any] | None:
        """The next row, or None once at the end of each epoch."""
        if self._rows is None:
            self._rows = iter(self._dataset)
        row = next(self._rows, None)
        self._num_rows += 1
        if row is None:
            self._epoch, self._num_rows = self._epoch + 1, 0
            self._dataset.set_epoch(self._epoch)
            self._rows = iter(self._dataset)
        return row

    def _samples_of(self, row: dict[str, Any]) -> list[Sample]:
        if self._text_column in row:
            return self._packed(row[self._text_column])
        chat = chat_column(list(row))
        needs_template = chat is not None or not isinstance(row.get("prompt"), str)
        check_tokenizer(self._tokenizer, self._seq_len, needs_template=needs_template)
        columns = {name: [value] for name, value in row.items()}
        found = tokenise_rows(columns, [0], self._tokenizer, self._seq_len, chat)
        return [
            {"input_ids": ids, "labels": labels}
            for ids, labels in zip(found["input_ids"], found["labels"], strict=True)
        ]

    def _packed(self, text: Any) -> list[Sample]:
        if text is not None and not isinstance(text, str):
            raise DataError(
                f"{self._source}: column {self._text_column!r} holds a {type(text).__name__}; "
                "expected text"
            )
        for ids in tokenise_texts([text], self._tokenizer)["input_ids"]:
            self._rest += ids
        size = self._seq_len
        whole = len(self._rest) // size * size
        cut = [self._rest[start : start + size] for start in range(0, whole, size)]
        self._rest = self._rest[whole:]
        return [{"input_ids": ids, "labels": list(ids)} for ids in cut]
