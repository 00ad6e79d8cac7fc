"""The reduction of one bucket: collect its gradients, all-reduce them, deliver the means."""

from __future__ import annotations

from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from topkube.algorithms import MATRIX_RANK
from topkube.arrays import view_flat
from topkube.collectives import AllReduce, Request
from topkube.collectives.dense import Hierarchical
from topkube.collectives.device.memory import Mark
from topkube.collectives.device.pipeline import DeviceAllReduce
from topkube.collectives.double import average_doubles
from topkube.collectives.error_feedback import Residual
from topkube.training.exchange.buckets.bucket import Bucket
from topkube.training.exchange.buckets.parameter import Parameter
from topkube.training.exchange.reduction.bucket_algorithms import BucketAlgorithms
from topkube.training.exchange.reduction.delivery import Delivery
from topkube.training.exchange.reduction.overlapped_buckets import OverlappedBuckets
from topkube.training.exchange.reduction.residuals import Residuals
from topkube.training.exchange.reduction.sparse_gradients import average_rows, is_finite
from topkube.training.exchange.reduction.staging import Staging
from topkube.training.ranks.agreement import open_agreement
from topkube.world import World


@dataclass(frozen=True, eq=False)
class ReductionTask:
    """The exchange of one bucket by one all-reduce. `mark` and `loss_scale` are as for `BucketExchange.run`."""

    bucket: Bucket
    all_reduce: AllReduce
    density: float
    mark: Mark | None
    loss_scale: float


class BucketReduction:
    """The reductions of one optimizer's buckets among the ranks of `world`, in the communication thread. Buckets are
    reduced on a device if `on_device` is set. Dense buckets between nodes of CPUs, and those of algorithms that
    `overlapped` supports, go through it, if it is set."""

    def __init__(
        self,
        world: World,
        algorithms: BucketAlgorithms,
        residuals: Residuals,
        staging: Staging,
        delivery: Delivery,
        on_device: DeviceAllReduce | None,
        overlapped: OverlappedBuckets | None,
    ) -> None:
        self._world, self._algorithms, self._residuals = world, algorithms, residuals
        self._staging, self._delivery, self._on_device, self._overlapped = staging, delivery, on_device, overlapped
        self._agreement = open_agreement(world)

    def reduce_strided(self, task: ReductionTask) -> bool:
        """Reduce a bucket of strided gradients, in the way that its algorithm, its dtype and the world need. Return
        True if all values that this rank saw were finite. A reduction that only starts here is finished by `flush`."""
        bucket, all_reduce = task.bucket, task.all_reduce
        if self._algorithms.drains(bucket):
            return self._reduce_with_residual(task)
        if all_reduce.algorithm.residual is None and bucket.residual is not None:
            self._residuals.forget_zeros(bucket)
        if self._world.size == 1 and not all_reduce.algorithm.compresses:
            trainable = [parameter for parameter in bucket.parameters if parameter.tensor.requires_grad]
            return self._delivery.deliver_alone(trainable)
        if bucket.dtype != torch.float64:
            if self._on_device is not None:
                self._begin_on_device(task)
                return True
            if self._overlapped is not None and isinstance(all_reduce, Hierarchical):
                values = torch.empty(bucket.length, dtype=bucket.dtype, device="meta")
                self._overlapped.begin(bucket, all_reduce, self._build_request(values, task))
                return True
            if self._overlapped is not None and (
                self._overlapped.can_compress(all_reduce) or self._overlapped.can_halve(all_reduce, bucket)
            ):
                self._begin_compressed(task, self._overlapped)
                return True
        self._finish_overlapped()
        if bucket.dtype == torch.float64:
            return self._reduce_doubles(bucket, task.mark)
        flat = self._staging.collect(bucket)
        request = self._build_request(view_flat(flat, "bucket", writable=True), task)
        with self._set_frozen_aside(bucket, request.residual):
            finite = all_reduce.run(self._world, request)
        self._delivery.deliver(bucket, flat, task.mark)
        return finite

    def reduce_rows(self, parameter: Parameter, mark: Mark | None) -> bool:
        """Average the gradients of a parameter that are sparse tensors. Return True if the mean is finite."""
        self._finish_overlapped()
        is_trained = parameter.tensor.requires_grad
        own = parameter.tensor.grad if parameter.is_local and is_trained else None
        mean = average_rows(self._world, self._agreement, own, parameter.tensor, parameter.gradient_dtype)
        finite = is_finite(mean)
        if is_trained:
            self._delivery.deliver_rows(parameter, mean, mark)
        return finite

    def _reduce_with_residual(self, task: ReductionTask) -> bool:
        """Exchange the gradients with all that was not sent before, by an algorithm that keeps nothing."""
        self._finish_overlapped()
        bucket = task.bucket
        flat, residual = self._staging.collect(bucket), self._residuals.prepare(bucket, task.loss_scale)
        with self._set_frozen_aside(bucket, residual):
            start, stop = self._residuals.find_range(bucket)
            owed = torch.as_tensor(residual.current, device=flat.device)
            flat[start:stop] += (owed * self._world.size).to(flat.dtype)  # the mean divides by the ranks
            residual.pending[:] = 0
            if self._on_device is not None:
                request = self._build_request(flat, task)
                delivered = partial(self._delivery.deliver, bucket, flat, task.mark)
                self._on_device.begin(task.all_reduce, request, finished=delivered)
                return True
            array = view_flat(flat, "bucket", writable=True)
            finite = task.all_reduce.run(self._world, self._build_request(array, task))
        self._delivery.deliver(bucket, flat, task.mark)
        return finite

    def _begin_compressed(self, task: ReductionTask, overlapped: OverlappedBuckets) -> None:
        bucket, all_reduce, stack = task.bucket, task.all_reduce, ExitStack()
        flat = overlapped.collect(bucket)
        request = self._build_request(view_flat(flat, "bucket", writable=True), task)
        stack.enter_context(self._set_frozen_aside(bucket, request.residual))
        if overlapped.can_halve(all_reduce, bucket):
            overlapped.begin_halves(bucket, all_reduce, flat, request, stack.close)
            return
        assert overlapped.can_compress(all_reduce)

        def deliver() -> None:
            stack.close()
            self._delivery.deliver(bucket, flat, task.mark)

        overlapped.begin_compressed(all_reduce, request, deliver)

    def _begin_on_device(self, task: ReductionTask) -> None:
        assert self._on_device is not None
        flat, stack = self._staging.collect(task.bucket), ExitStack()
        request = self._build_request(flat, task)
        stack.enter_context(self._set_frozen_aside(task.bucket, request.residual))

        def deliver() -> None:
            stack.close()  # the messages of two stages change the residual until here
            self._delivery.deliver(task.bucket, flat, task.mark)

        self._on_device.begin(task.all_reduce, request, finished=deliver)

    def _reduce_doubles(self, bucket: Bucket, mark: Mark | None) -> bool:
        flat = self._staging.collect(bucket)
        host = flat.cpu()
        finite = average_doubles(self._world, host.numpy())
        if host is not flat:
            flat.copy_(host)
        self._delivery.deliver(bucket, flat, mark)
        return finite

    def _build_request(self, array: Any, task: ReductionTask) -> Request:
        algorithm, bucket, aggregation = task.all_reduce.algorithm, task.bucket, self._algorithms.aggregation
        return Request(
            array,
            "mean",
            task.density if algorithm.compresses else 1.0,
            aggregation.wire if algorithm.compresses else "fp32",
            aggregation.selection,
            self._residuals.prepare(bucket, task.loss_scale) if algorithm.residual is not None else None,
            "fp32" if bucket.holds_small else self._algorithms.dense_wire,
            aggregation.matrix_rank,
            bucket.matrices if MATRIX_RANK in algorithm.parameters else (),
        )

    def _set_frozen_aside(self, bucket: Bucket, residual: Residual | None) -> AbstractContextManager[None]:
        if residual is None or all(parameter.tensor.requires_grad for parameter in bucket.parameters):
            return nullcontext()
        return self._residuals.set_frozen_aside(bucket, residual)

    def _finish_overlapped(self) -> None:
        """Finish the buckets that are under way, before an exchange that sends its messages in another way."""
        if self._overlapped is not None:
            self._overlapped.finish()
