"""The exchange of a bucket in the communication thread: collect gradients, all-reduce them, deliver the means."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from topkube import algorithms
from topkube.algorithms import DENSE, MATRIX_RANK, Algorithm, Choice
from topkube.arrays import flat_view
from topkube.collectives import AllReduce, Request, load
from topkube.collectives.decoupled import DecoupledAllReduce, Halved
from topkube.collectives.dense import Hierarchical
from topkube.collectives.device.memory import DeviceFlag, Mark
from topkube.collectives.device.nccl_link import measure_nccl_link
from topkube.collectives.device.pipeline import DeviceAllReduce
from topkube.collectives.double import mean_of_doubles
from topkube.collectives.error_feedback import Residual
from topkube.collectives.overlapped import UNDER_WAY, OverlappedAllReduce
from topkube.errors import ArgumentError
from topkube.settings import Settings
from topkube.training.exchange.aggregation import AggregationSettings
from topkube.training.exchange.buckets.bucket import Bucket
from topkube.training.exchange.buckets.parameter import Parameter, real_view
from topkube.training.exchange.residuals import Momentum, Residuals
from topkube.training.exchange.sparse_gradients import is_finite, mean_of_rows
from topkube.training.exchange.tuning import find_initial_dense_wire
from topkube.training.ranks.agreement import agreement
from topkube.training.ranks.communication_thread import schedule
from topkube.world import World

Pair = tuple[torch.Tensor, torch.Tensor]


@dataclass(eq=False)
class HalvedPart:
    """A part of a bucket whose gradients are reduced but not gathered. `flat` holds them side by side."""

    part: Bucket
    flat: torch.Tensor
    halved: Halved

    @property
    def is_in_place(self) -> bool:
        """True if `flat` is the memory of the gradients themselves, so that nothing is left to deliver."""
        address = self.flat.data_ptr()
        for parameter, start in zip(self.part.parameters, self.part.starts, strict=False):
            if not (parameter.tensor.requires_grad and parameter.local and parameter.stash is None):
                return False
            if real_view(parameter.tensor.grad).data_ptr() != address + start * self.flat.itemsize:
                return False
        return True


class BucketExchange:
    """The exchange of buckets among the ranks of a world. Methods run in the communication thread, in the same order on
    every rank; `ready` and `follow` run in the thread of the caller.

    If `device` is set, buckets are reduced on it, as a pipeline (collectives/device/): `run` then only starts the
    reduction of a bucket, and `flush` finishes all of them. Dense buckets between nodes of CPUs work in the same way
    (collectives/overlapped.py): the next buckets start while the messages of the first are under way.
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
        self.choice: Choice | None = None
        if device is None:
            _refuse_nccl(world, aggregation)
        self.change_to(aggregation)
        self.residuals = Residuals(world, self._keeper(aggregation), momentum, device)
        self.on_device = DeviceAllReduce(world, device, settings.device_graphs) if device is not None else None
        self._overlapped: OverlappedAllReduce | None = None
        if device is None and world.nodes > 1:
            self._overlapped = (DecoupledAllReduce if aggregation.is_decoupled else OverlappedAllReduce)(world)
        self.halved_parts: list[HalvedPart] = []
        """What this backward has reduced but not gathered."""
        self._agreement = agreement(world)
        self._staging: dict[tuple[torch.dtype, int], torch.Tensor] = {}
        self._scale: tuple[torch.Tensor, float] | None = None
        self._number = 0

    def measure_nccl_link(self) -> float | None:
        """Return the bytes per second that a node sends through NCCL; None if gradients are not reduced on a GPU. A
        collective of all ranks."""
        return measure_nccl_link(self.on_device)

    def adopt(self, choice: Choice | None) -> None:
        """Use what `auto` or `dense` stands for from the next bucket on. All ranks call this between two steps."""
        if choice is not None:
            self.choice, self.dense_wire = choice, choice.dense_wire
            self._resolve()

    def _resolve(self) -> None:
        self.large = self._all_reduce(sys.maxsize).algorithm
        self.dense = self._all_reduce(sys.maxsize, DENSE if self.large.compresses else self.large.name)

    def change_to(self, aggregation: AggregationSettings, begins: bool = False) -> None:
        """Exchange with these settings from the next backward on. All ranks call this between the same two steps. If
        a stage of the schedule `begins`, and its algorithm keeps no residual, the next step sends residuals whole."""
        self.aggregation, self._begins_stage, self.choice = aggregation, begins, None
        self.dense_wire = find_initial_dense_wire(aggregation)
        self._resolve()

    def _keeper(self, aggregation: AggregationSettings) -> Algorithm:
        """Return the first algorithm of the schedule that keeps a residual, or else the algorithm in force."""
        nodes, density = self.world.nodes, aggregation.density
        stages = [algorithms.resolve(name, nodes, sys.maxsize, density) for name in aggregation.algorithms]
        return next((algorithm for algorithm in stages if algorithm.residual is not None), self.large)

    def _drains(self, bucket: Bucket) -> bool:
        """Return True if the exchange also sends the bucket's residual, because the algorithm in force does not keep
        it. The same on all ranks, whatever their residuals hold."""
        if not self._begins_stage or bucket.small or not self.residuals.are_kept:
            return False
        return self._all_reduce(bucket.length).algorithm.residual is None

    def is_sparse(self, bucket: Bucket) -> bool:
        """Return True if the bucket's exchange reads or leaves a residual, once the warm-up has begun to lower the
        density."""
        keeps = not bucket.small and self._all_reduce(bucket.length).algorithm.residual is not None
        return keeps or self._drains(bucket)

    def is_overlapped(self, bucket: Bucket) -> bool:
        """Return True if a dense exchange of the bucket between nodes overlaps with the next buckets. All-reduces of
        the warm-up do not count."""
        if self._overlapped is None or bucket.has_rows or bucket.dtype == torch.float64:
            return False
        return isinstance(self.dense if bucket.small else self._all_reduce(bucket.length), Hierarchical)

    def algorithm_of(self, bucket: Bucket, density: float, warming: bool) -> str:
        """Return the name of the algorithm that `run` uses for the bucket."""
        return self._all_reduce_of(bucket, density, warming).algorithm.name

    def _all_reduce_of(self, bucket: Bucket, density: float, warming: bool) -> AllReduce:
        whole = warming and density == 1 and not self.aggregation.momentum_correction
        return self.dense if bucket.small or whole else self._all_reduce(bucket.length)

    def _all_reduce(self, length: int, name: str | None = None) -> AllReduce:
        """Return the implementation for large tensors, or of the algorithm called `name`."""
        if name is None and self.choice is not None:
            return load(self.choice.algorithm)
        name = name or self.aggregation.algorithm
        return load(algorithms.resolve(name, self.world.nodes, length, self.aggregation.density))

    @torch.no_grad()
    def run(
        self,
        bucket: Bucket,
        density: float,
        warming: bool,
        mark: Mark | None = None,
        loss_scale: torch.Tensor | float = 1.0,
    ) -> bool:
        """Exchange the bucket's local gradients and add the means to the aggregated gradients in `.grad`. Return True
        if all values that this rank saw were finite. Residuals change with `accept`. `mark` is the result of `ready`
        when the gradients were handed over; `loss_scale` is the factor by which the loss was
        multiplied."""
        with self._after(mark):
            if bucket.has_rows:
                self._finish_overlapped()
                return self._exchange_rows(bucket.parameters[0], mark)
            return self._exchange_strided(bucket, density, warming, mark, self._factor(loss_scale))

    def _factor(self, loss_scale: torch.Tensor | float) -> float:
        """Return the factor as a number. A factor on the device is read once per backward, because that waits."""
        if not isinstance(loss_scale, torch.Tensor):
            return loss_scale
        if self._scale is None or self._scale[0] is not loss_scale:
            self._scale = loss_scale, float(loss_scale)
        return self._scale[1]

    @contextmanager
    def _after(self, mark: Mark | None) -> Iterator[None]:
        """Return a context in which torch works on the stream of the exchange, after `mark`."""
        if self.on_device is None or mark is None:  # no streams, or the thread of the caller
            yield
            return
        self.on_device.memory.enter_thread()
        self.on_device.after(mark)
        with self.on_device.on_stream():
            yield

    def _exchange_strided(
        self, bucket: Bucket, density: float, warming: bool, mark: Mark | None, loss_scale: float
    ) -> bool:
        trainable = [parameter for parameter in bucket.parameters if parameter.tensor.requires_grad]
        all_reduce = self._all_reduce_of(bucket, density, warming)
        if self._drains(bucket):
            return self._exchange_with_residual(bucket, all_reduce, density, mark, loss_scale)
        if all_reduce.algorithm.residual is None and bucket.residual is not None:
            self.residuals.forget_zeros(bucket)
        if self.world.size == 1 and not all_reduce.algorithm.compresses:
            return self._deliver_alone(trainable, mark)
        if bucket.dtype != torch.float64:
            if self.on_device is not None:
                self._begin(bucket, all_reduce, density, mark, loss_scale)
                return True
            if self._overlapped is not None and isinstance(all_reduce, Hierarchical):
                self._begin_overlapped(self._overlapped, bucket, all_reduce, density, loss_scale)
                return True
        self._finish_overlapped()
        if bucket.dtype == torch.float64:
            return self._exchange_doubles(bucket, mark)
        flat = self._collect(bucket)
        request = self._request(flat_view(flat, "bucket", writable=True), bucket, all_reduce, density, loss_scale)
        with self._frozen_aside(bucket, request.residual):
            finite = all_reduce.run(self.world, request)
        self._deliver(bucket, flat, mark)
        return finite

    def _exchange_with_residual(
        self, bucket: Bucket, all_reduce: AllReduce, density: float, mark: Mark | None, loss_scale: float
    ) -> bool:
        """Exchange the gradients with all that was not sent before, by an algorithm that keeps nothing."""
        self._finish_overlapped()
        flat, residual = self._collect(bucket), self.residuals.of(bucket, loss_scale)
        with self._frozen_aside(bucket, residual):
            start, stop = self.residuals.range_of(bucket)
            owed = torch.as_tensor(residual.current, device=flat.device)
            flat[start:stop] += (owed * self.world.size).to(flat.dtype)  # the mean divides by the ranks
            residual.pending[:] = 0
            if self.on_device is not None:
                request = self._request(flat, bucket, all_reduce, density, loss_scale)
                self.on_device.begin(all_reduce, request, finished=lambda: self._deliver(bucket, flat, mark))
                return True
            array = flat_view(flat, "bucket", writable=True)
            finite = all_reduce.run(self.world, self._request(array, bucket, all_reduce, density, loss_scale))
        self._deliver(bucket, flat, mark)
        return finite

    def _request(self, array: Any, bucket: Bucket, all_reduce: AllReduce, density: float, loss_scale: float) -> Request:
        algorithm = all_reduce.algorithm
        return Request(
            array,
            "mean",
            density if algorithm.compresses else 1.0,
            self.aggregation.wire if algorithm.compresses else "fp32",
            self.aggregation.selection,
            self.residuals.of(bucket, loss_scale) if algorithm.residual is not None else None,
            "fp32" if bucket.small else self.dense_wire,
            self.aggregation.matrix_rank,
            bucket.matrices if MATRIX_RANK in algorithm.parameters else (),
        )

    def _frozen_aside(self, bucket: Bucket, residual: Residual | None) -> AbstractContextManager[None]:
        if residual is None or all(parameter.tensor.requires_grad for parameter in bucket.parameters):
            return nullcontext()
        return self.residuals.frozen_aside(bucket, residual)

    def ready(self) -> Mark | None:
        """Return a mark that `run` waits for on the device: all work so far in the caller's stream."""
        return self.on_device.ready() if self.on_device is not None else None

    @torch.no_grad()
    def flush(self) -> bool:
        """Finish the reductions that `run` has started. Return True if all values were finite."""
        if self.on_device is not None:
            self.on_device.memory.enter_thread()
            return self.on_device.flush()
        self._finish_overlapped()
        if isinstance(self._overlapped, DecoupledAllReduce):
            self.gather(self.halved_parts[::-1])  # the ranks agree meanwhile if the step is finite
        return self._overlapped is None or self._overlapped.take_finite()

    def agrees_on_device(self, buckets: Iterable[Bucket]) -> bool:
        """Return True if all ranks agree on the device whether these buckets are finite, so that no host waits for the
        answer: no byte of them passes through host memory, and no residual depends on the answer. The same on all
        ranks."""
        if self.on_device is None or self._finite_check == "host":
            return False
        if not self.on_device.memory.is_cuda and self._finite_check != "device":
            return False
        return all(self._stays_on_device(bucket) for bucket in buckets)

    def _stays_on_device(self, bucket: Bucket) -> bool:
        if bucket.has_rows or bucket.dtype == torch.float64 or self._drains(bucket):
            return False
        algorithm = (self.dense if bucket.small else self._all_reduce(bucket.length)).algorithm
        return algorithm.residual is None and (self.world.nodes == 1 or algorithm.needs_gpu)

    @torch.no_grad()
    def flush_undecided(self) -> DeviceFlag:
        """Finish the reductions that `run` has started. Return a flag that is 1 on all ranks if a value was not finite.
        The host does not wait for the device. Only if `agrees_on_device`."""
        assert self.on_device is not None
        self.on_device.memory.enter_thread()
        return self.on_device.flush_undecided()

    @torch.no_grad()
    def spread_flag(self, flag: DeviceFlag, gradients: Iterable[torch.Tensor]) -> None:
        """Write NaN into a gradient if the flag is 1, on the stream of the caller: clipping and GradScaler then decide
        the same on every rank."""
        assert self.on_device is not None
        self.on_device.lend(flag.tensor)
        first = next((gradient for gradient in gradients if gradient.numel()), None)
        if first is not None:
            entry = real_view(first).as_strided((1,), (1,))
            entry.mul_(torch.where(flag.tensor > 0, torch.nan, 1.0))

    @property
    def is_pipelined(self) -> bool:
        """True if `run` may return before its bucket is delivered, so that `flush` must follow."""
        return self.on_device is not None or self._overlapped is not None

    def follow(self) -> None:
        """Make the caller's stream wait for the delivered gradients."""
        if self.on_device is not None:
            self.on_device.follow()

    def _exchange_doubles(self, bucket: Bucket, mark: Mark | None) -> bool:
        flat = self._collect(bucket)
        host = flat.cpu()
        finite = mean_of_doubles(self.world, host.numpy())
        if host is not flat:
            flat.copy_(host)
        self._deliver(bucket, flat, mark)
        return finite

    def _exchange_rows(self, parameter: Parameter, mark: Mark | None) -> bool:
        if not parameter.tensor.requires_grad:
            parameter = Parameter(parameter.index, parameter.name, parameter.tensor, aggregated=True)
        own = parameter.tensor.grad if parameter.local else None
        mean = mean_of_rows(self.world, self._agreement, own, parameter.tensor, parameter.gradient_dtype)
        finite = is_finite(mean)
        if not parameter.tensor.requires_grad:
            return finite
        if parameter.aggregated and parameter.tensor.grad is not None:
            mean = mean + parameter.tensor.grad
        if parameter.stash is not None:
            mean = mean + parameter.stash
        self._lend(mean, mark)
        self._borrow(parameter.tensor.grad, parameter.stash)
        parameter.created = parameter.tensor.grad is None
        parameter.tensor.grad = mean
        parameter.deliver()
        return finite

    def _begin_overlapped(
        self, pieces: OverlappedAllReduce, bucket: Bucket, all_reduce: Hierarchical, density: float, loss_scale: float
    ) -> None:
        whole = torch.empty(bucket.length, dtype=bucket.dtype, device="meta")
        request = self._request(whole, bucket, all_reduce, density, loss_scale)
        call = all_reduce.enter(self.world, request)
        for part in bucket.parts:
            is_halved = isinstance(pieces, DecoupledAllReduce)
            flat = self._collect(part, None if is_halved else UNDER_WAY + 2)
            array = flat_view(flat, "bucket", writable=True)
            if isinstance(pieces, DecoupledAllReduce):
                halved = pieces.halve(call, array, request.scale(self.world.size), request.dense_wire)
                self.halved_parts.append(HalvedPart(part, flat, halved))
                continue
            deliver = partial(self._deliver_part, part, flat)
            pieces.begin(call, array, request.scale(self.world.size), deliver, request.dense_wire)
        schedule().advance_meanwhile(pieces.advance)

    @torch.no_grad()
    def _deliver_part(self, part: Bucket, flat: torch.Tensor) -> None:
        self._deliver(part, flat, None)

    def _finish_overlapped(self) -> None:
        """Finish the dense buckets that are under way, before an exchange that sends its messages in another way."""
        if self._overlapped is not None:
            self._overlapped.finish()

    @property
    def is_decoupled(self) -> bool:
        """True if dense exchanges are made in two halves."""
        return isinstance(self._overlapped, DecoupledAllReduce)

    def take_halved_parts(self) -> list[HalvedPart]:
        """Return what this backward has reduced but not gathered. The last part comes first, because the next forward
        needs it first."""
        parts, self.halved_parts = self.halved_parts[::-1], []
        return parts

    def gather(self, parts: Sequence[HalvedPart]) -> None:
        """Begin to gather the parts, in their order."""
        assert isinstance(self._overlapped, DecoupledAllReduce)
        self._overlapped.gather([part.halved for part in parts])
        schedule().advance_meanwhile(self._overlapped.advance, is_awaited=True)

    def finish_gather(self, parts: Sequence[HalvedPart]) -> None:
        """Return when the parts are gathered."""
        assert isinstance(self._overlapped, DecoupledAllReduce)
        for part in parts:
            self._overlapped.finish_gather(part.halved)

    @torch.no_grad()
    def gather_now(self) -> None:
        """Gather and deliver all that this backward has reduced."""
        parts = self.take_halved_parts()
        if parts:
            self.gather(parts)
            self.finish_gather(parts)
        for part in parts:
            self._deliver(part.part, part.flat, None)

    def _begin(
        self, bucket: Bucket, all_reduce: AllReduce, density: float, mark: Mark | None, loss_scale: float
    ) -> None:
        assert self.on_device is not None
        flat = self._collect(bucket)
        request = self._request(flat, bucket, all_reduce, density, loss_scale)
        with self._frozen_aside(bucket, request.residual):
            self.on_device.begin(all_reduce, request, finished=lambda: self._deliver(bucket, flat, mark))

    def _collect(self, bucket: Bucket, buffers: int | None = 1) -> torch.Tensor:
        """Return the bucket's local gradients in one tensor: their own memory if they lie side by side, otherwise a
        staging buffer, one of `buffers`, or a new buffer for None."""
        if bucket.memory is not None and (values := bucket.memory.whole()) is not None:
            return values
        only = bucket.parameters[0]
        if len(bucket.parameters) == 1 and only.local and only.tensor.requires_grad and only.stash is None:
            gradient = real_view(only.tensor.grad)
            if gradient.is_contiguous():
                return gradient.detach().view(-1)
        staging = self._stage(bucket, buffers)
        copies, gradients, absent = list[torch.Tensor](), list[torch.Tensor](), list[torch.Tensor]()
        for parameter, start in zip(bucket.parameters, bucket.starts, strict=False):
            piece = staging[start : start + parameter.length]
            if parameter.local and parameter.tensor.requires_grad:
                gradient = real_view(parameter.tensor.grad)
                copies.append(piece.view(gradient.shape))
                gradients.append(gradient)
            else:
                absent.append(piece)
        copy_each(copies, gradients)
        if absent:
            torch._foreach_zero_(absent)
        return staging[: bucket.length]

    def _stage(self, bucket: Bucket, buffers: int | None) -> torch.Tensor:
        """Return a staging buffer for the bucket's gradients, one of `buffers`, or a new buffer for None."""
        device = bucket.parameters[0].tensor.device
        if buffers is None:
            return torch.empty(bucket.length, dtype=bucket.dtype, device=device)
        self._number += 1  # on a device two buckets are reduced at the same time
        place = (bucket.dtype, self._number % (2 if self.on_device is not None else buffers))
        staging = self._staging.get(place)
        if staging is None or staging.numel() < bucket.length:
            staging = self._staging[place] = torch.empty(bucket.length, dtype=bucket.dtype, device=device)
        return staging

    def _deliver(self, bucket: Bucket, flat: torch.Tensor, mark: Mark | None) -> None:
        """Write the means in `flat` into `.grad`, or add them to it, with a few launches for all parameters."""
        trainable = [
            (parameter, flat[start : start + parameter.length])
            for parameter, start in zip(bucket.parameters, bucket.starts, strict=False)
            if parameter.tensor.requires_grad
        ]
        copies, adds, stashes = list[Pair](), list[Pair](), list[Pair]()
        for parameter, values in trainable:
            is_new = parameter.tensor.grad is None
            if is_new:
                parameter.created = True
                parameter.tensor.grad = torch.empty_like(parameter.tensor, dtype=parameter.gradient_dtype)
                self._lend(parameter.tensor.grad, mark)
            gradient = real_view(parameter.tensor.grad)
            piece = values.view(gradient.shape)
            if parameter.aggregated and not is_new:
                adds.append((gradient, piece))
            elif gradient.data_ptr() != piece.data_ptr():
                copies.append((gradient, piece))
            if parameter.stash is not None:
                stashes.append((real_view(parameter.stash), gradient))
        for pairs, act in ((copies, copy_each), (adds, torch._foreach_add_), (stashes, torch._foreach_add_)):
            if pairs:
                act([to for to, _ in pairs], [by for _, by in pairs])
        for parameter, _ in trainable:
            if parameter.stash is not None:  # the script may hold a reference: it stays the gradient
                self._borrow(parameter.tensor.grad)
                parameter.tensor.grad = parameter.stash
            parameter.deliver()

    def _deliver_alone(self, parameters: Sequence[Parameter], mark: Mark | None) -> bool:
        """Deliver gradients as they are, in a world of one rank. Return True if they are finite; on a device, `flush`
        reports that. Gradients that are not finite are delivered too: the end of backward then skips the step, as with
        several ranks."""
        gradients = [real_view(p.tensor.grad) for p in parameters if p.tensor.grad is not None]
        finite = True
        if self.on_device is None:
            finite = _finite(gradients)
        elif filled := [gradient for gradient in gradients if gradient.numel()]:
            largest = torch.stack(list(torch._foreach_norm(filled, torch.inf)))
            self.on_device.note_finite(largest.isfinite().all())
        for parameter in parameters:
            if parameter.tensor.grad is not None:
                if parameter.stash is not None:
                    parameter.stash.add_(parameter.tensor.grad)
                    if mark is not None:
                        self._borrow(parameter.tensor.grad)
                    parameter.tensor.grad = parameter.stash
                parameter.deliver()
        return finite

    def _borrow(self, *tensors: torch.Tensor | None) -> None:
        """Keep the memory of the caller's tensors, which lose their last reference here, until this exchange has read
        them."""
        if self.on_device is not None:
            for tensor in tensors:
                if tensor is not None:
                    self.on_device.memory.borrow(tensor)

    def _lend(self, tensor: torch.Tensor, mark: Mark | None) -> None:
        """Keep the memory of a tensor of the exchange's stream until the caller has read it, also if the caller frees
        it early."""
        if self.on_device is not None:
            self.on_device.memory.lend(tensor, mark)


def copy_each(to: list[torch.Tensor], by: list[torch.Tensor]) -> None:
    """Copy each tensor of `by` into the tensor of `to` at its place. On a GPU, a few launches copy all of them."""
    if to:
        torch._foreach_copy_(to, by)


def _finite(gradients: Sequence[torch.Tensor]) -> bool:
    """Return True if all entries are finite, with one read and one wait for the device. Entries are checked one by one
    only if a sum is not finite, because the sum may have overflowed."""
    if not gradients:
        return True
    sums = torch.stack([gradient.sum().float() for gradient in gradients])
    return bool(torch.isfinite(sums).all()) or all(bool(torch.isfinite(gradient).all()) for gradient in gradients)


def _refuse_nccl(world: World, aggregation: AggregationSettings) -> None:
    """Raise ArgumentError if the job names an algorithm for GPUs only. Gradients here are in host memory."""
    for name in aggregation.algorithms:
        if algorithms.resolve(name, world.nodes, sys.maxsize, aggregation.density).needs_gpu:
            raise ArgumentError(
                f"the algorithm {name} reduces gradients on GPUs only, and the parameters are in host memory",
                cause="this process has no GPU, or the model was not moved to topkube.device()",
                next_step="choose the algorithm auto, or move the model to a GPU before DistributedOptimizer",
            )
