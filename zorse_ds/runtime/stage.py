"""One pipeline stage on one rank: micro-batches forward and backward through its layers."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from zorse_ds.errors import ModelError
from zorse_ds.ranges import Range
from zorse_ds.runtime.values import Leaf, Message, cut, flatten, merge, unflatten, unpad


@dataclass(slots=True)
class Piece:
    """A part of a micro-batch's inputs, as it came: whose it was, and how it was shaped."""

    window: Range
    shapes: list[tuple[int, ...] | None]


@dataclass(slots=True)
class Input:
    """An input of a stage after it went in: the place of its gradient, but not its values."""

    grad: Tensor | None = None


@dataclass(slots=True)
class Held:
    """What a micro-batch leaves behind between its forward and the end of its backward."""

    size: int
    inputs: list[Input]
    pieces: dict[int, Piece]
    extent: int
    structure: Any = None
    outputs: list[Leaf] = field(default_factory=list)
    """Kept until they have been cut into messages."""
    roots: list["Root | None"] = field(default_factory=list)
    """Where backward starts, for each output; None for one without gradient."""


@dataclass(frozen=True, slots=True)
class Root:
    """The place of an output in the graph, without its values: they need not stay in memory."""

    edge: GradientEdge
    shape: torch.Size
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def of(cls, leaf: Leaf) -> "Root | None":
        """The root of an output that needs a gradient."""
        if not isinstance(leaf, Tensor) or not leaf.requires_grad:
            return None
        return cls(get_gradient_edge(leaf), leaf.shape, leaf.dtype, leaf.device)


class StageRunner:
    """Runs micro-batches through the layers of one stage and keeps what backward needs.

    `forward_fn` maps the value that enters the stage to the value that leaves it; it runs inside
    `saving()`, which may put what autograd saves elsewhere. Knows nothing of messages' transport,
    of data or of the optimizer.
    """

    def __init__(
        self,
        forward_fn: Callable[[Any], Any],
        saving: Callable[[], AbstractContextManager[Any]] = nullcontext,
    ) -> None:
        self.forward_fn = forward_fn
        self.saving = saving
        self.held: dict[int, Held] = {}

    def enter(
        self,
        micro_batch: int,
        size: int,
        arrived: Sequence[tuple[int, Range, Message]],
        train: bool,
    ) -> Any:
        """Join what arrived, `(transfer, window, message)` by sample; returns the stage's input."""
        sizes = [window.size for _, window, _ in arrived]
        message = merge([piece for _, _, piece in arrived], sizes)
        leaves = list(message.leaves)
        inputs = [Input() for _ in leaves]
        if train:
            for i, needs_grad in enumerate(message.needs_grad):
                if needs_grad:
                    leaves[i] = _enter(leaves[i], inputs[i])
        pieces = {index: Piece(window, _shapes(piece)) for index, window, piece in arrived}
        self.held[micro_batch] = Held(size, inputs, pieces, message.extent)
        return unflatten(message.structure, leaves)

    def enter_first(self, micro_batch: int, size: int, extent: int) -> None:
        """Open a micro-batch whose inputs were loaded rather than received."""
        self.held[micro_batch] = Held(size, [], {}, extent)

    def forward(self, micro_batch: int, value: Any) -> Any:
        """Run the layers; the outputs are kept until `drop_outputs`."""
        with self.saving(), _in_place_explained():
            output = self.forward_fn(value)
        held = self.held[micro_batch]
        held.structure, held.outputs = flatten(output)
        held.roots = [Root.of(leaf) for leaf in held.outputs]
        return output

    def drop_outputs(self, micro_batch: int) -> None:
        """Forget the values of the outputs; backward needs only their place in the graph."""
        self.held[micro_batch].outputs = []

    def outgoing(self, micro_batch: int, window: Range) -> Message:
        """The outputs of a window (relative to the micro-batch) as a message."""
        held = self.held[micro_batch]
        return cut(held.structure, held.outputs, held.size, window, held.extent)

    def backward(self, micro_batch: int, grads: Sequence[tuple[Range, Message]]) -> None:
        """Propagate the gradients of the outputs, given by window along the sample axis.

        Parameters accumulate theirs; those of the inputs wait for `outgoing_grad`.
        """
        held = self.held[micro_batch]
        roots, seeds = [], []
        for i, root in enumerate(held.roots):
            pieces = [(window, message.leaves[i]) for window, message in grads]
            seed = None if root is None else _joined_grad(root, pieces)
            if root is not None and seed is not None:
                roots.append(root.edge)
                seeds.append(seed)
        held.roots = []
        if roots:
            torch.autograd.backward(roots, seeds)

    def has_grad(self, micro_batch: int) -> bool:
        """Some output of a micro-batch depends on what is trained."""
        return any(root is not None for root in self.held[micro_batch].roots)

    def backward_from_loss(self, micro_batch: int, loss: Tensor | None) -> None:
        """Propagate from the scaled loss; `None` when the micro-batch has no target."""
        if loss is not None and loss.requires_grad:
            loss.backward()  # type: ignore[no-untyped-call]

    def outgoing_grad(self, micro_batch: int, transfer: int) -> Message:
        """The gradients of the inputs that came with a transfer, shaped as they came."""
        held = self.held[micro_batch]
        piece = held.pieces[transfer]
        leaves: list[Leaf] = [
            unpad(own.grad[piece.window.as_slice()], shape)
            if own.grad is not None and shape is not None
            else None
            for own, shape in zip(held.inputs, piece.shapes, strict=True)
        ]
        blank = [False] * len(leaves)
        return Message(["list", *"*" * len(leaves)], leaves, blank, blank)

    def release(self, micro_batch: int) -> None:
        """Forget a micro-batch."""
        del self.held[micro_batch]


class _Enter(torch.autograd.Function):
    """The identity. Its gradient goes to an `Input`, so that nobody has to keep the values.

    A leaf would be kept for its gradient, and with it what arrived, though the layers may have
    saved nothing of it, or put it into host memory.
    """

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, value: Tensor, target: Input) -> Tensor:
        """`anchor` has no elements; it is there to need a gradient."""
        ctx.target = target
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, None, None]:  # type: ignore[override]
        """The one gradient of the value."""
        ctx.target.grad = grad.contiguous()
        return None, None, None


def _enter(value: Leaf, target: Input) -> Tensor:
    assert isinstance(value, Tensor)
    anchor = torch.empty(0, dtype=value.dtype, device=value.device, requires_grad=True)
    entered: Tensor = _Enter.apply(anchor, value.detach(), target)
    return entered


@contextmanager
def _in_place_explained() -> Iterator[None]:
    """A stage's input is where its graph begins, which a layer must not overwrite."""
    try:
        yield
    except RuntimeError as error:
        if f"{_Enter.__name__} is a view and is being modified inplace" not in str(error):
            raise
        raise ModelError(
            "a stage begins with a layer that overwrites its input (inplace=True); expected one "
            "that does not, or a cut elsewhere"
        ) from error


def _shapes(message: Message) -> list[tuple[int, ...] | None]:
    return [tuple(leaf.shape) if isinstance(leaf, Tensor) else None for leaf in message.leaves]


def _joined_grad(output: Root, pieces: Sequence[tuple[Range, Leaf]]) -> Tensor | None:
    """One gradient for a whole output; parts that nobody used get zeros, none at all gives None."""
    used = [(window, leaf) for window, leaf in pieces if isinstance(leaf, Tensor)]
    if not used:
        return None
    window, only = used[0]
    if window.size == output.shape[0] and only.shape == output.shape:
        return only
    joined = torch.zeros(output.shape, dtype=output.dtype, device=output.device)
    for window, leaf in used:
        joined[window.as_slice()] = leaf
    return joined
