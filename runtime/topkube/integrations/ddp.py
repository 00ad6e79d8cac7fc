"""A communication hook for torch's DistributedDataParallel: sparse gradients without MPI. docs/ddp.md explains it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist

from topkube import kernels
from topkube.algorithms import CHOICES
from topkube.errors import ArgumentError, TrainingError
from topkube.integrations.ddp_groups import NodeRanks
from topkube.integrations.ddp_model import HookedModel
from topkube.kernels.selection import entries_kept
from topkube.settings import Settings
from topkube.telemetry import phases
from topkube.training.exchange.aggregation import AggregationSettings
from topkube.training.exchange.autograd.loss_scale import find_loss_scale, has_scaled_losses, watch_scalers
from topkube.training.exchange.autograd.nested_backward import refuse_nested_backward
from topkube.training.ranks.agreement import digest

HITOPK = "hitopk"

Hook = Callable[[Any, Any], torch.futures.Future[torch.Tensor]]
"""A hook takes its state, which TopKube does not use, and a `torch.distributed.GradBucket`."""


def ddp_hook(
    aggregation: str | None = None,
    *,
    density: float | None = None,
    wire: str | None = None,
    warmup_steps: int | None = None,
    ranks_per_node: int | None = None,
    process_group: Any = None,
) -> Hook:
    """Return a hook for `DistributedDataParallel.register_comm_hook(None, hook)`. A collective: all ranks call it,
    after `torch.distributed.init_process_group("gloo")`.

    If the model has a process group of its own, pass it as `process_group` too: the members then call this together,
    and the hook averages over them. The default is the group of all ranks.

    The hook computes the mean of each bucket over these ranks as HiTopKComm does: a sum within the node, the largest
    entries between nodes, error feedback for the rest. `aggregation` is "hitopk", or "auto" and "dense", which both
    send the whole gradient. `density` is the share of entries that is sent between nodes, `wire` the format of their
    values ("fp32", "bf16", "fp16"), and `warmup_steps` the steps over which the density falls from 1 to `density`.
    Arguments that are None come from the job's spec.aggregation. `ranks_per_node` is by default LOCAL_WORLD_SIZE, which
    torchrun and `topkube run` set. The first step is dense, because DistributedDataParallel makes its final buckets
    after that step.

    Buckets are tensors on the CPU. Those of float32, bfloat16 and float16 are compressed, and those of float64 are
    sent whole. If a `GradScaler` changes its factor, residuals are rescaled. Raises TrainingError if
    torch.distributed is not initialized for tensors on the CPU, or if this rank is no member of `process_group`, and
    ArgumentError if an argument has an invalid value, or another value than on other ranks.
    """
    if not (dist.is_available() and dist.is_initialized()):
        raise TrainingError(
            "torch.distributed is not initialized",
            cause="ddp_hook is called before init_process_group",
            next_step='call torch.distributed.init_process_group("gloo") first',
        )
    settings = Settings.from_environment()
    values = AggregationSettings.from_settings(
        settings, algorithm=aggregation, density=density, wire=wire, warmup_steps=warmup_steps
    )
    ranks = NodeRanks.find(process_group, ranks_per_node)
    _compare_settings(values, ranks)
    if values.algorithm not in (HITOPK, *CHOICES):
        raise ArgumentError(
            f"aggregation is {values.algorithm!r}, which ddp_hook does not support",
            next_step=f"choose one of {HITOPK}, {', '.join(CHOICES)}, or use topkube.DistributedOptimizer",
        )
    exchange = _Exchange(values, ranks)

    # torch refuses annotations that are text, as they are in this module.
    def topkube_hook(state, bucket):  # type: ignore[no-untyped-def]
        return exchange.submit(bucket)

    return topkube_hook


def check_device(device: torch.device) -> None:
    """Raise TrainingError if the hook does not support gradients on `device`."""
    if device.type != "cpu":
        raise TrainingError(
            f"the gradients are on {device}, and ddp_hook supports tensors on the CPU only",
            next_step="use topkube.DistributedOptimizer, which exchanges gradients on GPUs",
        )


def _check_gradients(buffer: torch.Tensor) -> None:
    """Raise TrainingError if the hook does not support the gradients of a bucket."""
    if buffer.layout != torch.strided:
        raise TrainingError(
            "a parameter has sparse gradients, and ddp_hook supports dense gradients only",
            cause="torch.nn.Embedding(sparse=True)",
            next_step="pass sparse=False, or use topkube.DistributedOptimizer, which exchanges sparse gradients",
        )
    check_device(buffer.device)


def _run_at_end(callback: Callable[[], None]) -> None:
    """Run `callback` at the end of the backward pass that runs, after the callbacks that wait already, in the thread
    that called backward()."""
    torch.autograd.Variable._execution_engine.queue_callback(callback)


# torch 2.13 has a new name for this call, and warns about the old name.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


@dataclass
class _Residual:
    """The values of a shard that were not sent, (length,) float32, in units of gradients multiplied by `loss_scale`."""

    values: torch.Tensor
    loss_scale: float

    def rescale(self, loss_scale: float) -> None:
        """Express the residual in the units of gradients that are multiplied by another factor."""
        if loss_scale != self.loss_scale:
            self.values *= loss_scale / self.loss_scale
            self.loss_scale = loss_scale


@dataclass(frozen=True)
class _ReadyBucket:
    """A bucket of step `step`, from 0, with the gradients of this rank, which are multiplied by `loss_scale`. `used`
    says which of its `parameters` have had a gradient on this rank; None if all have."""

    buffer: torch.Tensor
    parameters: list[torch.Tensor]
    used: list[bool] | None
    index: int
    step: int
    is_first: bool
    loss_scale: float

    def list_places(self) -> list[slice]:
        """Return the place of each parameter in the buffer."""
        # A complex number is two entries of the buffer.
        sizes = [parameter.numel() * (1 + parameter.is_complex()) for parameter in self.parameters]
        assert sum(sizes) == self.buffer.numel()
        return [slice(end - size, end) for size, end in zip(sizes, accumulate(sizes), strict=True)]


class _Exchange:
    """The exchange of all buckets of a model, in one thread and in the order of the calls, while backward continues."""

    def __init__(self, aggregation: AggregationSettings, ranks: NodeRanks) -> None:
        ranks.check()
        watch_scalers()
        self._aggregation = aggregation
        self._local_size, self._nodes, self._size = len(ranks.nodes[0]), len(ranks.nodes), len(ranks.ranks)
        self._in_node, self._across = ranks.open_groups()
        self._model = HookedModel(ranks.ranks)
        self._may_leave_out: bool | None = None
        """True if parameters may be unused in a step, on any rank; None until the ranks have agreed on it."""
        self._thread = ThreadPoolExecutor(1, "topkube-ddp")
        self._step, self._last_index = -1, math.inf
        self._loss_scale = 1.0
        self._residuals: dict[int, _Residual] = {}
        self._pending: dict[int, _Residual] = {}
        """Residuals of the last step, by bucket. The next step commits them, unless a gradient was not finite."""
        self._is_finite = True
        self._error: Exception | None = None
        """The error that ended the exchange: ranks are out of step after it."""

    def submit(self, bucket: Any) -> torch.futures.Future[torch.Tensor]:
        """Return the future of a bucket's mean, which is written into the bucket's own memory. Raises TrainingError for
        gradients that the hook does not support, for those of another model, and the error of an earlier bucket."""
        self._raise_error()
        buffer, parameters, index = bucket.buffer(), bucket.parameters(), bucket.index()
        is_first = index <= self._last_index  # torch may leave out buckets, also the last
        self._last_index = index
        self._step += is_first
        self._model.check(parameters, is_first_pass=self._step == 0)
        _check_gradients(buffer)
        task = torch._C._current_graph_task_id()
        is_backward = task >= 0  # a rank that has joined (Join) sends zeros outside a backward
        if is_backward:
            if has_scaled_losses():
                refuse_nested_backward()  # its factor is that of the outer pass
            self._loss_scale = float(find_loss_scale(task))
        used = self._model.take_used(parameters)
        ready = _ReadyBucket(buffer, parameters, used, index, self._step, is_first, self._loss_scale)
        future = torch.futures.Future[torch.Tensor]()
        job = self._thread.submit(self._run, future, ready)
        if is_backward:
            # torch waits for the buckets in a callback that it adds after this one. A callback that this one adds runs
            # after torch's.
            _run_at_end(lambda: _run_at_end(self._raise_error))
        else:
            job.result()
            self._raise_error()
        return future

    def _raise_error(self) -> None:
        if self._error is not None:
            raise self._error

    def _run(self, future: torch.futures.Future[torch.Tensor], bucket: _ReadyBucket) -> None:
        try:
            if self._error is not None:
                return
            with torch.no_grad():
                if bucket.is_first:
                    self._commit_residuals()
                self._exchange_bucket(bucket)
        except Exception as error:
            self._error = error  # torch would lose the type of an error in the future
        finally:
            future.set_result(bucket.buffer)

    def _exchange_bucket(self, bucket: _ReadyBucket) -> None:
        """Replace a bucket by its mean over all ranks. torch ignores the means of parameters that no rank used: nothing
        is sent of them, and their part of the bucket stays as it is."""
        is_whole = self._nodes == 1 or bucket.buffer.dtype == torch.float64 or self._is_whole_at(bucket.step)
        unused = [] if is_whole else self._find_unused(bucket)
        phases.current.note_density(1.0 if is_whole else self._aggregation.density_at(bucket.step))
        phases.current.sent(dense=2 * (self._size - 1) * bucket.buffer.nbytes // self._size)
        if len(unused) == len(bucket.parameters):
            return
        kept = [bucket.buffer[place].clone() for place in unused]
        self._average_bucket(bucket, is_whole, unused)
        # All ranks hold the same mean, so all ranks agree without a message.
        self._is_finite = self._is_finite and bool(torch.isfinite(bucket.buffer).all())
        for place, values in zip(unused, kept, strict=True):
            bucket.buffer[place] = values

    def _find_unused(self, bucket: _ReadyBucket) -> list[slice]:
        """Return the places of the parameters that no rank used, in the bucket. A collective of all ranks, if any
        rank's model may leave out parameters."""
        if self._may_leave_out is None:
            self._may_leave_out = bool(self._find_maximum(torch.tensor([self._model.finds_unused]))[0])
        if not self._may_leave_out:
            return []
        used = self._find_maximum(torch.tensor(bucket.used or [True] * len(bucket.parameters)))
        return [place for place, is_used in zip(bucket.list_places(), used.tolist(), strict=True) if not is_used]

    def _find_maximum(self, flags: torch.Tensor) -> torch.Tensor:
        """Return for each flag if it is set on any rank. flags: (n,) bool."""
        flags = flags.to(torch.uint8)
        with phases.current.timed("inter"):
            if self._local_size > 1:
                dist.all_reduce(flags, op=dist.ReduceOp.MAX, group=self._in_node)
            dist.all_reduce(flags, op=dist.ReduceOp.MAX, group=self._across)
        return flags

    def _commit_residuals(self) -> None:
        """Take over the residuals of the last step; drop them if a gradient was not finite, because the optimizer has
        then skipped the step."""
        if self._is_finite:
            self._residuals.update(self._pending)
        self._pending, self._is_finite = {}, True

    def _average_bucket(self, bucket: _ReadyBucket, is_whole: bool, unused: list[slice]) -> None:
        """Replace a bucket by its mean over all ranks, or by zeros at the places `unused`."""
        buffer = bucket.buffer
        count = buffer.numel()
        length = math.ceil(count / self._local_size)
        whole = buffer  # (local_size * length,)
        if count != self._local_size * length:
            whole = torch.zeros(self._local_size * length, dtype=buffer.dtype)
            whole[:count] = buffer
        with phases.current.timed("intra"):
            shard = self._sum_in_node(whole, length)
        shard *= 1 / self._size
        if self._nodes > 1:
            shard = self._sum_between_nodes(shard) if is_whole else self._compress(shard, bucket, unused)
        result = shard.to(buffer.dtype)
        if self._local_size > 1:
            with phases.current.timed("intra"):
                _all_gather(whole, result, group=self._in_node)
            phases.current.sent(intra=2 * (self._local_size - 1) * result.nbytes)
            result = whole
        if result.data_ptr() != buffer.data_ptr():
            buffer.copy_(result[:count])

    def _is_whole_at(self, step: int) -> bool:
        """Return True if the gradients of the step are sent whole."""
        values = self._aggregation
        return values.algorithm in CHOICES or step == 0 or values.density_at(step) >= 1

    def _sum_in_node(self, whole: torch.Tensor, length: int) -> torch.Tensor:
        """Return this rank's shard of the node's sum, added in rank order. (local_size * length,) -> (length,), float32
        or float64."""
        rows = whole.view(self._local_size, length)
        if self._local_size > 1:
            rows = torch.empty_like(rows)
            dist.all_to_all_single(rows.view(-1), whole, group=self._in_node)
        sum_type = torch.float64 if whole.dtype == torch.float64 else torch.float32
        shard = rows[0].to(sum_type, copy=True)
        for row in rows[1:]:
            shard += row
        return shard

    def _sum_between_nodes(self, shard: torch.Tensor) -> torch.Tensor:
        """Return the sum of a shard over all nodes, added in rank order. (length,) -> (length,), of the same type.

        Each node adds up one segment and sends the sum to all: the bytes and the memory do not grow with the number of
        nodes."""
        nodes, length = self._nodes, math.ceil(len(shard) / self._nodes)
        padded = torch.zeros(nodes * length, dtype=shard.dtype)
        padded[: len(shard)] = shard
        rows = torch.empty_like(padded).view(nodes, length)
        with phases.current.timed("inter"):
            dist.all_to_all_single(rows.view(-1), padded, group=self._across)
            total = rows[0]
            for row in rows[1:]:
                total += row
            _all_gather(padded, total, group=self._across)
        phases.current.sent(inter=2 * (nodes - 1) * total.nbytes)
        return padded[: len(shard)]

    def _compress(self, shard: torch.Tensor, bucket: _ReadyBucket, unused: list[slice]) -> torch.Tensor:
        """Return the sum of the largest entries of a shard over all nodes, added in rank order. (length,) -> (length,),
        float32. The residuals at the places `unused` of the bucket wait for a step that uses them."""
        length, values = len(shard), self._aggregation
        density = values.density_at(bucket.step)
        residual = self._residuals.get(bucket.index)
        if residual is None or len(residual.values) != length:
            residual = _Residual(torch.zeros(length, dtype=torch.float32), bucket.loss_scale)
        residual.rescale(bucket.loss_scale)
        entries = entries_kept(length, density)
        pending = torch.empty(length, dtype=torch.float32)
        with phases.current.timed("select"), self._set_aside(unused, shard, residual.values, pending):
            places, chosen = kernels.compress_(shard, residual.values, entries, out=pending)
            payload = kernels.encode(places, chosen, length, wire=values.wire, residual=pending)
        self._pending[bucket.index] = _Residual(pending, bucket.loss_scale)
        row_bytes = torch.as_tensor(payload)
        received = torch.empty(self._nodes, len(row_bytes), dtype=torch.uint8)
        with phases.current.timed("inter"):
            _all_gather(received.view(-1), row_bytes, group=self._across)
        phases.current.sent(inter=(self._nodes - 1) * len(row_bytes))
        total = torch.zeros(length, dtype=torch.float32)
        for row in received:
            kernels.decode_add_(total, row)
        return total

    @contextmanager
    def _set_aside(
        self, unused: list[slice], shard: torch.Tensor, residual: torch.Tensor, pending: torch.Tensor
    ) -> Iterator[None]:
        """Return a context in which `shard` and `residual` are zero at the places `unused` of the bucket. After it,
        `residual` is as before, and `pending` has the same values there. All three: (length,)."""
        length = len(shard)
        start = dist.get_rank(self._in_node) * length
        bounds = [(max(place.start - start, 0), min(place.stop - start, length)) for place in unused]
        places = [slice(first, end) for first, end in bounds if first < end]
        kept = [residual[place].clone() for place in places]
        for place in places:
            shard[place] = residual[place] = 0
        yield
        for place, values in zip(places, kept, strict=True):
            residual[place] = pending[place] = values


def _compare_settings(aggregation: AggregationSettings, ranks: NodeRanks) -> None:
    """Raise ArgumentError on all ranks if ranks have different settings. A collective of all members."""
    own_digest = digest((aggregation, ranks.nodes))
    bounds = torch.tensor([own_digest, -own_digest], dtype=torch.float64)
    try:
        dist.all_reduce(bounds, op=dist.ReduceOp.MAX, group=ranks.process_group)
    except RuntimeError as error:
        raise TrainingError(
            f"torch.distributed cannot reduce a tensor on the CPU: {error}",
            cause="its backend is not gloo, or another rank did not call ddp_hook",
            next_step='call torch.distributed.init_process_group("gloo") on every rank, and ddp_hook after it',
        ) from error
    if bounds[0] != -bounds[1]:
        raise ArgumentError(
            f"ranks call ddp_hook with different settings; those of rank {dist.get_rank()} are {aggregation}, with"
            f" {len(ranks.nodes[0])} ranks per node",
            cause="TOPKUBE_* variables, LOCAL_WORLD_SIZE or the arguments differ between ranks",
            next_step="use the same settings, and the same number of ranks per node, on every rank",
        )
