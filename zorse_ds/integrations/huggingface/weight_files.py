"""Which files of a Hugging Face folder hold its weights: safetensors, or else torch's `.bin`."""

import hashlib
from dataclasses import dataclass
from pathlib import Path

from zorse_ds.errors import ModelError
from zorse_ds.files import read_json

_END_BYTES = 64 * 1024


@dataclass(frozen=True, slots=True)
class WeightFormat:
    """Names that transformers gives to files of weights."""

    single: str
    index: str


SAFETENSORS = WeightFormat("model.safetensors", "model.safetensors.index.json")
BIN = WeightFormat("pytorch_model.bin", "pytorch_model.bin.index.json")
"""Read without running code from them: torch's `weights_only`."""


def weight_format(folder: Path) -> WeightFormat:
    """The format of the weights in a folder, safetensors first; looks at names only.

    Raises `ModelError` when there are none, or files that an index names are not there.
    """
    for form in (SAFETENSORS, BIN):
        if (folder / form.single).is_file():
            return form
        if (folder / form.index).is_file():
            _named_by(folder / form.index)
            return form
    others = sorted(p.name for p in folder.iterdir() if p.suffix in (".bin", ".gguf", ".pt"))
    raise ModelError(
        f"{folder} holds no weights (found {', '.join(others) or 'none'}); expected "
        f"{SAFETENSORS.single}, {SAFETENSORS.index}, {BIN.single} or {BIN.index}"
    )


def files_of(folder: Path) -> list[Path]:
    """The files of weights: the single one, or those that the index names. Raises as above."""
    form = weight_format(folder)
    single = folder / form.single
    return [single] if single.is_file() else _named_by(folder / form.index)


def _named_by(index: Path) -> list[Path]:
    weight_map = read_json(index, ModelError).get("weight_map", {})
    if not isinstance(weight_map, dict) or not all(
        isinstance(name, str) for name in weight_map.values()
    ):
        raise ModelError(f"{index}: weight_map is no object of file names; expected one")
    files = sorted({index.parent / name for name in weight_map.values()})
    missing = [path.name for path in files if not path.is_file()]
    if missing or not files:
        found = f"{missing[0]}, which is not there" if missing else "no file"
        raise ModelError(f"{index} names {found}; expected the files of all weights")
    return files


def fingerprint_of(folder: Path) -> str:
    """What tells a checkpoint from another: names, sizes and both ends of its files.

    Reads 128 KiB a file.
    """
    digest = hashlib.sha256()
    for path in sorted((*files_of(folder), folder / "config.json")):
        size = path.stat().st_size
        with path.open("rb") as file:
            ends = [file.read(_END_BYTES)]
            file.seek(max(0, size - _END_BYTES))
            ends.append(file.read())
        digest.update(f"{path.name} {size} ".encode() + b"".join(ends))
    return digest.hexdigest()
