"""`save_checkpoint` and `load_checkpoint` of the engine: DeepSpeed's calls, for any plan."""

import atexit
import sys
from collections.abc import Mapping
from typing import Any

import deepspeed
import torch
from deepspeed.utils import logger

from zorse_ds.core.checkpoint.manifest import STATE
from zorse_ds.core.checkpoint.plain import encode
from zorse_ds.integrations.deepspeed import checkpoint_state as parts_of
from zorse_ds.integrations.deepspeed.checkpoint_stock import is_stock, load_stock
from zorse_ds.runtime.checkpoint.capture import Capture, HostCopy, capture
from zorse_ds.runtime.checkpoint.exchange import Attempts, DistExchange
from zorse_ds.runtime.checkpoint.files import CheckpointReader
from zorse_ds.runtime.checkpoint.holdings import RankState
from zorse_ds.runtime.checkpoint.loading import load_together, open_together
from zorse_ds.runtime.checkpoint.saving import BackgroundSave, SaveRequest, save

_LONGEST_WRITE_S = 3600.0
"""How much longer than the others a rank may write or read."""


class Checkpoints:
    """Saves and loads one engine. Every method is collective: all ranks call it alike."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self._settings = engine.parts.settings.checkpoint
        self._exchange: DistExchange | None = None
        self._host = HostCopy()
        self._running: BackgroundSave | None = None
        self.place: str | None = self._settings.folder
        """Where SIGTERM saves."""
        self._client_state: Mapping[str, Any] = {}

    def save(
        self, root: Any, tag: Any, client_state: Mapping[str, Any], is_latest: bool, frozen: bool
    ) -> None:
        """See `ZorseEngine.save_checkpoint`."""
        self.wait()
        self._remember(root, client_state)
        exchange = self._opened()
        attempts = Attempts(exchange, f"saving a checkpoint in {root}")
        request, taken = None, None
        # In the background ranks agree later: here training waits for nothing but the copy.
        with attempts.attempt():
            request, taken = self._request(root, tag, client_state, is_latest, frozen)
            if self._settings.in_background:
                taken = self._host.take(taken)
        if not self._settings.in_background:
            save(request, taken, exchange, attempts)
            return
        self._running = BackgroundSave(request, taken, exchange, attempts)
        atexit.register(self._at_exit)

    def load(
        self,
        root: Any,
        tag: Any,
        *,
        strict: bool,
        optimizer: bool,
        scheduler: bool,
        module_only: bool,
    ) -> tuple[str | None, dict[str, Any] | None]:
        """See `ZorseEngine.load_checkpoint`."""
        self.wait()
        self._remember(root, {})
        exchange, state = self._opened(), self._rank_state()
        if any(exchange.gather_objects(is_stock(root, tag))):
            folder = load_stock(root, tag, state, self._engine.module.source, exchange)
            return str(folder), {}
        reader = open_together(root, tag, exchange)
        if reader is None:
            logger.warning(f"{root} has no file 'latest', so no checkpoint was loaded")
            return None, None
        saved, client = self._read_state(reader, exchange)
        self._client_state = client
        with_optimizer = optimizer and not module_only
        self._check(saved, exchange, with_optimizer, module_only)
        load_together(reader, state, exchange, strict=strict, with_optimizer=with_optimizer)
        if not module_only:
            self._restore(reader, saved, with_optimizer, scheduler)
        return str(reader.folder), client

    def save_at_notice(self) -> str:
        """Save where the script last saved or loaded, with that client state; returns the path."""
        assert self.place is not None, "there is a place to save in"
        self.save(self.place, None, self._client_state, True, True)
        self.wait()
        return f"{self.place}/global_step{self._engine.global_steps}"

    def _remember(self, root: Any, client_state: Mapping[str, Any]) -> None:
        self.place = self._settings.folder or str(root)
        self._client_state = client_state

    def poll(self) -> None:
        """Take note of a save that ended in the background; raise what it raised.

        Costs an exchange of one object a rank while one runs, nothing else.
        """
        if self._running is None:
            return
        if all(self._engine.parts.world.gather_objects(self._running.is_done)):
            self.wait()

    def wait(self) -> None:
        """Wait for a save in the background; raise what it raised."""
        running, self._running = self._running, None
        if running is not None:
            atexit.unregister(self._at_exit)
            running.wait()

    def _at_exit(self) -> None:
        """A program that ends well has its last checkpoint; one that failed is not held up."""
        if self._running is not None and getattr(sys, "last_value", None) is None:
            self._running.wait()

    def _opened(self) -> DistExchange:
        if self._exchange is None:
            timeout_s = self._engine.parts.settings.timeout_s
            self._exchange = DistExchange(max(timeout_s, _LONGEST_WRITE_S))
        return self._exchange

    def _rank_state(self) -> RankState:
        engine = self._engine
        sharded = None if engine.optimizer is None else engine.optimizer.sharded
        module = engine.module
        return RankState(engine.global_rank, engine.plan, module.ties, module.stage_models, sharded)

    def _request(
        self,
        root: Any,
        tag: Any,
        client_state: Mapping[str, Any],
        is_latest: bool,
        frozen: bool,
    ) -> tuple[SaveRequest, Capture]:
        """What to save, with the client's tensors in the first rank's part."""
        engine = self._engine
        taken = capture(self._rank_state(), with_frozen=frozen)
        taken = taken.with_state(f"rank/{engine.global_rank}", parts_of.rng_tensor())
        state = None
        if engine.global_rank == 0:
            tensors = parts_of.ClientTensors()
            state = encode(parts_of.engine_state(engine), "the engine", tensors.keep)
            state["client_state"] = encode(dict(client_state), "client_state", tensors.keep)
            for name, tensor in tensors.by_name.items():
                taken = taken.with_state(name, tensor)
        request = SaveRequest(
            root=root,
            tag=f"global_step{engine.global_steps}" if tag is None else str(tag),
            plan=engine.plan.to_dict(),
            state=state,
            versions={"torch": torch.__version__, "deepspeed": deepspeed.__version__},
            write_model_files=getattr(engine.module.source, "write_model_files", None),
            is_latest=is_latest,
            keep_last=self._settings.keep_last,
            frozen_left_out=not frozen,
        )
        return request, taken

    def _read_state(
        self, reader: CheckpointReader, exchange: DistExchange
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """The engine's state, and the client's."""
        attempts = Attempts(exchange, f"loading {reader.folder}")
        state: dict[str, Any] = {}
        with attempts.attempt():
            names = [name for name in reader.manifest.shapes if name.startswith("client/")]
            tensors = {name: reader.read_whole(STATE, name) for name in names}
            state = parts_of.revived(reader.manifest.state, tensors)
        attempts.agree()
        return state, state.pop("client_state")

    def _check(
        self,
        saved: Mapping[str, Any],
        exchange: DistExchange,
        with_optimizer: bool,
        module_only: bool,
    ) -> None:
        attempts = Attempts(exchange, "comparing the checkpoint with this run")
        with attempts.attempt():
            if with_optimizer:
                parts_of.check_optimizer(self._engine, saved)
            if not module_only:
                parts_of.check_data(self._engine, saved)
        attempts.agree()

    def _restore(
        self,
        reader: CheckpointReader,
        saved: Mapping[str, Any],
        with_optimizer: bool,
        with_scheduler: bool,
    ) -> None:
        """All but tensors of the model and optimizer."""
        engine = self._engine
        parts_of.restore_counters(engine, saved)
        parts_of.restore_data(engine, saved)
        if with_optimizer or with_scheduler:
            parts_of.restore_param_groups(engine, saved, rates_only=not with_optimizer)
        if with_scheduler:
            parts_of.restore_scheduler(engine, saved)
        name = f"rank/{engine.global_rank}"
        # A rank that was not there goes on with the random numbers that it has.
        if reader.lookup.has(STATE, name):
            parts_of.restore_rng(reader.read_whole(STATE, name))
