"""Memory in which the gradients of several parameters lie side by side, so that an exchange need not copy them."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from topkube import kernels
from topkube.training.exchange.buckets.parameter import KERNEL_TYPES, Parameter, is_sharded
from topkube.training.exchange.buckets.storage import is_shared


def may_move(tensor: torch.Tensor) -> bool:
    """Return True if the gradients of this parameter may lie anywhere: they are dense and contiguous, on a CPU."""
    is_plain = not is_sharded(tensor) and not tensor.is_complex() and tensor.layout is torch.strided
    return is_plain and tensor.device.type == "cpu" and tensor.is_contiguous()


MOVED_BYTES = 64 << 10
"""Gradients of this size move when they arrive. Moving a smaller one would take longer than copying it to the others
and back, which one call of a kernel does for all of them."""


class GradientMemory:
    """Memory in which the gradients of a part of a bucket lie side by side. Gradients of MOVED_BYTES and more move here
    when backward has produced them, and stay until they are zeroed: an exchange does not copy them. Smaller gradients
    are copied for the exchange; until then they lie where autograd put them, as without TopKube. With
    `begin_backward(moves_all=True)`, all move. Gradients that a script keeps do not change: a part gets new memory if
    the script still refers to gradients of an earlier step."""

    def __init__(self, parameters: Sequence[Parameter], dtype: torch.dtype) -> None:
        self._parameters, self._dtype, self._length = parameters, dtype, 0
        self._starts: dict[int, int] = {}
        """The first element of each parameter, by its index."""
        for parameter in parameters:
            self._starts[parameter.index] = self._length
            self._length += parameter.length
        self._values: torch.Tensor | None = None
        self._is_free, self._moves_all = False, False

    def begin_backward(self, moves_all: bool) -> None:
        """Note that a backward pass begins: the next gradient checks if the memory is free."""
        self._is_free, self._moves_all = False, moves_all

    def take_in(self, parameter: Parameter) -> bool:
        """Move the parameter's gradient here, unless it is small: `collect` then copies it. Return False if it must
        stay where it is."""
        gradient, start = parameter.tensor.grad, self._starts[parameter.index]
        if gradient is None:
            return False
        if not self._moves_all and gradient.nbytes < MOVED_BYTES and self._dtype in KERNEL_TYPES:
            parameter.is_deferred = True
            return True
        if parameter.stash is not None or gradient.requires_grad or not gradient.is_contiguous():
            return False
        values = self._open()
        if self._holds(gradient, start):
            return True
        if not parameter.grad_was_none:  # the script chose this memory
            return False
        storage, shape = values.untyped_storage(), parameter.tensor.shape
        view = torch.empty(0, dtype=gradient.dtype).set_(storage, start, shape, gradient.stride())
        view.copy_(gradient)
        parameter.replace_gradient(view)
        return True

    def collect(self) -> torch.Tensor | None:
        """Return the gradients of all parameters side by side. Copy small ones that are not here. Return None if a
        gradient is absent, not of this backward alone, or large and somewhere else."""
        gradients = [parameter.tensor.grad for parameter in self._parameters]
        for parameter, gradient in zip(self._parameters, gradients, strict=True):
            if gradient is None or parameter.stash is not None or not parameter.is_local:
                return None
            if not parameter.tensor.requires_grad or not gradient.is_contiguous() or gradient.is_neg():
                return None
            if self._values is None and gradient.nbytes >= MOVED_BYTES:
                return None
        values, copied, starts = self._open(), list[torch.Tensor](), list[int]()
        for parameter, gradient in zip(self._parameters, gradients, strict=True):
            start = self._starts[parameter.index]
            if gradient is None or self._holds(gradient, start):
                continue
            if gradient.nbytes >= MOVED_BYTES or self._dtype not in KERNEL_TYPES:
                return None
            copied.append(gradient)
            starts.append(start)
        if copied:
            kernels.gather_(values, copied, starts)
        return values

    def _open(self) -> torch.Tensor:
        """Return the memory. The first call of a backward checks if it is free."""
        if not self._is_free or self._values is None:
            self._take_memory()
        assert self._values is not None
        return self._values

    def _holds(self, gradient: torch.Tensor | None, start: int) -> bool:
        values = self._values
        if values is None or gradient is None:
            return False
        return gradient.data_ptr() == values.data_ptr() + start * values.itemsize and gradient.is_contiguous()

    def _take_memory(self) -> None:
        """Take new memory if a tensor uses the old memory that is not a gradient of this part."""
        self._is_free = True
        if self._values is not None:
            gradients = sum(self._holds(p.tensor.grad, self._starts[p.index]) for p in self._parameters)
            if not is_shared(self._values, others=gradients):
                return
        self._values = torch.empty(self._length, dtype=self._dtype)
