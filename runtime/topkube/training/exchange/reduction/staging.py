"""The collection of a bucket's gradients into one tensor, which an all-reduce can exchange."""

from __future__ import annotations

import torch

from topkube.training.exchange.buckets.bucket import Bucket
from topkube.training.exchange.buckets.parameter import view_real


class Staging:
    """The buffers into which the gradients of buckets are copied if they do not lie side by side. `least_buffers` is
    the number of buckets that a device reduces at the same time, 1 for host memory."""

    def __init__(self, least_buffers: int) -> None:
        self._least_buffers = least_buffers
        self._buffers: dict[tuple[torch.dtype, int], torch.Tensor] = {}
        self._number = 0

    def restart(self) -> None:
        """Note that no bucket is under way: the next series of buckets takes the same buffers as the last one."""
        self._number = 0

    def collect(self, bucket: Bucket, buffers: int | None = 1) -> torch.Tensor:
        """Return the bucket's local gradients in one tensor, of shape (length,): their own memory if they lie side by
        side, otherwise a staging buffer, one of `buffers`, or a new buffer for None."""
        if bucket.memory is not None and (values := bucket.memory.collect()) is not None:
            return values
        first = bucket.parameters[0]
        if len(bucket.parameters) == 1 and first.is_local and first.tensor.requires_grad and first.stash is None:
            gradient = view_real(first.tensor.grad)
            if gradient.is_contiguous():
                return gradient.detach().view(-1)
        staging = self._take_buffer(bucket, buffers)
        copies, gradients, absent = list[torch.Tensor](), list[torch.Tensor](), list[torch.Tensor]()
        for parameter, start in zip(bucket.parameters, bucket.starts, strict=False):
            piece = staging[start : start + parameter.length]
            if parameter.is_local and parameter.tensor.requires_grad:
                gradient = view_real(parameter.tensor.grad)
                copies.append(piece.view(gradient.shape))
                gradients.append(gradient)
            else:
                absent.append(piece)
        copy_each(copies, gradients)
        if absent:
            torch._foreach_zero_(absent)
        return staging[: bucket.length]

    def _take_buffer(self, bucket: Bucket, buffers: int | None) -> torch.Tensor:
        """Return a staging buffer for the bucket's gradients, one of `buffers`, or a new buffer for None."""
        device = bucket.parameters[0].tensor.device
        if buffers is None:
            return torch.empty(bucket.length, dtype=bucket.dtype, device=device)
        self._number += 1
        key = (bucket.dtype, self._number % max(self._least_buffers, buffers))
        staging = self._buffers.get(key)
        if staging is None or staging.numel() < bucket.length:
            staging = self._buffers[key] = torch.empty(bucket.length, dtype=bucket.dtype, device=device)
        return staging


def copy_each(targets: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
    """Copy each tensor of `sources` into the tensor of `targets` at its place. On a GPU, a few launches copy all of
    them."""
    if targets:
        torch._foreach_copy_(targets, sources)
