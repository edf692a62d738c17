"""Times of layers of which only a part is trained."""

from zorse_ds.core.model import LayerShape
from zorse_ds.core.plan import Dtype
from zorse_ds.cost.setting import LayerTimer, PassTimes


class FrozenTimes:
    """A `LayerTimer` that takes the gradients of frozen weights out of another's.

    A matrix product in the forward pass is two in the backward pass, for the gradient of its input
    and of its weight. The latter is needed for the trained share alone.
    """

    def __init__(self, timer: LayerTimer) -> None:
        self._timer = timer

    def __call__(
        self, gpu_type: str, kind: str, shape: LayerShape, dtype: Dtype, seq_len: int, size: int
    ) -> PassTimes:
        """See `LayerTimer`. Estimated where something is frozen."""
        times = self._timer(gpu_type, kind, shape, dtype, seq_len, size)
        if shape.trained_params == shape.num_params:
            return times
        share = shape.trained_params / shape.num_params
        return PassTimes(times.forward_s, times.backward_s * (1 + share) / 2, "estimated")
