"""The delivery of reduced gradients into `.grad`, with what the gradients of earlier backwards have left there."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from topkube import kernels
from topkube.collectives.device.memory import Mark
from topkube.collectives.device.pipeline import DeviceAllReduce
from topkube.training.exchange.buckets.bucket import Bucket
from topkube.training.exchange.buckets.parameter import KERNEL_TYPES, Parameter, view_real
from topkube.training.exchange.reduction.grad_mode import without_grad
from topkube.training.exchange.reduction.staging import copy_each

Pair = tuple[torch.Tensor, torch.Tensor]
"""A tensor to write, and the values for it."""


class Delivery:
    """The delivery of means to the parameters of one optimizer. With `on_device`, it keeps the memory of tensors that
    the streams of the caller and of the exchange share. `mark` is the mark of the bucket (see `BucketExchange.run`)."""

    def __init__(self, on_device: DeviceAllReduce | None) -> None:
        self._on_device = on_device

    @without_grad
    def deliver(self, bucket: Bucket, flat: torch.Tensor, mark: Mark | None) -> None:
        """Write the means in `flat`, shape (length,), into `.grad`, or add them to it, with a few launches for all
        parameters."""
        pairs = zip(bucket.parameters, bucket.starts, strict=False)
        trainable = [(parameter, start) for parameter, start in pairs if parameter.tensor.requires_grad]
        copies, adds, stashes = list[Pair](), list[Pair](), list[Pair]()
        scattered, starts = list[torch.Tensor](), list[int]()
        address, itemsize = flat.data_ptr(), flat.element_size()
        for parameter, start in trainable:
            is_new = parameter.tensor.grad is None
            if is_new:
                parameter.is_created = True
                parameter.tensor.grad = torch.empty_like(parameter.tensor, dtype=parameter.gradient_dtype)
                self._lend(parameter.tensor.grad, mark)
            gradient = view_real(parameter.tensor.grad)
            is_added = parameter.is_aggregated and not is_new
            if is_added or gradient.data_ptr() != address + start * itemsize:  # otherwise it is there
                if parameter.is_deferred and not is_added:
                    parameter.copy_shared_gradient()
                    gradient = view_real(parameter.tensor.grad)
                if self._can_scatter(gradient, flat) and not is_added:
                    scattered.append(gradient)
                    starts.append(start)
                else:
                    piece = flat[start : start + parameter.length].view(gradient.shape)
                    (adds if is_added else copies).append((gradient, piece))
            if parameter.stash is not None:
                stashes.append((view_real(parameter.stash), gradient))
        if scattered:
            kernels.scatter_(scattered, flat, starts)
        for chosen, act in ((copies, copy_each), (adds, torch._foreach_add_), (stashes, torch._foreach_add_)):
            if chosen:
                act([target for target, _ in chosen], [source for _, source in chosen])
        for parameter, _ in trainable:
            if parameter.stash is not None:  # the script may hold a reference: it stays the gradient
                self._borrow(parameter.tensor.grad)
                parameter.tensor.grad = parameter.stash
            parameter.deliver()

    def _can_scatter(self, gradient: torch.Tensor, flat: torch.Tensor) -> bool:
        """Return True if a kernel can copy the gradient from `flat`, together with others."""
        if self._on_device is not None or flat.dtype not in KERNEL_TYPES:
            return False
        return gradient.dtype == flat.dtype and gradient.is_contiguous() and not gradient.is_neg()

    def deliver_rows(self, parameter: Parameter, mean: torch.Tensor, mark: Mark | None) -> None:
        """Replace `.grad` by `mean`, a sparse tensor, plus what was aggregated before."""
        if parameter.is_aggregated and parameter.tensor.grad is not None:
            mean = mean + parameter.tensor.grad
        if parameter.stash is not None:
            mean = mean + parameter.stash
        self._lend(mean, mark)
        self._borrow(parameter.tensor.grad, parameter.stash)
        parameter.is_created = parameter.tensor.grad is None
        parameter.tensor.grad = mean
        parameter.deliver()

    def deliver_alone(self, parameters: Sequence[Parameter]) -> bool:
        """Deliver gradients as they are, in a world of one rank. Return True if they are finite; on a device, `flush`
        reports that. Gradients that are not finite are delivered too: the end of backward then skips the step, as with
        several ranks."""
        present = [(p, gradient) for p in parameters if (gradient := p.tensor.grad) is not None]
        gradients, finite = [view_real(gradient) for _, gradient in present], True
        if self._on_device is None:
            finite = _are_finite(gradients)
        else:
            self._on_device.check_later([gradient for gradient in gradients if gradient.numel()])
        for parameter, gradient in present:
            if parameter.stash is not None:
                parameter.stash.add_(gradient)
                self._borrow(gradient)
                parameter.tensor.grad = parameter.stash
            parameter.deliver(is_written=False)  # torch notes its own writes
        return finite

    def _borrow(self, *tensors: torch.Tensor | None) -> None:
        """Keep the memory of the caller's tensors, which lose their last reference here, until this exchange has read
        them."""
        if self._on_device is not None:
            for tensor in tensors:
                if tensor is not None:
                    self._on_device.memory.borrow(tensor)

    def _lend(self, tensor: torch.Tensor, mark: Mark | None) -> None:
        """Keep the memory of a tensor of the exchange's stream until the caller has read it, also if the caller frees
        it early."""
        if self._on_device is not None:
            self._on_device.memory.lend(tensor, mark)


def _are_finite(gradients: Sequence[torch.Tensor]) -> bool:
    """Return True if all entries of the gradients of a bucket are finite. They are in host memory, and of one dtype."""
    if all([g.is_contiguous() and g.dtype in KERNEL_TYPES and not g.is_neg() for g in gradients]):
        return kernels.are_finite(gradients)
    return all(bool(torch.isfinite(gradient).all()) for gradient in gradients)
