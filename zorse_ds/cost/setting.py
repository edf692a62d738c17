"""What a plan is judged in: cluster, model, how long its layers take, and the data's length."""

from dataclasses import dataclass
from typing import Literal, Protocol

from zorse_ds.core.cluster import Cluster
from zorse_ds.core.model import LayerShape, ModelShape, Role
from zorse_ds.core.plan import Dtype
from zorse_ds.core.profile import Profile

Source = Literal["measured", "interpolated", "estimated"]


@dataclass(frozen=True, slots=True)
class PassTimes:
    """Seconds of one layer for one micro-batch, and where they come from."""

    forward_s: float
    backward_s: float
    """Without recompute."""
    source: Source


class LayerTimer(Protocol):
    """Knows how long a layer takes. Must be quick and pure: callers ask often."""

    def __call__(
        self, gpu_type: str, kind: str, shape: LayerShape, dtype: Dtype, seq_len: int, size: int
    ) -> PassTimes:
        """Seconds of one layer of `kind` for `size` samples of `seq_len` tokens."""


@dataclass(frozen=True, eq=False)
class Setting:
    """Everything beside the plan that decides seconds and bytes.

    Equal to itself alone, so that what is derived from it can be kept by it.
    """

    cluster: Cluster
    model: ModelShape
    timer: LayerTimer
    seq_len: int
    dtype: Dtype = "bfloat16"
    """Of groups that name none of their own."""
    optimizer_bytes: int = 8
    """State of the optimizer per parameter: two float32 moments of Adam."""
    reserve_bytes: int = 1 << 30
    """Of each GPU, for the CUDA context, communication buffers and fragmentation."""
    profile: Profile | None = None
    """Measured bytes of layers and seconds of the optimizer; what it lacks is estimated."""
    recomputed: tuple[Role, ...] = ("block",)
    """Layers that recompute takes: blocks of Hugging Face models, all of a list of layers."""
    step_workspace_bytes: int = 0
    """Of the optimizer's step per parameter: none if fused, 8 for torch's own Adam."""
    may_offload: bool = True
    """Plans may keep state in host memory."""

    def recomputes(self, layer: int) -> bool:
        """Whether recompute takes a pipeline layer."""
        return self.model.shapes[layer].role in self.recomputed
