"""Weights out of a checkpoint that stock DeepSpeed's `PipelineModule` saved, one file a layer."""

import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from zorse_ds.core.checkpoint.folder import MANIFEST_NAME, CheckpointFolder
from zorse_ds.errors import CheckpointError
from zorse_ds.runtime.checkpoint.exchange import Attempts, Exchange
from zorse_ds.runtime.checkpoint.holdings import RankState, buffers_of, holdings_of


def is_stock(root: Any, tag: Any) -> bool:
    """The folder of that tag (default: the latest) holds `layer_XX-model_states.pt` files."""
    try:
        path = _folder_of(root, tag)
    except CheckpointError:
        return False
    return not (path / MANIFEST_NAME).exists() and any(path.glob("layer_*-model_states.pt"))


def load_stock(root: Any, tag: Any, state: RankState, source: Any, exchange: Exchange) -> Path:
    """Fill parameters and buffers; returns the folder.

    Nothing but weights is taken: the state of stock optimizers is cut by the plan of that run.
    Files are read without executing anything (`weights_only`). Raises `CheckpointError` on every
    rank alike. Collective: every rank.
    """
    attempts = Attempts(exchange, f"loading {root}")
    folder = None
    with attempts.attempt():
        folder = _folder_of(root, tag)
        layers = StockLayers(folder, source)
        with torch.no_grad():
            for holding in holdings_of(state):
                saved = layers.tensor(holding.name, holding.shape)
                holding.values.copy_(saved.reshape(-1)[holding.window.as_slice()])
            for name, buffer, _ in buffers_of(state):
                buffer.copy_(layers.tensor(name, tuple(buffer.shape)))
    attempts.agree()
    assert folder is not None, "an error was agreed on"
    if state.optimizer is not None:
        state.optimizer.republish()
    return folder


class StockLayers:
    """The tensors of a stock checkpoint by the name they have in the whole model here."""

    def __init__(self, folder: Path, source: Any) -> None:
        if not hasattr(source, "layer_places"):
            raise CheckpointError(
                f"{folder} is a checkpoint of stock DeepSpeed, which names layers by number; "
                "expected a model made of a list of layers"
            )
        self._folder, self._places_of = folder, source.layer_places
        self._layers: dict[int, Mapping[str, Tensor]] = {}

    def tensor(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """One tensor. Raises `CheckpointError` when it is not there or of another shape."""
        (first, *others), local = self._places_of(name)
        saved = self._tensor_of(first, local, name, shape)
        for layer in others:
            # Stock DeepSpeed ties one attribute of a layer, here the whole layer is tied.
            if not torch.equal(self._tensor_of(layer, local, name, shape), saved):
                raise CheckpointError(
                    f"{self._folder} has another {local} in layer {layer} than in layer {first}; "
                    "expected the same, for layers tied by a key share all their parameters"
                )
        return saved

    def _tensor_of(self, layer: int, local: str, name: str, shape: tuple[int, ...]) -> Tensor:
        if layer not in self._layers:
            self._layers[layer] = self._read(layer)
        saved = self._layers[layer].get(local)
        if saved is None or tuple(saved.shape) != shape:
            found = "no such tensor" if saved is None else f"shape {list(saved.shape)}"
            raise CheckpointError(
                f"{self._folder} has {found} for {name} (layer {layer}, {local}), but the model "
                f"has shape {list(shape)}; expected a checkpoint of the same list of layers"
            )
        return saved

    def _read(self, layer: int) -> Mapping[str, Tensor]:
        """One file, mapped into memory: only what is used is read."""
        paths = sorted(self._folder.glob(f"layer_{layer:02d}-*model_states.pt"))
        if len(paths) != 1:
            raise CheckpointError(
                f"{self._folder} has {len(paths)} files for layer {layer}; expected one "
                f"layer_{layer:02d}-model_states.pt, saved without tensor parallelism"
            )
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                saved: Mapping[str, Tensor] = torch.load(
                    paths[0], map_location="cpu", weights_only=True, mmap=True
                )
        except Exception as problem:  # a damaged file shows itself in many ways
            reason = (str(problem).strip() or type(problem).__name__).splitlines()[0]
            raise CheckpointError(
                f"{paths[0]} cannot be read ({reason}); expected tensors alone, as torch.save "
                "writes them"
            ) from problem
        return saved


def _folder_of(root: Any, tag: Any) -> Path:
    folder = CheckpointFolder(root)
    wanted = folder.latest() if tag is None else str(tag)
    if wanted is None:
        raise CheckpointError(f"{root} has no file 'latest'; expected one, or a tag")
    return folder.path(wanted)
