"""Building a data set once for all processes of a job, and finding it again the next time."""

import hashlib
import json
import shutil
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import datasets

from zorse_ds.errors import DataError
from zorse_ds.integrations.data.chat import tokenise_chat
from zorse_ds.integrations.data.holdout import Holdout
from zorse_ds.integrations.data.indexed import IndexedSamples, IndexedTokens, indexed_prefix
from zorse_ds.integrations.data.packing import tokenise_and_pack
from zorse_ds.integrations.data.source import Source, hub_name, load_source, source_files

# Part of every key; raised when samples come out differently for the same input.
_VERSION = 2


def prepare_text(
    source: Source,
    tokenizer: Any,
    seq_len: int,
    *,
    cache_dir: str | Path,
    builds: bool,
    barrier: Callable[[], None],
    split: str | None = None,
    text_column: str = "text",
    num_proc: int | None = None,
    holdout: Holdout | None = None,
) -> "datasets.Dataset | IndexedSamples":
    """Load and tokenise `source` once, in one process; open the result in all.

    Plain text is packed into samples of `seq_len`; conversations, and prompts with completions, are
    cut at it and have the answers alone as targets (`tokenise_chat`). Of an indexed pair of
    Megatron, named by its `.idx` or `.bin`, the tokens are taken as they are.

    Collective: every rank calls this, with the same arguments save `builds`, which is true on one
    rank of each file system (rank 0, or local rank 0 of every node). See `load_source` for
    `source` and `split`, `tokenise_and_pack` for the samples, `prepare_once` for the rest.
    `holdout` takes one side of the documents only.
    """
    indexed = indexed_prefix(source)
    if indexed is not None:
        # Tokenised long ago, and read where it lies.
        return IndexedSamples(IndexedTokens(indexed), seq_len, holdout)
    hub = hub_name(source)
    files = source_files(source) if hub is None else []
    key = cache_key(files, tokenizer, seq_len, text_column, split, holdout, hub)

    def build() -> datasets.Dataset:
        text = load_source(source, split, text_column=text_column)
        if holdout is not None:
            text = holdout.side_of(text)
        columns = text.column_names
        if text_column not in columns and "input_ids" not in columns:
            return tokenise_chat(text, tokenizer, seq_len, num_proc=num_proc)
        return tokenise_and_pack(
            text, tokenizer, seq_len, text_column=text_column, num_proc=num_proc
        )

    return prepare_once(build, Path(cache_dir).expanduser() / key, builds=builds, barrier=barrier)


def prepare_once(
    build: Callable[[], datasets.Dataset],
    folder: str | Path,
    *,
    builds: bool,
    barrier: Callable[[], None],
) -> datasets.Dataset:
    """Build a data set into `folder` unless it is there, then open it memory-mapped.

    Collective: every rank calls this. The rank with `builds` true writes beside `folder` and
    renames, so a folder that exists is whole; the others wait at `barrier`. datasets does not
    lock `map` between processes, so without this each of them would do the work.

    Raises what `build` raises, on the building rank; DataError on ranks that then find nothing.
    """
    folder = Path(folder)
    try:
        if builds and not folder.exists():
            _save(build(), folder)
    finally:
        # Reached after a failure too: the others must learn of it and not wait for a timeout.
        barrier()
    if not folder.exists():
        raise DataError(
            f"{folder} was not built; expected the building rank, whose error comes first, to "
            "write it where this rank can read it"
        )
    return datasets.Dataset.load_from_disk(str(folder))


def _save(dataset: datasets.Dataset, folder: Path) -> None:
    folder.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(dir=folder.parent, prefix=f".{folder.name}."))
    try:
        temporary.chmod(0o755)
        dataset.save_to_disk(str(temporary))
        temporary.rename(folder)
    except OSError:
        # Two nodes may share the folder and both build: the first to finish wins.
        if not folder.exists():
            raise
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def cache_key(
    files: Iterable[Path],
    tokenizer: Any,
    seq_len: int,
    text_column: str,
    split: str | None = None,
    holdout: Holdout | None = None,
    hub: str | None = None,
) -> str:
    """Return a name, 32 hexadecimal digits, that changes when the packed samples may change.

    It covers path, size and time of change of each source file, the tokenizer's content, and the
    arguments. The files are not read. Of the hub's data set the name counts: with a revision in it
    that one, else what was read first stays.
    """
    facts = {
        "version": _VERSION,
        "files": [_file_facts(file) for file in files],
        "tokenizer": _tokenizer_facts(tokenizer),
        "seq_len": seq_len,
        "text_column": text_column,
        "split": split,
        "holdout": holdout and str(holdout),
        "hub": hub,
    }
    text = json.dumps(facts, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def _file_facts(file: Path) -> list[str | int]:
    status = file.stat()
    return [str(file.resolve()), status.st_size, status.st_mtime_ns]


def _tokenizer_facts(tokenizer: Any) -> dict[str, Any]:
    facts = {
        "class": type(tokenizer).__name__,
        "special": str(tokenizer.special_tokens_map),
        "template": tokenizer.chat_template,
    }
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return {**facts, "vocabulary": sorted(tokenizer.get_vocab().items())}
    content = json.loads(backend.to_str())
    # What the last call left behind, not what the tokenizer is.
    return {**facts, "content": {**content, "truncation": None, "padding": None}}
