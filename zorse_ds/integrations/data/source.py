"""Finding and opening text: JSONL, JSON, parquet and text files, a saved data set, or the hub's."""

import glob
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import datasets

from zorse_ds.core.strict import listed, suggestion
from zorse_ds.errors import DataError

_FORMATS = {
    ".jsonl": "json",
    ".json": "json",
    ".ndjson": "json",
    ".parquet": "parquet",
    ".txt": "text",
    ".text": "text",
}
_COMPRESSIONS = (".gz", ".zst", ".xz", ".bz2")
# What Dataset.save_to_disk and DatasetDict.save_to_disk leave in their folder.
_SAVED_SPLIT, _SAVED_DICT = "dataset_info.json", "dataset_dict.json"

_HUB_NAME = re.compile(r"(?P<name>[\w.-]+/[\w.-]+)(@(?P<revision>[\w.-]+))?")

Source = str | Path | Sequence[str | Path]


def load_source(
    source: Source, split: str | None = None, *, text_column: str = "text"
) -> datasets.Dataset:
    """Open local data as a data set with the column `text_column`, or of another known form.

    That is `input_ids`, `messages`, `conversations`, or `prompt` with `completion`.

    `source` is a file (.jsonl, .json, .ndjson, .parquet, .txt, optionally compressed), a glob, a
    list of these, or a folder written by `Dataset.save_to_disk` or `DatasetDict.save_to_disk`.
    Files are read in the order of their names. A plain text file is one document; for many
    documents in one file use JSONL. `split` names a split of a saved `DatasetDict`; files are one
    split, "train", of which datasets' slices such as "train[:90%]" may be taken. A source that is
    no path may be a data set of the hub, `owner/name` or `owner/name@revision`.

    Raises DataError when nothing is there, the format is unknown or the column is missing.
    """
    folder = _saved_folder(source)
    if folder is not None:
        dataset = _open_saved(folder, split)
    elif hub_name(source) is not None:
        dataset = _read_hub(str(source), split, streaming=False)
    else:
        dataset = _read_files(source_files(source), split, text_column)
    _check_columns(dataset, source, text_column)
    return dataset


def load_stream(
    source: Source, split: str | None = None, *, text_column: str = "text"
) -> datasets.IterableDataset:
    """The rows of `source` (see `load_source`) one after the other, read when they are asked for.

    Raises `DataError` when nothing is there or the first row has no known form.
    """
    folder = _saved_folder(source)
    if folder is not None:
        rows = _open_saved(folder, split).to_iterable_dataset()
    elif hub_name(source) is not None:
        rows = _read_hub(str(source), split, streaming=True)
    else:
        rows = _read_files(source_files(source), split, text_column, streaming=True)
    first = next(iter(rows), None)
    if first is None:
        raise DataError(f"{source} is empty; expected at least one sample")
    _check_known(list(first), source, text_column)
    return rows


def hub_name(source: Source) -> str | None:
    """`source` if it names a data set of the hub: `owner/name`, where no such path begins here."""
    text = str(source) if isinstance(source, str | Path) else ""
    match = _HUB_NAME.fullmatch(text)
    is_path = Path(text).exists() or Path(text).parent.exists() or Path(text).suffix in _FORMATS
    return text if match and not is_path else None


def _read_hub(source: str, split: str | None, *, streaming: bool) -> Any:
    match = _HUB_NAME.fullmatch(source)
    assert match is not None, "it is a hub's name"
    name, revision = match["name"], match["revision"]
    try:
        return datasets.load_dataset(
            name, split=split or "train", revision=revision, streaming=streaming
        )
    except Exception as problem:  # the network, the hub and the data fail in many ways
        reason = str(problem).strip().splitlines() or [type(problem).__name__]
        raise DataError(
            f"{source} is neither a path here nor a data set of the hub that can be read "
            f"({reason[0]}); expected one of them"
        ) from problem


def source_files(source: Source) -> list[Path]:
    """All files that `source` names, by name; for a saved data set, the files of its folder.

    Raises DataError when `source` names nothing.
    """
    entries = [source] if isinstance(source, str | Path) else list(source)
    if not entries:
        raise DataError("the list of data files is empty; expected at least one file")
    return [file for entry in entries for file in _files_of(Path(entry).expanduser())]


def _files_of(path: Path) -> list[Path]:
    if path.is_file():
        return [path]
    if path.is_dir():
        if not _is_saved(path):
            raise DataError(
                f"{path} is a folder that datasets did not save; expected a folder written by "
                f"save_to_disk, or a glob of files such as {path / '*.jsonl'}"
            )
        return sorted(file for file in path.rglob("*") if file.is_file())
    matches = [Path(match) for match in sorted(glob.glob(str(path), recursive=True))]
    files = [match for match in matches if match.is_file()]
    if files:
        return files
    if glob.has_magic(str(path)):
        raise DataError(f"no file matches {path}; expected at least one")
    raise DataError(f"{path} does not exist; expected a data file{_nearest_file(path)}")


def _nearest_file(path: Path) -> str:
    if not path.parent.is_dir():
        return f", but already the folder {path.parent} is missing"
    names = sorted(os.listdir(path.parent))
    return suggestion(path.name, [name for name in names if _ending_of(Path(name)) in _FORMATS])


def _is_saved(path: Path) -> bool:
    return (path / _SAVED_SPLIT).is_file() or (path / _SAVED_DICT).is_file()


def _saved_folder(source: Source) -> Path | None:
    """Return the folder if `source` is a data set saved by datasets, else None."""
    if not isinstance(source, str | Path):
        return None
    path = Path(source).expanduser()
    return path if _is_saved(path) else None


def _open_saved(folder: Path, split: str | None) -> datasets.Dataset:
    saved = datasets.load_from_disk(str(folder))
    if isinstance(saved, datasets.Dataset):
        if split is not None:
            raise DataError(f"{folder} holds one data set without splits, not split {split!r}")
        return saved
    names = sorted(saved)
    if split is None and len(names) == 1:
        return saved[names[0]]
    if split not in saved:
        found = "no split is given" if split is None else f"there is no split {split!r}"
        raise DataError(
            f"{folder}: {found}; expected {listed(names)}{suggestion(split or 'train', names)}"
        )
    return saved[split]


def _read_files(
    files: list[Path], split: str | None, text_column: str, *, streaming: bool = False
) -> Any:
    formats = {file: _format_of(file) for file in files}
    first = files[0]
    for file in files:
        if formats[file] != formats[first]:
            raise DataError(
                f"{first} is {formats[first]} and {file} is {formats[file]}; expected all files "
                "of one source in one format"
            )
    # One document a file: cutting at line ends would put an end of text after every line.
    options = {"sample_by": "document"} if formats[first] == "text" else {}
    try:
        dataset = datasets.load_dataset(
            formats[first],
            data_files=[str(file) for file in files],
            split=split or "train",
            streaming=streaming,
            **options,
        )
    except StopIteration:
        raise DataError(f"{first} is empty; expected at least one sample") from None
    except (datasets.exceptions.DatasetGenerationError, ValueError, OSError) as problem:
        raise DataError(
            _unreadable(files, formats[first], problem.__cause__ or problem)
        ) from problem
    if formats[first] == "text" and text_column != "text":
        dataset = dataset.rename_column("text", text_column)
    return dataset


def _unreadable(files: list[Path], form: str, problem: BaseException) -> str:
    names = ", ".join(map(str, files[:4])) + (", …" if len(files) > 4 else "")
    if isinstance(problem, datasets.table.CastError):
        some, others = problem.table_column_names, problem.requested_column_names
        return (
            f"{names}: some rows have the columns {', '.join(some)}, others {', '.join(others)}; "
            "expected the same columns in all files of one source"
        )
    reason = str(problem).strip().splitlines() or [type(problem).__name__]
    return f"{names} cannot be read as {form}: {reason[0]}"


def _ending_of(file: Path) -> str:
    """The ending that tells the format, below one of a compression."""
    return (file.with_suffix("") if file.suffix in _COMPRESSIONS else file).suffix


def _format_of(file: Path) -> str:
    ending = _ending_of(file)
    if ending not in _FORMATS:
        raise DataError(
            f"{file} has the unknown ending {ending!r}; expected {listed(list(_FORMATS))}"
        )
    return _FORMATS[ending]


def _is_known(columns: Sequence[str]) -> bool:
    """Whether samples have another form than plain text."""
    known = ({"input_ids"}, {"messages"}, {"conversations"}, {"prompt", "completion"})
    return any(each <= set(columns) for each in known)


def _check_known(columns: Sequence[str], source: Source, text_column: str) -> None:
    if text_column not in columns and not _is_known(columns):
        raise DataError(
            f"{source} has no column {text_column!r}; expected one of its columns "
            f"{listed(columns)} as text_column{suggestion(text_column, columns)}"
        )


def _check_columns(dataset: datasets.Dataset, source: Source, text_column: str) -> None:
    columns = dataset.column_names
    _check_known(columns, source, text_column)
    if text_column not in columns:
        return
    kind = getattr(dataset.features.get(text_column), "dtype", "a list")
    if "input_ids" not in columns and kind not in ("string", "large_string", "null"):
        raise DataError(f"{source}: column {text_column!r} holds {kind}; expected text")
