"""Parameters and gradients of a stage as flat vectors, so that any rank can own any slice."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import Parameter

from zorse_ds.ranges import consecutive


@dataclass(frozen=True, slots=True)
class NamedParameter:
    """A parameter and the name it has in the whole model."""

    name: str
    parameter: Parameter


def master_dtype(dtype: torch.dtype) -> torch.dtype:
    """What gradients accumulate and optimizers work in: at least float32."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


class FlatParameters:
    """Parameters of one dtype, laid one behind the other.

    While it is whole, every `parameter.data` is a view of `data`. While gradients are open, every
    gradient goes into `grad` (in `master_dtype`), however many micro-batches contribute; unless
    `accumulates` is false: then somebody takes each micro-batch's gradients (`runtime.rounds`).
    """

    def __init__(self, parameters: Sequence[NamedParameter], accumulates: bool = True) -> None:
        self.names = tuple(named.name for named in parameters)
        self.parameters = tuple(named.parameter for named in parameters)
        self.shapes = tuple(parameter.shape for parameter in self.parameters)
        self.windows = consecutive([parameter.numel() for parameter in self.parameters])
        self.data = torch.cat([parameter.detach().reshape(-1) for parameter in self.parameters])
        self.grad: Tensor | None = None
        self.grad_dtype = master_dtype(self.dtype)
        self._bind()
        if self.grad_dtype != self.dtype and accumulates:
            for i, parameter in enumerate(self.parameters):
                if parameter.requires_grad:
                    parameter.register_post_accumulate_grad_hook(self._accumulator(i))

    @property
    def numel(self) -> int:
        """Elements of the flat vector."""
        return self.data.numel()

    @property
    def dtype(self) -> torch.dtype:
        """The parameters' own dtype."""
        return self.data.dtype

    def release(self) -> None:
        """Free the memory of the values, also where autograd still refers to it.

        Layers save views of their weights for backward, so the storage is what must shrink: views
        find the values again after `restore`. Parameters hold nothing meanwhile, so that nobody
        reads beyond the storage's end.
        """
        self.data.untyped_storage().resize_(0)
        for parameter in self.parameters:
            parameter.data = self.data.new_empty(0)

    def restore(self) -> None:
        """Make room for the values again; the caller fills `data`."""
        self.data.untyped_storage().resize_(self.numel * self.data.element_size())
        self._bind()

    def zero_grads(self) -> Tensor:
        """A zeroed gradient vector."""
        if self.grad is None:
            self.grad = torch.zeros(self.numel, dtype=self.grad_dtype, device=self.data.device)
        else:
            self.grad.zero_()
        return self.grad

    def open_grads(self) -> None:
        """Zeroed gradients that autograd adds to; the values must be whole."""
        self.zero_grads()
        if self.grad_dtype == self.dtype:
            for i, parameter in enumerate(self.parameters):
                parameter.grad = self.grad_of(i)

    def grad_of(self, index: int) -> Tensor:
        """The accumulated gradient of one parameter, in its shape: a view."""
        assert self.grad is not None, "gradients are open only while a step runs"
        return self.grad[self.windows[index].as_slice()].view(self.shapes[index])

    def drop_grads(self) -> None:
        """Free the whole gradient vector."""
        self.grad = None
        for parameter in self.parameters:
            parameter.grad = None

    def _bind(self) -> None:
        for parameter, window, shape in zip(
            self.parameters, self.windows, self.shapes, strict=True
        ):
            parameter.data = self.data[window.as_slice()].view(shape)

    def _accumulator(self, index: int):  # type: ignore[no-untyped-def]
        """Add a low-precision gradient to the float32 sum as soon as autograd made it."""

        def accumulate(parameter: Parameter) -> None:
            if parameter.grad is not None and self.grad is not None:
                self.grad_of(index).add_(parameter.grad)
                parameter.grad = None

        return accumulate
