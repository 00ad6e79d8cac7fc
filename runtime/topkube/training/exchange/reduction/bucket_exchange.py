"""The exchange of buckets in the communication thread: the streams of a device, and the end of a backward."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext

import torch

from topkube.algorithms import keep_device_choices
from topkube.collectives.device.memory import DeviceFlag, Mark
from topkube.collectives.device.pipeline import DeviceAllReduce
from topkube.collectives.device.rates import DeviceRates, measure_device
from topkube.settings import Settings
from topkube.training.exchange.aggregation import AggregationSettings
from topkube.training.exchange.buckets.bucket import Bucket, Intake
from topkube.training.exchange.buckets.parameter import view_real
from topkube.training.exchange.reduction.bucket_algorithms import BucketAlgorithms, refuse_gpu_algorithms
from topkube.training.exchange.reduction.bucket_reduction import BucketReduction, ReductionTask
from topkube.training.exchange.reduction.delivery import Delivery
from topkube.training.exchange.reduction.grad_mode import without_grad
from topkube.training.exchange.reduction.overlapped_buckets import OverlappedBuckets
from topkube.training.exchange.reduction.residuals import Momentum, Residuals
from topkube.training.exchange.reduction.staging import Staging
from topkube.training.ranks import communication_thread
from topkube.world import World

_HERE = nullcontext()
"""The context of work in host memory, or in the thread of the caller, which has no stream of its own."""


class BucketExchange:
    """The exchange of buckets among the ranks of a world. Methods run in the communication thread, in the same order on
    every rank; `mark_caller`, `make_caller_wait` and `write_nan_if_flagged` run in the thread of the caller.

    If `device` is set, buckets are reduced on it, as a pipeline (collectives/device/): `run` then only starts the
    reduction of a bucket, and `flush` finishes all of them. On CPUs, dense buckets that nodes exchange work in the same
    way (overlapped_buckets.py). With DeAR (`is_decoupled`), `reduced_parts` holds the parts that are reduced
    and not yet gathered.
    """

    def __init__(
        self,
        world: World,
        aggregation: AggregationSettings,
        momentum: Momentum,
        device: torch.device | None = None,
        settings: Settings | None = None,
    ) -> None:
        settings = settings or Settings()
        self.world, self._finite_check = world, settings.finite_check
        if device is None:
            refuse_gpu_algorithms(world, aggregation)
        compressed_choices = aggregation.compressed_choices if world.nodes > 1 else ()
        if device is not None:
            # With weights of their own, nodes exchange no gradients.
            compressed_choices = keep_device_choices(compressed_choices)
        self.algorithms = BucketAlgorithms(world, aggregation, compressed_choices)
        self.residuals = Residuals(world, self.algorithms.keeper, momentum, device)
        self.on_device = DeviceAllReduce(world, device, settings.device_graphs) if device is not None else None
        # Each tensor that is under way on the device has a buffer of its own.
        self._staging = staging = Staging(len(self.on_device.slots) if self.on_device is not None else 1)
        delivery = Delivery(self.on_device)
        self._overlapped: OverlappedBuckets | None = None
        if device is None and world.nodes > 1:
            self._overlapped = OverlappedBuckets(world, staging, delivery, aggregation.is_decoupled)
        self.reduced_parts = self._overlapped.reduced_parts if self._overlapped is not None else None
        self.is_decoupled = self.reduced_parts is not None
        self._reduction = BucketReduction(
            world, self.algorithms, self.residuals, staging, delivery, self.on_device, self._overlapped
        )
        self._scale: tuple[torch.Tensor, float] | None = None

    def measure_device(self) -> DeviceRates | None:
        """Return what this rank measures on its GPU; None if gradients are not reduced on a GPU. A collective of all
        ranks."""
        return measure_device(self.on_device)

    def is_overlapped(self, bucket: Bucket) -> bool:
        """Return True if a dense exchange of the bucket between nodes overlaps with the next buckets. The
        answer ignores the warm-up, which may use another algorithm."""
        return self._overlapped is not None and self.algorithms.may_overlap(bucket)

    def choose_intake(self, bucket: Bucket) -> Intake:
        """Return what happens to the bucket's gradients when they arrive."""
        if self.on_device is not None or bucket.has_rows:
            return "stays"
        if self.is_overlapped(bucket):
            return "moves into its part"
        is_alone = self.world.size == 1 and not self.algorithms.drains(bucket)
        if is_alone and not self.algorithms.choose_after_warmup(bucket).algorithm.compresses:
            return "is only read"
        return "moves into the bucket"

    @property
    def is_pipelined(self) -> bool:
        """True if `run` may return before its bucket is delivered, so that `flush` must follow."""
        return self.on_device is not None or self._overlapped is not None

    # ---- one bucket

    @without_grad
    def run(
        self,
        bucket: Bucket,
        density: float,
        is_warming_up: bool,
        mark: Mark | None = None,
        loss_scale: torch.Tensor | float = 1.0,
    ) -> bool:
        """Exchange the bucket's local gradients and add the means to the aggregated gradients in `.grad`. Return True
        if all values that this rank saw were finite, without those that `flush` still finishes. Residuals change only
        when `Residuals.accept` is called. `mark` is what `mark_caller` returned when the gradients were handed over;
        `loss_scale` is the factor by which the loss was multiplied."""
        with _HERE if self.on_device is None or mark is None else self._work_after(self.on_device, mark):
            if bucket.has_rows:
                return self._reduction.reduce_rows(bucket.parameters[0], mark)
            all_reduce = self.algorithms.choose(bucket, density, is_warming_up)
            task = ReductionTask(bucket, all_reduce, density, mark, self._read_factor(loss_scale))
            finite = self._reduction.reduce_strided(task)
        if self.on_device is not None and self.world.nodes > 1:
            communication_thread.advance_meanwhile(self.on_device.advance)
        return finite

    def _read_factor(self, loss_scale: torch.Tensor | float) -> float:
        """Return the factor as a number. A factor on the device is read once per backward, because the host
        waits for the device to read it."""
        if not isinstance(loss_scale, torch.Tensor):
            return loss_scale
        if self._scale is None or self._scale[0] is not loss_scale:
            self._scale = loss_scale, float(loss_scale)
        return self._scale[1]

    @staticmethod
    @contextmanager
    def _work_after(on_device: DeviceAllReduce, mark: Mark) -> Iterator[None]:
        """Return a context in which torch works on the stream of the exchange, after `mark`."""
        on_device.memory.enter_thread()
        on_device.wait_for(mark)
        with on_device.on_stream():
            yield

    # ---- the end of a backward

    @without_grad
    def flush(self) -> bool:
        """Finish the reductions that `run` has started. Return True if all values were finite."""
        if self.on_device is not None:
            self._staging.restart()
            self.on_device.memory.enter_thread()
            return self.on_device.flush()
        return self._overlapped is None or self._overlapped.flush()

    def can_check_finite_on_device(self, buckets: Iterable[Bucket]) -> bool:
        """Return True if the ranks can decide on the device if these buckets are finite; no host then waits. Buckets
        must not pass through host memory, and no residual may depend on the answer. The result is the same on all
        ranks."""
        if self.on_device is None or self._finite_check == "host":
            return False
        if not self.on_device.memory.is_cuda and self._finite_check != "device":
            return False
        return all(self.algorithms.stays_on_device(bucket) for bucket in buckets)

    @without_grad
    def flush_undecided(self) -> DeviceFlag:
        """Finish the reductions that `run` has started. Return a flag that is 1 on all ranks if a value was not finite.
        The host does not wait for the device. Call this only if `can_check_finite_on_device` returned True."""
        assert self.on_device is not None
        self._staging.restart()
        self.on_device.memory.enter_thread()
        return self.on_device.flush_undecided()

    # ---- in the thread of the caller

    def mark_caller(self) -> Mark | None:
        """Return a mark that `run` waits for on the device: all work so far in the caller's stream."""
        return self.on_device.mark_caller() if self.on_device is not None else None

    def make_caller_wait(self) -> None:
        """Make the caller's stream wait for the delivered gradients."""
        if self.on_device is not None:
            self.on_device.make_caller_wait()

    @torch.no_grad()
    def write_nan_if_flagged(self, flag: DeviceFlag, gradients: Iterable[torch.Tensor]) -> None:
        """Write NaN into a gradient if the flag is 1, on the stream of the caller: clipping and GradScaler then decide
        the same on every rank."""
        assert self.on_device is not None
        self.on_device.lend(flag.tensor)
        first = next((gradient for gradient in gradients if gradient.numel()), None)
        if first is not None:
            entry = view_real(first).as_strided((1,), (1,))
            entry.mul_(torch.where(flag.tensor > 0, torch.nan, 1.0))
