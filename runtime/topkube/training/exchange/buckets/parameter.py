"""A parameter of the model and the state of its gradient."""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import Any

import torch

from topkube.training.exchange.buckets.storage import is_shared

SMALL_ELEMENTS = 1024
"""A tensor with fewer elements, or with at most one dimension, is small."""
KERNEL_TYPES = (torch.float32, torch.bfloat16, torch.float16)
"""The dtypes of tensors that kernels take."""
_PLAIN_TYPES = (torch.Tensor, torch.nn.Parameter)
"""The types of tensors that are never sharded."""


def is_sharded(tensor: torch.Tensor) -> bool:
    """Return True for a DTensor: FSDP2 and tensor parallelism keep a part of it on each rank."""
    return hasattr(tensor, "placements") and hasattr(tensor, "to_local")


def view_real(tensor: Any) -> torch.Tensor:
    """Return a view of the values that are exchanged: the local shard of a DTensor, and real numbers of shape (..., 2)
    for a complex tensor. `tensor` is strided."""
    if type(tensor) in _PLAIN_TYPES and not tensor.is_complex():
        return tensor  # type: ignore[no-any-return]
    with torch.no_grad():
        local = tensor.to_local() if is_sharded(tensor) else tensor
        return torch.view_as_real(local) if local.is_complex() else local


def _find_gradient_dtype(tensor: torch.Tensor) -> torch.dtype:
    """Return the dtype of the gradients of a parameter: its own, unless a script has set `grad_dtype` (torch 2.9)."""
    chosen: torch.dtype | None = None if is_sharded(tensor) else getattr(tensor, "grad_dtype", None)
    return chosen or tensor.dtype


@dataclass(eq=False)
class Parameter:
    """A named parameter and the state of its `.grad`.

    `gradient_dtype` is the dtype of its gradients, and `dtype` that of the real numbers that are exchanged.

    `.grad` is either local (this rank's own contributions since the last exchange) or aggregated (`is_aggregated`). If
    a backward adds to an aggregated gradient, the aggregated gradient moves to `stash`, so that only the new part is
    exchanged.
    """

    index: int
    name: str
    tensor: torch.nn.Parameter
    is_aggregated: bool = False
    stash: torch.Tensor | None = None
    is_weightless: bool = False
    """True if `.grad` contains only a batch of weight zero: this rank did not use the parameter."""
    is_weighed: bool = False
    """True if `.grad` was scaled by the share of this rank's samples, and not exchanged since: by a backward under
    `no_sync()`, or because the script assigned it."""
    is_created: bool = False
    """True if `.grad` was None before this exchange. It becomes None again if no rank used the parameter."""
    is_exchanged: bool = False
    """True if `.grad` was exchanged since the last step."""
    has_rows: bool = False
    """True if gradients are sparse tensors (an embedding with sparse=True): the rows of all ranks are gathered."""
    is_deferred: bool = False
    """True if `.grad` stays where autograd computed it until the exchange copies it: `deliver` then has to find out if
    other tensors use its memory."""
    grad_was_none: bool = False
    """True if `.grad` was None before this gradient: torch may then keep the gradient's own tensor as `.grad`."""
    _delivered: weakref.ref[torch.Tensor] | None = None
    _version_of_zeros: int | None = None
    """The version of `.grad` if batches under `no_sync()` have left it zero; None if they have not."""

    def __post_init__(self) -> None:
        self.length = view_real(self.tensor.detach()).numel()
        self.gradient_dtype = _find_gradient_dtype(self.tensor)
        self.dtype = self.gradient_dtype.to_real()
        self._is_vector_or_complex = self.tensor.ndim <= 1 or self.tensor.is_complex()

    @property
    def is_always_dense(self) -> bool:
        """True if the gradient is always exchanged dense: small, complex and float64 tensors."""
        return self._is_vector_or_complex or self.length < SMALL_ELEMENTS or self.dtype == torch.float64

    @property
    def is_local(self) -> bool:
        """True if `.grad` holds contributions of this rank that have not been exchanged."""
        return self.tensor.grad is not None and not self.is_aggregated

    def deliver(self, is_written: bool = True) -> None:
        """Note that `.grad` is aggregated from now on. `is_written` is False if nothing has changed its values."""
        gradient = self.tensor.grad
        assert gradient is not None
        self.is_aggregated, self.stash, self.is_exchanged = True, None, True
        self._version_of_zeros = None
        if is_written:
            torch.autograd.graph.increment_version(gradient)  # a kernel may have written it without torch
        self._delivered = weakref.ref(gradient)

    @property
    def holds_delivered(self) -> bool:
        """True if `.grad` is the tensor that the last exchange delivered, changed in place or not."""
        return self._delivered is not None and self._delivered() is self.tensor.grad is not None

    @property
    def is_zero(self) -> bool:
        """True if there is no gradient, or if all of it is zero. Reads the gradient."""
        gradient = self.tensor.grad
        return gradient is None or not bool((gradient._values() if gradient.is_sparse else gradient).any())

    @property
    def is_discarded(self) -> bool:
        """True if the script has set `.grad` to None, or has written zeros. A gradient that was zero from the start
        does not count: that of a batch of weight zero, or of a part of the model that a batch does not need. Reads the
        gradient."""
        gradient = self.tensor.grad
        return self.is_zero and (gradient is None or gradient._version != self._version_of_zeros)

    def note_zeros(self) -> None:
        """Note if `.grad` is zero after a backward under `no_sync()`, while the means of an earlier exchange are set
        aside. Reads the gradient."""
        gradient = self.tensor.grad
        self._version_of_zeros = gradient._version if gradient is not None and self.is_zero else None

    def add_empty_gradient(self) -> None:
        """Set `.grad` of a parameter without elements if it is None. No bucket has the parameter, so only the ranks
        that used it would have a gradient, and sums over all gradients, such as a norm, would differ in the order of
        their terms."""
        tensor = self.tensor
        if tensor.grad is None and tensor.requires_grad and not is_sharded(tensor):
            tensor.grad = torch.zeros_like(tensor)

    def copy_shared_gradient(self, arrived: torch.Tensor | None = None) -> None:
        """Copy `.grad` if other tensors use its memory: torch keeps the tensor that backward computes, which can be a
        view of the gradient of another branch of the graph. `arrived` is that tensor while autograd still holds it: it
        does not count."""
        gradient = self.tensor.grad
        if not self.grad_was_none or gradient is None or gradient.is_sparse or is_sharded(gradient):
            return
        if is_shared(gradient, arrived):
            is_delivered = self.holds_delivered
            self.tensor.grad = gradient.clone(memory_format=torch.preserve_format)
            if is_delivered:
                self._delivered = weakref.ref(self.tensor.grad)

    def replace_gradient(self, gradient: torch.Tensor) -> None:
        """Replace `.grad` by a copy with other memory."""
        self.tensor.grad, self._delivered = gradient, None

    def forget(self) -> None:
        """Note that the gradient was zeroed."""
        self.is_aggregated = self.is_exchanged = self.is_deferred = False
        self.stash = self._delivered = self._version_of_zeros = None
