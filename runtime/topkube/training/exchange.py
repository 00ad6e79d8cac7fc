"""What the communication thread does with a bucket: collect gradients, all-reduce, deliver; and agreement among
ranks."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import torch

from topkube.arrays import flat_view
from topkube.collectives import resolve
from topkube.collectives.device import DeviceAllReduce
from topkube.collectives.registry import Algorithm, Request, find
from topkube.training.aggregation import Aggregation
from topkube.training.buckets import Bucket, Parameter
from topkube.training.residuals import Momentum, Residuals
from topkube.world import World


class Exchange:
    """Buckets through one world. Methods run in the communication thread, in the same order on every rank; `ready` and
    `follow` in the caller's.

    Where `device` is given, buckets are reduced there, as a pipeline (collectives/device.py): `run` then only begins
    one, and `flush` ends them all and tells whether they were finite.
    """

    def __init__(
        self, world: World, aggregation: Aggregation, momentum: Momentum, device: torch.device | None = None
    ) -> None:
        self.world, self.aggregation = world, aggregation
        self.large = self._algorithm(sys.maxsize)
        self.dense = find("hierarchical") if self.large.sparse else self.large
        self.residuals = Residuals(world, self.large, momentum, device)
        self.on_device = DeviceAllReduce(world, device) if device is not None else None
        self._staging: dict[tuple[torch.dtype, int], torch.Tensor] = {}
        self._number = 0

    def is_sparse(self, bucket: Bucket) -> bool:
        """Whether the bucket's exchange leaves a residual, once the warm-up has begun to lower the density."""
        return not bucket.small and self._algorithm(bucket.length).sparse

    def _algorithm(self, length: int) -> Algorithm:
        """For large tensors: "auto" depends on the bucket's length, and on the target density, so that warm-up
        changes nothing."""
        return find(resolve(self.aggregation.algorithm, self.world, length, self.aggregation.density))

    @torch.no_grad()
    def run(self, bucket: Bucket, density: float, warming: bool, mark: Any = None) -> bool:
        """Exchanges the bucket's local gradients and puts the means into `.grad`, beside what was aggregated before.
        Returns whether everything that this rank saw was finite; residuals wait for `commit` or `discard`. `mark` is
        what `ready` gave when the gradients were handed over."""
        trainable = [parameter for parameter in bucket.parameters if parameter.tensor.requires_grad]
        whole = warming and density == 1 and not self.aggregation.momentum_correction
        algorithm = self.dense if bucket.small or whole else self._algorithm(bucket.length)
        if self.world.size == 1 and not algorithm.sparse:
            return _finite([p.tensor.grad for p in trainable if p.tensor.grad is not None]) and _settle(trainable)
        if self.on_device is not None:
            self._begin(bucket, algorithm, density, mark)
            return True
        flat = self._collect(bucket)
        residual = self.residuals.of(bucket) if algorithm.sparse else None
        request = Request(
            flat_view(flat, "bucket", writable=True),
            "mean",
            density if algorithm.sparse else 1.0,
            self.aggregation.wire if algorithm.sparse else "fp32",
            self.aggregation.selection,
            residual,
        )
        finite = algorithm.run(self.world, request)
        self._deliver(bucket, flat)
        return finite

    def ready(self) -> Any:
        """What `run` has to wait for on the device: all work in the caller's stream up to here."""
        return self.on_device.ready() if self.on_device is not None else None

    @torch.no_grad()
    def flush(self) -> bool:
        """Ends what `run` has begun; whether all of it was finite."""
        return self.on_device.flush() if self.on_device is not None else True

    def follow(self) -> None:
        """Makes the caller's stream wait for the delivered gradients."""
        if self.on_device is not None:
            self.on_device.follow()

    def _begin(self, bucket: Bucket, algorithm: Algorithm, density: float, mark: Any) -> None:
        assert self.on_device is not None
        self.on_device.after(mark)
        with self.on_device.on_stream():
            flat = self._collect(bucket)
            residual = self.residuals.of(bucket) if algorithm.sparse else None
        self.on_device.begin(
            flat,
            algorithm,
            "mean",
            density if algorithm.sparse else 1.0,
            self.aggregation.wire if algorithm.sparse else "fp32",
            self.aggregation.selection,
            residual,
            finished=lambda: self._deliver(bucket, flat),
        )

    def _collect(self, bucket: Bucket) -> torch.Tensor:
        """The bucket's local gradients side by side: in the staging buffer, or where it lies for a gradient on its
        own."""
        only = bucket.parameters[0]
        if len(bucket.parameters) == 1 and only.local and only.tensor.requires_grad and only.stash is None:
            gradient = only.tensor.grad
            assert gradient is not None
            if gradient.is_contiguous():
                return gradient.detach().view(-1)
        self._number += 1  # on a device two buckets are under way
        place = (bucket.dtype, self._number % 2 if self.on_device is not None else 0)
        staging = self._staging.get(place)
        if staging is None or staging.numel() < bucket.length:
            staging = torch.empty(bucket.length, dtype=bucket.dtype, device=only.tensor.device)
            self._staging[place] = staging
        for parameter, start in zip(bucket.parameters, bucket.starts, strict=False):
            piece = staging[start : start + parameter.tensor.numel()]
            if parameter.local and parameter.tensor.requires_grad:
                piece.view(parameter.tensor.shape).copy_(parameter.tensor.grad)  # type: ignore[arg-type]
            else:
                piece.zero_()
        return staging[: bucket.length]

    def _deliver(self, bucket: Bucket, flat: torch.Tensor) -> None:
        for parameter, start in zip(bucket.parameters, bucket.starts, strict=False):
            if not parameter.tensor.requires_grad:
                continue  # frozen: what its residual still held is dropped with the update that it would have been
            piece = flat[start : start + parameter.tensor.numel()].view(parameter.tensor.shape)
            gradient = parameter.tensor.grad
            if gradient is None:
                parameter.created = True
                parameter.tensor.grad = gradient = torch.empty_like(parameter.tensor).copy_(piece)
            elif parameter.aggregated:
                gradient += piece
            elif gradient.data_ptr() != piece.data_ptr():
                gradient.copy_(piece)
            if parameter.stash is not None:
                gradient += parameter.stash
        _settle([parameter for parameter in bucket.parameters if parameter.tensor.requires_grad])


def _settle(parameters: Sequence[Parameter]) -> bool:
    for parameter in parameters:
        if parameter.tensor.grad is not None:
            parameter.aggregated, parameter.stash = True, None
    return True


def _finite(gradients: Sequence[torch.Tensor]) -> bool:
    """Whether all entries are finite, in one read and one wait for the device: only where a sum is not finite (it may
    have overflowed) are entries looked at."""
    if not gradients:
        return True
    sums = torch.stack([gradient.sum().float() for gradient in gradients])
    return bool(torch.isfinite(sums).all()) or all(bool(torch.isfinite(gradient).all()) for gradient in gradients)
