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
    pattern: str


SAFETENSORS = WeightFormat("model.safetensors", "model.safetensors.index.json", "*.safetensors")
BIN = WeightFormat("pytorch_model.bin", "pytorch_model.bin.index.json", "pytorch_model*.bin")
"""Read without running code from them: torch's `weights_only`, and mapped, not copied."""


def weight_format(folder: Path) -> WeightFormat:
    """The format of the weights in a folder, safetensors first; looks at names only.

    Raises `ModelError` when there are none, or files that an index names are not there.
    """
    for form in (SAFETENSORS, BIN):
        if (folder / form.single).is_file():
            return form
        if (folder / form.index).is_file():
            _check_index(folder, folder / form.index)
            return form
    others = sorted(p.name for p in folder.iterdir() if p.suffix in (".bin", ".gguf", ".pt"))
    raise ModelError(
        f"{folder} holds no weights (found {', '.join(others) or 'none'}); expected "
        f"{SAFETENSORS.single}, {SAFETENSORS.index}, {BIN.single} or {BIN.index}"
    )


def _check_index(folder: Path, index: Path) -> None:
    weight_map = read_json(index, ModelError).get("weight_map", {})
    if not isinstance(weight_map, dict) or not all(
        isinstance(name, str) for name in weight_map.values()
    ):
        raise ModelError(f"{index}: weight_map is no object of file names; expected one")
    files = set(weight_map.values())
    missing = sorted(name for name in files if not (folder / name).is_file())
    if missing or not files:
        found = f"{missing[0]}, which is not there" if missing else "no file"
        raise ModelError(f"{index} names {found}; expected the files of all weights")


def fingerprint_of(folder: Path) -> str:
    """What tells a checkpoint from another: names, sizes and both ends of its files.

    Reads 128 KiB a file.
    """
    digest = hashlib.sha256()
    weights = folder.glob(weight_format(folder).pattern)
    for path in sorted((*weights, folder / "config.json")):
        size = path.stat().st_size
        with path.open("rb") as file:
            ends = [file.read(_END_BYTES)]
            file.seek(max(0, size - _END_BYTES))
            ends.append(file.read())
        digest.update(f"{path.name} {size} ".encode() + b"".join(ends))
    return digest.hexdigest()
