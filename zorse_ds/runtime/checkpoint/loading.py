"""Reading a checkpoint together: found, verified and compared with the model before it is used."""

from pathlib import Path

from zorse_ds.core.checkpoint.folder import MANIFEST_NAME, CheckpointFolder
from zorse_ds.core.checkpoint.manifest import STATE, Manifest
from zorse_ds.core.checkpoint.sums import SUMS_NAME, checksum_of, damaged, verified_names
from zorse_ds.errors import CheckpointError
from zorse_ds.runtime.checkpoint.capture import merged_shapes
from zorse_ds.runtime.checkpoint.exchange import Attempts, Exchange
from zorse_ds.runtime.checkpoint.files import CheckpointReader
from zorse_ds.runtime.checkpoint.holdings import RankState, holdings_of
from zorse_ds.runtime.checkpoint.restore import model_problems, optimizer_state, read_values


def open_checkpoint(path: Path) -> CheckpointReader:
    """Read and verify the manifest and all other small files of one checkpoint.

    Raises `CheckpointError` that names a damaged file.
    """
    names = verified_names(path)
    if MANIFEST_NAME not in names:
        raise damaged(path / SUMS_NAME, f"it does not list {MANIFEST_NAME}")
    where = path / MANIFEST_NAME
    manifest = Manifest.from_json(where.read_text(encoding="utf-8"), str(where))
    return CheckpointReader(path, manifest)


def open_together(root: str | Path, tag: str | None, exchange: Exchange) -> CheckpointReader | None:
    """The checkpoint of a tag, or the one that `latest` names; None when there is no `latest`.

    Raises `CheckpointError` on every rank alike. Collective: every rank.
    """
    attempts = Attempts(exchange, f"loading from {root}")
    reader: CheckpointReader | None = None
    with attempts.attempt():
        folder = CheckpointFolder(root)
        wanted = folder.latest() if tag is None else str(tag)
        if wanted is not None:
            reader = open_checkpoint(folder.find(wanted))
    text = reader.manifest.to_json() if reader is not None else ""
    seen = attempts.agree(checksum_of(text.encode()))
    if len(set(seen)) > 1:
        raise CheckpointError(
            f"the ranks do not see the same checkpoint in {root}; expected a folder that all ranks "
            "share, and the same tag on every rank"
        )
    return reader


def load_together(
    reader: CheckpointReader,
    state: RankState,
    exchange: Exchange,
    *,
    strict: bool = True,
    with_optimizer: bool = True,
) -> None:
    """Fill a rank's parameters, masters, buffers and optimizer state.

    Raises `CheckpointError` on every rank alike: for another model before anything is changed; for
    a damaged file, values may have been overwritten, and what is trained on must be loaded again.
    With `strict` false, parameters that only one side has are passed over. Collective: every rank.
    """
    attempts = Attempts(exchange, f"loading {reader.folder}")
    _check_model(reader, state, attempts, strict)
    found = {}
    with attempts.attempt():
        _verify_share(reader, exchange)
        read_values(reader, state)
        if with_optimizer:
            found = optimizer_state(reader, reader.manifest, state)
    attempts.agree()
    if state.optimizer is not None:
        if with_optimizer:
            state.optimizer.load_inner(found)
        state.optimizer.republish()


def _check_model(
    reader: CheckpointReader, state: RankState, attempts: Attempts, strict: bool
) -> None:
    """Compare with the names and shapes of all ranks. Collective."""
    trained = [] if state.optimizer is None else state.optimizer.buckets
    names = {name for bucket in trained for name in bucket.flat.names}
    own = {holding.name: holding.shape for holding in holdings_of(state)}
    told = attempts.agree((own, own.keys() - names))
    shapes = merged_shapes([shapes for shapes, _ in told])
    frozen = set().union(*(frozen for _, frozen in told))
    problems = model_problems(reader.manifest, shapes, frozen, str(reader.folder), strict)
    if problems:
        raise CheckpointError("\n".join(problems))


def _verify_share(reader: CheckpointReader, exchange: Exchange) -> None:
    """What nobody may happen to read is verified as well, by the ranks in turns."""
    for file in reader.manifest.files[exchange.rank :: exchange.size]:
        reader.verify_header(file)
        reader.verify(file, [STATE])
