"""Writing a checkpoint together: every rank its own file, the first rank the manifest.

The folder gets its name when everything is on the disk, and `latest` names it after that. On any
error all ranks raise the same sentence and older checkpoints are as they were.
"""

import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zorse_ds.core.checkpoint.folder import (
    MANIFEST_NAME,
    CheckpointFolder,
    check_tag,
    sync_file,
)
from zorse_ds.core.checkpoint.manifest import DataFile, Manifest
from zorse_ds.core.checkpoint.sums import SUMS_NAME, sums_text
from zorse_ds.errors import CheckpointError
from zorse_ds.runtime.checkpoint.capture import Capture
from zorse_ds.runtime.checkpoint.exchange import Attempts, Exchange
from zorse_ds.runtime.checkpoint.files import write_entries

MODEL_FOLDER = "model"
"""Where the files lie that describe the model: configuration and tokenizer."""


@dataclass(frozen=True, slots=True)
class SaveRequest:
    """What is saved beside the tensors; `state` and `write_model_files` are the first rank's."""

    root: str | Path
    tag: str
    plan: dict[str, Any]
    state: Any
    """As `plain.encode` gives it."""
    versions: dict[str, str]
    write_model_files: Callable[[Path], None] | None = None
    """Fills a folder with what describes the model."""
    is_latest: bool = True
    keep_last: int | None = None
    frozen_left_out: bool = False


def data_file_name(rank: int) -> str:
    """Name of the file that a rank writes."""
    return f"rank-{rank:05d}.safetensors"


def save(
    request: SaveRequest | None,
    capture: Capture | None,
    exchange: Exchange,
    attempts: Attempts | None = None,
) -> Path:
    """Write a checkpoint and make it visible; returns its folder.

    Both may be None where preparing them failed within `attempts`. Raises `CheckpointError` on
    every rank alike. Collective: every rank, with the same request but for `state`.
    """
    attempts = attempts or Attempts(exchange, "saving a checkpoint")
    places = attempts.agree(None if request is None else f"{request.tag} in {request.root}")
    assert request is not None and capture is not None, "an error was agreed on"
    if len(set(places)) > 1:
        raise CheckpointError(
            f"the ranks save {' and '.join(sorted(set(places)))}; expected the same folder and tag "
            "on every rank"
        )
    attempts = Attempts(exchange, f"saving {places[0]}")
    first = exchange.rank == 0
    with attempts.attempt():
        check_tag(request.tag)
        folder = CheckpointFolder(request.root)
        if first:
            folder.begin(request.tag)
    attempts.agree()
    try:
        return _fill(request, capture, exchange, folder, attempts)
    except BaseException:
        if first:
            folder.abandon(request.tag)
        raise


def _fill(
    request: SaveRequest,
    capture: Capture,
    exchange: Exchange,
    folder: CheckpointFolder,
    attempts: Attempts,
) -> Path:
    unfinished = folder.incomplete(request.tag)
    written: DataFile | None = None
    with attempts.attempt():
        written = write_entries(unfinished / data_file_name(exchange.rank), capture.entries)
    told = attempts.agree((written, capture.shapes, capture.parameters))
    with attempts.attempt():
        if exchange.rank == 0:
            manifest = _manifest(request, told)
            _write_small_files(request, unfinished, manifest)
            folder.commit(request.tag, is_latest=request.is_latest)
            if request.keep_last is not None:
                folder.prune(request.keep_last)
    attempts.agree()
    return folder.path(request.tag)


def _manifest(
    request: SaveRequest,
    told: list[tuple[DataFile, dict[str, tuple[int, ...]], dict[str, dict[str, Any]]]],
) -> Manifest:
    shapes = {name: shape for _, own, _ in told for name, shape in own.items()}
    parameters: dict[str, dict[str, Any]] = {}
    for _, _, own_parameters in told:
        for name, scalars in own_parameters.items():
            # A rank that holds nothing of a parameter knows nothing of its optimizer.
            parameters[name] = parameters.get(name) or scalars
    return Manifest(
        tag=request.tag,
        plan=request.plan,
        versions=request.versions,
        shapes=shapes,
        parameters=parameters,
        frozen_left_out=request.frozen_left_out,
        state=request.state,
        files=tuple(file for file, _, _ in told),
    )


def _write_small_files(request: SaveRequest, folder: Path, manifest: Manifest) -> None:
    names = [MANIFEST_NAME]
    (folder / MANIFEST_NAME).write_text(manifest.to_json(), encoding="utf-8")
    if request.write_model_files is not None:
        model = folder / MODEL_FOLDER
        model.mkdir()
        request.write_model_files(model)
        files = sorted(path for path in model.rglob("*") if path.is_file())
        names += [str(path.relative_to(folder)) for path in files]
    (folder / SUMS_NAME).write_text(sums_text(folder, names), encoding="ascii")
    for name in (*names, SUMS_NAME):
        sync_file(folder / name)


class BackgroundSave:
    """A `save` that runs beside training, from memory that training does not touch.

    `exchange` must not be used by others meanwhile.
    """

    def __init__(
        self,
        request: SaveRequest | None,
        capture: Capture | None,
        exchange: Exchange,
        attempts: Attempts | None = None,
    ) -> None:
        self._error: BaseException | None = None
        self._arguments = (request, capture, exchange, attempts)
        # A daemon: a rank that fails while it trains must be able to exit.
        self._thread = threading.Thread(target=self._run, name="checkpoint", daemon=True)
        self._thread.start()

    @property
    def is_done(self) -> bool:
        """Nothing is left to write."""
        return not self._thread.is_alive()

    def wait(self) -> None:
        """Block until it is done. Raises what it raised: the same on every rank."""
        self._thread.join()
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    def _run(self) -> None:
        try:
            save(*self._arguments)
        except BaseException as error:
            self._error = error
