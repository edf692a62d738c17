"""Bytes of parameters, gradients and optimizer state of one stage on one rank (ZeRO 0–3)."""

from dataclasses import dataclass

from zorse_ds.core.model import ModelShape
from zorse_ds.core.plan import Dtype
from zorse_ds.cost.dtypes import DTYPE_BYTES, MASTER_BYTES
from zorse_ds.ranges import Range


@dataclass(frozen=True, slots=True)
class StageParams:
    """How many parameters a run of layers has."""

    owned: int
    """With optimizer state here."""
    copied: int
    """Trained copies of what an earlier stage owns."""
    frozen: int = 0
    """Without gradients and optimizer state; copies of tied ones too."""

    @property
    def trained(self) -> int:
        """With gradients."""
        return self.owned + self.copied

    @property
    def held(self) -> int:
        """All of them."""
        return self.trained + self.frozen


def params_of(model: ModelShape, layers: Range) -> StageParams:
    """Parameters of `layers`; a tied matrix is held once within a stage, else copied."""
    shapes = model.shapes[layers.as_slice()]
    held = sum(shape.num_params for shape in shapes)
    frozen = held - sum(shape.trained_params for shape in shapes)
    if not model.tied or layers.stop < model.num_layers:
        return StageParams(held - frozen, 0, frozen)
    shared, trained = tied_numel(model), tied_trained(model)
    if layers.start == 0:
        return StageParams(held - frozen - trained, 0, frozen - (shared - trained))
    return StageParams(held - frozen - trained, trained, frozen)


def tied_numel(model: ModelShape) -> int:
    """Parameters that both ends of a tied model use."""
    return model.shapes[0].num_params if model.tied_params is None else model.tied_params


def tied_trained(model: ModelShape) -> int:
    """Those of them that are trained: all or, where embeddings are frozen, none."""
    return tied_numel(model) if model.shapes[0].trained_params >= tied_numel(model) else 0


@dataclass(frozen=True, slots=True)
class StateBytes:
    """What a stage takes on a rank beside activations, on the device but for `host`."""

    parameters: float
    """All the time."""
    gathered: float
    """More while it is whole (zero level 3)."""
    optimizer: float
    """Masters and moments, all the time."""
    open_gradients: float
    """From its first backward to its reduction; below level 2 all the time."""
    reduced_gradients: float
    """From its reduction to its step."""
    host: float
    """In host memory, at most."""

    def __add__(self, other: "StateBytes") -> "StateBytes":
        return StateBytes(
            self.parameters + other.parameters,
            self.gathered + other.gathered,
            self.optimizer + other.optimizer,
            self.open_gradients + other.open_gradients,
            self.reduced_gradients + other.reduced_gradients,
            self.host + other.host,
        )


def state_bytes(
    params: StageParams,
    zero_level: int,
    share: float,
    dtype: Dtype,
    offload: str = "none",
    optimizer_bytes: int = 8,
) -> StateBytes:
    """State of one stage on a rank with `share` (0–1) of its group's shard weights.

    Linear in `params` for fixed other arguments, so that a search may add up layers.
    """
    element = DTYPE_BYTES[dtype]
    whole = params.held * element
    shard = share * whole if zero_level == 3 else 0.0
    stepped = params.owned * (share if zero_level else 1.0)
    on_host = offload != "none"
    has_master = element != MASTER_BYTES or (on_host and zero_level < 3)
    optimizer = stepped * (optimizer_bytes + (MASTER_BYTES if has_master else 0))
    gradients = stepped * MASTER_BYTES
    open_gradients = params.trained * MASTER_BYTES
    reduced = open_gradients if zero_level < 2 else gradients
    if not on_host:
        parameters = whole if zero_level < 3 else shard
        gathered = whole if zero_level == 3 else 0.0
        return StateBytes(parameters, gathered, optimizer, open_gradients, reduced, 0.0)
    host = optimizer + gradients + shard
    if zero_level == 3:
        return StateBytes(0.0, whole, 0.0, open_gradients, 0.0, host)
    kept = open_gradients if zero_level < 2 else 0.0
    return StateBytes(whole, 0.0, 0.0, open_gradients, kept, host)
