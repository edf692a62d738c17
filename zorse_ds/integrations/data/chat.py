"""Conversations and prompts with completions as samples whose targets are the answers alone.

The tokenizer's own template writes a conversation. What of it is an answer is told by the template
where it has `{% generation %}` marks, and else found by rendering: an answer begins where the
conversation before it, with the prompt for an answer, ends.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import datasets
from jinja2.exceptions import TemplateError

from zorse_ds.core.strict import listed
from zorse_ds.errors import DataError
from zorse_ds.integrations.data.messages import Message, read_messages
from zorse_ds.integrations.data.packing import IGNORED_LABEL, SAMPLES

CHAT_COLUMNS = ("messages", "conversations")
PAIR_COLUMNS = ("prompt", "completion")
_MARKS = re.compile(r"\{%-?\s*generation\s*-?%\}")

Span = tuple[int, int]
"""Characters [start, end) of a text."""


def tokenise_chat(
    dataset: datasets.Dataset, tokenizer: Any, seq_len: int, *, num_proc: int | None = None
) -> datasets.Dataset:
    """Turn conversations, or prompts with completions, into samples `input_ids`, `labels`.

    A column `messages` (or `conversations`) holds lists of `{"role", "content"}` (or `{"from",
    "value"}`), with `tools` beside it where wanted. Labels are the tokens of assistant turns, the
    mark that ends a turn included, and -100 elsewhere. Where a template writes earlier answers
    otherwise once later turns follow (it drops their reasoning, say), each answer becomes a sample
    of its own, written as it would be when it is generated.

    Columns `prompt` and `completion` hold texts, of which the completion and an end of text are the
    targets, or lists of messages, of which the answers of the completion are.

    Samples are cut at `seq_len` tokens; those without a target within are left out. Raises
    `DataError` with one sentence for a tokenizer without template, an unknown role, or no samples.
    """
    columns = dataset.column_names
    chat = chat_column(columns)
    if chat is None and not set(PAIR_COLUMNS) <= set(columns):
        raise DataError(
            f"the data set has the columns {listed(columns)}; expected 'messages', or 'prompt' and "
            "'completion'"
        )
    check_tokenizer(tokenizer, seq_len, needs_template=chat is not None or _has_turns(dataset))
    samples = dataset.map(
        tokenise_rows,
        batched=True,
        with_indices=True,
        remove_columns=columns,
        features=SAMPLES,
        fn_kwargs={"tokenizer": tokenizer, "seq_len": seq_len, "chat": chat},
        num_proc=num_proc,
        desc="Tokenising conversations",
    )
    if len(samples) == 0:
        raise DataError(
            f"no conversation has an answer within {seq_len} tokens; expected at least one"
        )
    return samples


def chat_column(columns: Sequence[str]) -> str | None:
    """The column that holds conversations, or None."""
    return next((name for name in CHAT_COLUMNS if name in columns), None)


def _has_turns(dataset: datasets.Dataset) -> bool:
    """Whether prompts are lists of messages rather than texts."""
    return getattr(dataset.features["prompt"], "dtype", "list") == "list"


def check_tokenizer(tokenizer: Any, seq_len: int, *, needs_template: bool) -> None:
    """Raises `DataError` for a tokenizer that cannot write or mark answers."""
    if seq_len < 2:
        raise DataError(f"seq_len is {seq_len}; expected at least 2, for each token predicts one")
    if needs_template and not tokenizer.chat_template:
        raise DataError(
            "the tokenizer has no chat template; expected one of a model that was tuned for chat, "
            "or texts in the columns 'prompt' and 'completion'"
        )
    if not needs_template and tokenizer.eos_token is None:
        raise DataError("the tokenizer has no eos_token; expected one, for it ends a completion")
    if not tokenizer.is_fast:
        raise DataError(
            f"{type(tokenizer).__name__} does not tell which characters a token stands for; "
            "expected a fast tokenizer (tokenizer.json)"
        )


def tokenise_rows(
    batch: Mapping[str, list[Any]],
    indices: Sequence[int],
    tokenizer: Any,
    seq_len: int,
    chat: str | None,
) -> dict[str, list[list[int]]]:
    """The samples of one batch of rows, as columns `input_ids` and `labels`."""
    columns: dict[str, list[list[int]]] = {"input_ids": [], "labels": []}
    rows = [dict(zip(batch, values, strict=True)) for values in zip(*batch.values(), strict=True)]
    for index, row in zip(indices, rows, strict=True):
        for ids, targets in _samples_of(row, f"data[{index}]", tokenizer, chat):
            ids, targets = ids[:seq_len], targets[:seq_len]
            # The first token is predicted by none.
            if any(targets[1:]):
                columns["input_ids"].append(ids)
                labels = [i if own else IGNORED_LABEL for i, own in zip(ids, targets, strict=True)]
                columns["labels"].append(labels)
    return columns


Tokens = tuple[list[int], list[bool]]
"""Token ids, and which of them are targets."""


def _samples_of(
    row: Mapping[str, Any], where: str, tokenizer: Any, chat: str | None
) -> Iterator[Tokens]:
    if chat is not None:
        messages = read_messages(row[chat], f"{where}.{chat}", tokenizer.chat_template)
        yield from _conversation(messages, 0, where, tokenizer, row.get("tools"))
    elif isinstance(row["prompt"], str):
        yield _pair(row["prompt"], row["completion"] or "", tokenizer)
    else:
        prompt, completion = (
            read_messages(row[name], f"{where}.{name}", tokenizer.chat_template)
            for name in PAIR_COLUMNS
        )
        turns = [*prompt, *completion]
        yield from _conversation(turns, len(prompt), where, tokenizer, row.get("tools"))


def _pair(prompt: str, completion: str, tokenizer: Any) -> Tokens:
    """A prompt with its completion, of which the latter and the end of text are targets."""
    text = prompt + completion
    encoded = tokenizer(text, return_offsets_mapping=True, truncation=False, verbose=False)
    ids = list(encoded["input_ids"])
    targets = _within(encoded["offset_mapping"], [(len(prompt), len(text))])
    if ids and ids[-1] == tokenizer.eos_token_id:
        return ids, [*targets[:-1], True]
    return [*ids, tokenizer.eos_token_id], [*targets, True]


def _conversation(
    messages: list[Message], first: int, where: str, tokenizer: Any, tools: Any
) -> Iterator[Tokens]:
    """Samples of a conversation, of which the answers from message `first` on are targets."""
    render = Renderer(tokenizer, tools, where)
    answers = [i for i in range(first, len(messages)) if messages[i]["role"] == "assistant"]
    if not answers:
        return
    if render.has_marks and first == 0:
        yield render.marked(messages)
        return
    text = render.text(messages)
    render.check_complete(messages, text)
    spans = [render.span_in(text, messages, i) for i in answers]
    if all(span is not None for span in spans):
        yield render.tokens(text, [span for span in spans if span is not None])
        return
    for i in answers:
        turn = messages[: i + 1]
        text = render.text(turn)
        span = render.span_in(text, turn, i)
        if span is None:
            raise DataError(
                f"{where}: the chat template does not write the prompt for an answer before the "
                "answer; expected one that does, or one with {% generation %} marks"
            )
        yield render.tokens(text, [span])


class Renderer:
    """A tokenizer's template, and what of its text are answers."""

    def __init__(self, tokenizer: Any, tools: Any, where: str) -> None:
        self._tokenizer = tokenizer
        self._tools = tools or None
        self._where = where
        template = tokenizer.get_chat_template(tools=self._tools)
        self.has_marks = bool(_MARKS.search(template))

    def text(self, messages: Sequence[Message], *, asks: bool = False) -> str:
        """The conversation as the template writes it, `asks`: with the prompt for an answer."""
        options = {"tokenize": False, "add_generation_prompt": asks}
        written: str = self._apply(messages, options)
        return written

    def marked(self, messages: Sequence[Message]) -> Tokens:
        """Tokens by the template's own marks."""
        options = {"tokenize": True, "return_dict": True, "return_assistant_tokens_mask": True}
        encoded = self._apply(messages, options)
        return list(encoded["input_ids"]), [bool(own) for own in encoded["assistant_masks"]]

    def span_in(self, text: str, messages: Sequence[Message], index: int) -> Span | None:
        """Where `text`, of all messages, holds answer `index`; None if it is written otherwise."""
        before = self.text(messages[:index], asks=True)
        through = text if index + 1 == len(messages) else self.text(messages[: index + 1])
        if text.startswith(before) and text.startswith(through) and len(before) < len(through):
            # A line end behind the mark that ends a turn is written by nobody.
            return len(before), max(len(before) + 1, len(through.rstrip()))
        return None

    def tokens(self, text: str, spans: Sequence[Span]) -> Tokens:
        """Tokens of a text that the template wrote, special ones included."""
        encoded = self._tokenizer(
            text,
            add_special_tokens=False,
            return_offsets_mapping=True,
            truncation=False,
            verbose=False,
        )
        return list(encoded["input_ids"]), _within(encoded["offset_mapping"], spans)

    def check_complete(self, messages: Sequence[Message], text: str) -> None:
        """DataError for a message that the template passes over."""
        for i, message in enumerate(messages):
            content = message.get("content") or ""
            if message["role"] != "assistant" and content.strip() not in text:
                raise DataError(
                    f"{self._where}: the chat template leaves out messages[{i}] of the role "
                    f"{message['role']!r}; expected roles that it knows"
                )

    def _apply(self, messages: Sequence[Message], options: dict[str, Any]) -> Any:
        try:
            return self._tokenizer.apply_chat_template(list(messages), tools=self._tools, **options)
        except (TemplateError, TypeError, ValueError, KeyError) as problem:
            reason = (str(problem).strip() or type(problem).__name__).splitlines()[0]
            raise DataError(
                f"{self._where}: the chat template does not take the conversation ({reason}); "
                "expected roles in an order that it knows"
            ) from problem


def _within(offsets: Sequence[Span], spans: Sequence[Span]) -> list[bool]:
    """Which tokens begin within one of the spans; those that stand for nothing do not."""
    return [
        start < end and any(first <= start < last for first, last in spans)
        for start, end in offsets
    ]
