"""Fused buckets: parameters that are exchanged together, contiguous in memory during the exchange.

Pure layout, no communication. Small tensors (biases, norms) go to buckets of their own, which are always exchanged
dense: they are few bytes, and dropping most of a norm's gradient costs accuracy. Buckets are of one dtype.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import torch

from topkube.compression.error_feedback import Residual

BUCKET_BYTES = 25 * 2**20
"""Default size: large enough to hide latency, small enough that the first exchange starts early in backward."""
SMALL_ELEMENTS = 1024
"""A tensor with fewer elements, or with at most one dimension, is small."""


@dataclass(eq=False)
class Parameter:
    """A named parameter and what its `.grad` holds at the moment.

    `.grad` is either local (this rank's own contributions since the last exchange) or `aggregated`. Where a backward
    adds to an aggregated gradient, that one steps aside into `stash`, so that only what is new is exchanged.
    """

    index: int
    name: str
    tensor: torch.nn.Parameter
    aggregated: bool = False
    stash: torch.Tensor | None = None
    weightless: bool = False
    """`.grad` holds nothing but a batch of weight zero: this rank did not use the parameter."""
    created: bool = False
    """`.grad` was None before this exchange: it becomes None again when no rank used the parameter."""

    @property
    def small(self) -> bool:
        return self.tensor.ndim <= 1 or self.tensor.numel() < SMALL_ELEMENTS

    @property
    def local(self) -> bool:
        """Whether `.grad` holds contributions of this rank that have not been exchanged."""
        return self.tensor.grad is not None and not self.aggregated


@dataclass(eq=False)
class Bucket:
    """Parameters side by side: `parameters[i]` occupies elements starts[i] to starts[i + 1]."""

    dtype: torch.dtype
    small: bool
    parameters: list[Parameter] = field(default_factory=list)
    starts: list[int] = field(default_factory=lambda: [0])
    residual: Residual | None = None
    waiting: int = 0
    """Parameters whose gradient this backward has not produced yet."""

    @property
    def length(self) -> int:
        """Elements."""
        return self.starts[-1]

    def append(self, parameter: Parameter) -> None:
        self.parameters.append(parameter)
        self.starts.append(self.starts[-1] + parameter.tensor.numel())


def plan(parameters: Iterable[Parameter], bucket_bytes: int = BUCKET_BYTES) -> list[Bucket]:
    """Buckets for `parameters`, which come in the order in which backward produces their gradients.

    A bucket is full at `bucket_bytes`; a larger parameter has a bucket to itself. Buckets come in the order in which
    their last gradient is produced: the order of the exchanges, the same on every rank that passes the same
    parameters.
    """
    open_buckets: dict[tuple[torch.dtype, bool], Bucket] = {}
    complete: list[tuple[int, Bucket]] = []
    last: dict[int, int] = {}
    for position, parameter in enumerate(parameters):
        if parameter.tensor.numel() == 0:
            continue
        key = (parameter.tensor.dtype, parameter.small)
        bucket = open_buckets.get(key)
        size = parameter.tensor.numel() * parameter.tensor.element_size()
        if bucket is not None and bucket.length * parameter.tensor.element_size() + size > bucket_bytes:
            complete.append((last[id(bucket)], open_buckets.pop(key)))
            bucket = None
        if bucket is None:
            bucket = open_buckets[key] = Bucket(*key)
        bucket.append(parameter)
        last[id(bucket)] = position
    complete += [(last[id(bucket)], bucket) for bucket in open_buckets.values()]
    return [bucket for _, bucket in sorted(complete, key=lambda entry: entry[0])]
