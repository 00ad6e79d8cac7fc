"""Fused buckets: parameters that are exchanged together, contiguous in memory during the exchange.

This module does not communicate. Small tensors (biases, norms) have separate buckets, which are always exchanged dense:
they have few bytes, and dropping most of a norm's gradient costs accuracy. All parameters of a bucket have the same
dtype.
"""

from __future__ import annotations

import weakref
from collections.abc import Container, Iterable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch

from topkube.collectives.error_feedback import Residual
from topkube.collectives.request import Matrix

BUCKET_BYTES = 25 * 2**20
"""The largest size that is chosen: larger buckets hide no more latency."""
LEAST_BUCKET_BYTES = 2**20
"""The smallest size that is chosen, and that of the first and the last bucket. The messages of smaller buckets cost
more than they hide."""
BUCKETS = 8
"""The number of buckets that a model has, if these bounds and the link allow it. While one bucket travels, the
gradients of the next are computed; only the last bucket has nothing to hide behind."""
BUCKET_SECONDS = 0.01
"""How long a bucket occupies the link at least: on a fast link, the work per bucket costs more than a shorter wait for
the last bucket saves."""
IN_PLACE_BYTES = 2 << 20
"""In an overlapped exchange, a gradient of this size travels from its own memory. Smaller gradients are copied side by
side, because messages of their own would cost more than the copies."""
SMALL_ELEMENTS = 1024
"""A tensor with fewer elements, or with at most one dimension, is small."""


def _users_of_own_storage() -> int:
    tensor = torch.zeros(1)
    storage = tensor.untyped_storage()
    return int(torch._C._storage_Use_Count(storage._cdata))


_USERS_OF_OWN_STORAGE = _users_of_own_storage()
"""The use count of a storage that a single tensor uses: the tensor, and the handle of the query."""


def is_shared(tensor: torch.Tensor) -> bool:
    """Return True if another tensor uses the memory of this tensor."""
    return int(torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)) > _USERS_OF_OWN_STORAGE


def is_sharded(tensor: torch.Tensor) -> bool:
    """Return True for a DTensor: FSDP2 and tensor parallelism keep a part of it on each rank."""
    return hasattr(tensor, "placements") and hasattr(tensor, "to_local")


@torch.no_grad()
def real_view(tensor: Any) -> torch.Tensor:
    """Return a view of the values that are exchanged: the local shard of a DTensor, and real numbers of shape (..., 2)
    for a complex tensor. `tensor` is strided."""
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

    `.grad` is either local (this rank's own contributions since the last exchange) or `aggregated`. If a backward adds
    to an aggregated gradient, the aggregated gradient moves to `stash`, so that only the new part is exchanged.
    """

    index: int
    name: str
    tensor: torch.nn.Parameter
    aggregated: bool = False
    stash: torch.Tensor | None = None
    weightless: bool = False
    """True if `.grad` contains only a batch of weight zero: this rank did not use the parameter."""
    created: bool = False
    """True if `.grad` was None before this exchange. It becomes None again if no rank used the parameter."""
    exchanged: bool = False
    """True if `.grad` was exchanged since the last step."""
    has_rows: bool = False
    """True if gradients are sparse tensors (an embedding with sparse=True): the rows of all ranks are gathered."""
    arrives: bool = False
    """True if `.grad` was None before this gradient: torch may then keep the tensor that arrives."""
    _delivered: weakref.ref[torch.Tensor] | None = None

    def __post_init__(self) -> None:
        self.length = real_view(self.tensor.detach()).numel()
        self.gradient_dtype = _find_gradient_dtype(self.tensor)
        self.dtype = self.gradient_dtype.to_real()
        self._thin = self.tensor.ndim <= 1 or self.tensor.is_complex()

    @property
    def small(self) -> bool:
        """True if the gradient is always exchanged dense: small, complex and float64 tensors."""
        return self._thin or self.length < SMALL_ELEMENTS or self.dtype == torch.float64

    @property
    def local(self) -> bool:
        """True if `.grad` holds contributions of this rank that have not been exchanged."""
        return self.tensor.grad is not None and not self.aggregated

    def deliver(self) -> None:
        """Note that `.grad` is aggregated from now on."""
        gradient = self.tensor.grad
        assert gradient is not None
        self.aggregated, self.stash, self.exchanged = True, None, True
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

    def own_gradient(self) -> None:
        """Copy `.grad` if autograd may still read its memory: torch keeps the tensor that arrives, which can be a view
        of the gradient of another branch of the graph."""
        gradient = self.tensor.grad
        if not self.arrives or gradient is None or gradient.is_sparse or is_sharded(gradient):
            return
        storage = gradient.untyped_storage()
        if torch._C._storage_Use_Count(storage._cdata) > _USERS_OF_OWN_STORAGE:
            self.tensor.grad = gradient.clone(memory_format=torch.preserve_format)

    def replace_gradient(self, gradient: torch.Tensor) -> None:
        """Replace `.grad` by a copy with other memory."""
        self.tensor.grad, self._delivered = gradient, None

    def forget(self) -> None:
        """Note that the gradient was zeroed."""
        self.aggregated = self.exchanged = False
        self.stash = self._delivered = None


@dataclass(eq=False)
class Bucket:
    """A bucket of parameters: `parameters[i]` occupies elements starts[i] to starts[i + 1]."""

    dtype: torch.dtype
    small: bool
    has_rows: bool = False
    parameters: list[Parameter] = field(default_factory=list)
    starts: list[int] = field(default_factory=lambda: [0])
    residual: Residual | None = None
    waiting: int = 0
    """The number of parameters whose gradient this backward has not produced yet."""
    memory: GradientMemory | None = None
    """Where the gradients of a part of an overlapped exchange lie, if they may move."""

    @property
    def length(self) -> int:
        """The number of elements."""
        return self.starts[-1]

    def append(self, parameter: Parameter) -> None:
        self.parameters.append(parameter)
        self.starts.append(self.starts[-1] + parameter.length)

    @property
    def matrices(self) -> tuple[Matrix, ...]:
        """The parameters as matrices: one row per element of their first dimension."""
        return tuple(
            Matrix(start, parameter.length, parameter.length // real_view(parameter.tensor.detach()).shape[0])
            for parameter, start in zip(self.parameters, self.starts, strict=False)
        )

    @cached_property
    def parts(self) -> list[Bucket]:
        """The parts of an overlapped exchange, the same on all ranks: each large parameter by itself, and all others
        together. Read when the bucket is complete."""
        together = Bucket(self.dtype, self.small)
        parts = []
        for parameter in self.parameters:
            if parameter.length * self.dtype.itemsize >= IN_PLACE_BYTES:
                parts.append(Bucket(self.dtype, self.small))
                parts[-1].append(parameter)
            else:
                together.append(parameter)
        if not together.parameters:
            return parts
        if len(together.parameters) > 1 and all(may_move(parameter.tensor) for parameter in together.parameters):
            together.memory = GradientMemory(together)
        return [*parts, together]

    def begin_backward(self) -> None:
        """Prepare for the gradients of a backward pass."""
        self.waiting = sum(parameter.tensor.requires_grad for parameter in self.parameters)
        for memory in set(self._memories.values()):
            memory.begin_backward()

    def take_in(self, parameter: Parameter) -> bool:
        """Move a gradient that has just been accumulated into the memory of its part. Return False if it stays."""
        memory = self._memories.get(parameter.index)
        return memory is not None and memory.take_in(parameter)

    @cached_property
    def _memories(self) -> dict[int, GradientMemory]:
        """The memory of each parameter that has one, by the parameter's index."""
        return {p.index: part.memory for part in self.parts if part.memory is not None for p in part.parameters}


def may_move(tensor: torch.Tensor) -> bool:
    """Return True if the gradients of this parameter may lie anywhere: they are dense and contiguous, on a CPU."""
    is_plain = not is_sharded(tensor) and not tensor.is_complex() and tensor.layout is torch.strided
    return is_plain and tensor.device.type == "cpu" and tensor.is_contiguous()


class GradientMemory:
    """Memory in which the gradients of a part of a bucket lie side by side, from the moment that backward has produced
    them until they are zeroed: an exchange then copies nothing. What a script keeps stays as it is: a part gets new
    memory if the script still refers to gradients of an earlier step."""

    def __init__(self, part: Bucket) -> None:
        self._part = part
        self._places = {p.index: start for p, start in zip(part.parameters, part.starts, strict=False)}
        self._values: torch.Tensor | None = None
        self._is_free = False

    def begin_backward(self) -> None:
        """Note that a backward pass begins: the next gradient checks if the memory is free."""
        self._is_free = False

    def take_in(self, parameter: Parameter) -> bool:
        """Move the parameter's gradient, which autograd has just accumulated, here. Return False if it must stay where it is."""
        gradient, start = parameter.tensor.grad, self._places[parameter.index]
        if gradient is None or parameter.stash is not None or gradient.requires_grad or not gradient.is_contiguous():
            return False
        if not self._is_free:
            self._take_memory()
        if self._holds(gradient, start):
            return True
        if not parameter.arrives:  # the script chose this memory
            return False
        assert self._values is not None
        storage, shape = self._values.untyped_storage(), parameter.tensor.shape
        view = torch.empty(0, dtype=gradient.dtype).set_(storage, start, shape, gradient.stride())
        view.copy_(gradient)
        parameter.replace_gradient(view)
        return True

    def whole(self) -> torch.Tensor | None:
        """Return the gradients of all parameters side by side, None if one of them is not here."""
        for parameter, start in zip(self._part.parameters, self._part.starts, strict=False):
            gradient, is_trained = parameter.tensor.grad, parameter.tensor.requires_grad
            if not (is_trained and parameter.local and parameter.stash is None and self._holds(gradient, start)):
                return None
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
            gradients = sum(self._holds(p.tensor.grad, self._places[p.index]) for p in self._part.parameters)
            storage = self._values.untyped_storage()
            if torch._C._storage_Use_Count(storage._cdata) <= _USERS_OF_OWN_STORAGE + gradients:
                return
        self._values = torch.empty(self._part.length, dtype=self._part.dtype)


def ends_for_overlap(parameters: Iterable[Parameter], rate: float = 0.0) -> set[int]:
    """Return the positions of `parameters` after which a dense bucket should end, so that its exchange overlaps with
    the rest of backward. The first bucket is small, so that the exchange starts early. The last bucket is small,
    because it is exchanged after backward. The others have equal sizes, which follow from the sizes of the tensors and
    from `rate`, the bytes per second that a node sends to other nodes (0: unknown)."""
    groups: dict[torch.dtype, list[tuple[int, int]]] = {}
    for position, parameter in enumerate(parameters):
        if parameter.length and not parameter.small and not parameter.has_rows:
            size = parameter.length * parameter.dtype.itemsize
            groups.setdefault(parameter.dtype, []).append((position, size))
    ends: set[int] = set()
    for group in groups.values():
        total = sum(size for _, size in group)
        if total <= LEAST_BUCKET_BYTES:
            continue
        by_link = rate * BUCKET_SECONDS
        usual = min(BUCKET_BYTES, max(LEAST_BUCKET_BYTES, total // BUCKETS, by_link))
        first = min(usual, max(LEAST_BUCKET_BYTES, by_link / 4))
        filled, limit, left, before, is_last = 0, first, total, -1, False
        for position, size in group:
            begins_last = not is_last and left <= LEAST_BUCKET_BYTES
            if filled and (begins_last or filled + size > limit):
                ends.add(before)
                filled, limit = 0, usual
            is_last = is_last or begins_last
            filled, left, before = filled + size, left - size, position
    return ends


def plan(
    parameters: Iterable[Parameter], bucket_bytes: int = BUCKET_BYTES, ends: Container[int] = frozenset()
) -> list[Bucket]:
    """Return buckets for `parameters`, which come in the order in which backward produces their gradients.

    A bucket has at most `bucket_bytes`, and ends after a parameter whose position is in `ends`. A larger parameter has
    a separate bucket, and so has a parameter whose gradients are sparse tensors. Buckets come in the order in which
    their last gradient is produced: the order of the exchanges, the same on every rank that passes the same parameters.
    """
    open_buckets: dict[tuple[torch.dtype, bool], Bucket] = {}
    complete: list[tuple[int, Bucket]] = []
    last: dict[int, int] = {}
    for position, parameter in enumerate(parameters):
        if parameter.length == 0:
            continue
        if parameter.has_rows:
            alone = Bucket(parameter.dtype, True, has_rows=True)
            alone.append(parameter)
            complete.append((position, alone))
            continue
        key = (parameter.dtype, parameter.small)
        bucket = open_buckets.get(key)
        size = parameter.length * parameter.dtype.itemsize
        if bucket is not None and bucket.length * parameter.dtype.itemsize + size > bucket_bytes:
            complete.append((last[id(bucket)], open_buckets.pop(key)))
            bucket = None
        if bucket is None:
            bucket = open_buckets[key] = Bucket(*key)
        bucket.append(parameter)
        last[id(bucket)] = position
        if position in ends:
            complete.append((position, open_buckets.pop(key)))
    complete += [(last[id(bucket)], bucket) for bucket in open_buckets.values()]
    return [bucket for _, bucket in sorted(complete, key=lambda entry: entry[0])]


def largest_bucket(compresses: bool, is_on_cpu: bool, ranks: int) -> int | None:
    """Return the most bytes of a bucket, None if sizes are chosen so that dense exchanges overlap with backward.
    Compression selects per bucket, and a device has its own pipeline: both have large buckets."""
    return None if is_on_cpu and ranks > 1 and not compresses else BUCKET_BYTES


def plan_sizes(parameters: list[Parameter], largest: int | None, rate: float = 0.0) -> list[Bucket]:
    """Return the buckets of `parameters`, which come in the order of their gradients. `largest` is what
    `largest_bucket` returned, or the job's choice; `rate` is as for `ends_for_overlap`."""
    if largest is not None:
        return plan(parameters, largest)
    return plan(parameters, ends=ends_for_overlap(parameters, rate))
