"""A communication hook for torch's DistributedDataParallel: sparse gradients without MPI. docs/ddp.md explains it."""

from __future__ import annotations

import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
import torch.distributed as dist

from topkube import kernels
from topkube.algorithms import CHOICES
from topkube.errors import ArgumentError, TrainingError
from topkube.kernels.selection import entries_kept
from topkube.settings import Settings, torch_local_size
from topkube.telemetry import phases
from topkube.training.exchange.aggregation import AggregationSettings

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
) -> Hook:
    """Return a hook for `DistributedDataParallel.register_comm_hook(None, hook)`. A collective: all ranks call it,
    after `torch.distributed.init_process_group("gloo")`.

    The hook computes the mean of each bucket over all ranks as HiTopKComm does: a sum within the node, the largest
    entries between nodes, error feedback for the rest. `aggregation` is "hitopk", or "auto" and "dense", which both
    send the whole gradient. `density` is the share of entries that is sent between nodes, `wire` the format of their
    values ("fp32", "bf16", "fp16"), and `warmup_steps` the steps over which the density falls from 1 to `density`.
    Arguments that are None come from the job's spec.aggregation. `ranks_per_node` is by default LOCAL_WORLD_SIZE, which
    torchrun and `topkube run` set. The first step is dense, because DistributedDataParallel makes its final buckets
    after that step.

    Buckets are float32, bfloat16 or float16 tensors on the CPU. Raises TrainingError if torch.distributed is not
    initialized, and ArgumentError if an argument has an invalid value.
    """
    if not (dist.is_available() and dist.is_initialized()):
        raise TrainingError(
            "torch.distributed is not initialized",
            cause="ddp_hook is called before init_process_group",
            next_step='call torch.distributed.init_process_group("gloo") first',
        )
    settings = Settings.from_environment()
    values = AggregationSettings.of(
        settings, algorithm=aggregation, density=density, wire=wire, warmup_steps=warmup_steps
    )
    if values.algorithm not in (HITOPK, *CHOICES):
        raise ArgumentError(
            f"aggregation is {values.algorithm!r}, which ddp_hook does not support",
            next_step=f"choose one of {HITOPK}, {', '.join(CHOICES)}, or use topkube.DistributedOptimizer",
        )
    exchange = _Exchange(values, ranks_per_node or torch_local_size() or 1)

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


# torch 2.13 has a new name for this call, and warns about the old name.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class _Exchange:
    """The exchange of all buckets of a model, in one thread and in the order of the calls, while backward continues."""

    def __init__(self, aggregation: AggregationSettings, local: int) -> None:
        rank, size = dist.get_rank(), dist.get_world_size()
        if local < 1 or size % local:
            raise ArgumentError(
                f"ranks_per_node is {local}, but {size} ranks cannot be divided into nodes of {local}",
                next_step="start the same number of ranks on every node, or pass ranks_per_node",
            )
        self._aggregation, self._local, self._nodes, self._size = aggregation, local, size // local, size
        node, place = divmod(rank, local)
        # Every rank makes every group, in the same order.
        in_node = [dist.new_group(list(range(first, first + local))) for first in range(0, size, local)]
        across = [dist.new_group(list(range(first, size, local))) for first in range(local)]
        self._in_node, self._across = in_node[node], across[place]
        self._thread = ThreadPoolExecutor(1, "topkube-ddp")
        self._step = 0
        self._is_first_bucket = True
        self._residuals: dict[int, torch.Tensor] = {}
        self._pending: dict[int, torch.Tensor] = {}
        """Residuals of the last step, by bucket. The next step commits them, unless a gradient was not finite."""
        self._finite = True

    def submit(self, bucket: Any) -> torch.futures.Future[torch.Tensor]:
        """Return the future of a bucket's mean, which is written into the bucket's own memory."""
        buffer, future = bucket.buffer(), torch.futures.Future[torch.Tensor]()
        check_device(buffer.device)
        self._thread.submit(self._run, future, buffer, bucket.index(), self._step, self._is_first_bucket)
        self._is_first_bucket = bucket.is_last()
        self._step += self._is_first_bucket
        return future

    def _run(
        self, future: torch.futures.Future[torch.Tensor], buffer: torch.Tensor, index: int, step: int, begins: bool
    ) -> None:
        try:
            with torch.no_grad():
                if begins:
                    self._commit()
                self._average(buffer, index, step)
                # All ranks hold the same mean, so all ranks agree without a message.
                self._finite = self._finite and bool(torch.isfinite(buffer).all())
        except Exception as error:
            future.set_exception(error)  # type: ignore[arg-type]  # torch declares another type
        else:
            future.set_result(buffer)

    def _commit(self) -> None:
        """Take over the residuals of the last step; drop them if a gradient was not finite, because the optimizer has
        then skipped the step."""
        if self._finite:
            self._residuals.update(self._pending)
        self._pending, self._finite = {}, True

    def _average(self, buffer: torch.Tensor, index: int, step: int) -> None:
        """Replace `buffer` by its mean over all ranks. buffer: (n,)."""
        count = buffer.numel()
        length = math.ceil(count / self._local)
        whole = buffer  # (local * length,)
        if count != self._local * length:
            whole = torch.zeros(self._local * length, dtype=buffer.dtype)
            whole[:count] = buffer
        phases.current.sent(dense=2 * (self._size - 1) * buffer.nbytes // self._size)
        with phases.current.timed("intra"):
            shard = self._sum_in_node(whole, length)
        shard *= 1 / self._size
        if self._nodes > 1:
            shard = self._sum_between_nodes(shard, index, step)
        result = shard.to(buffer.dtype)
        if self._local > 1:
            with phases.current.timed("intra"):
                _all_gather(whole, result, group=self._in_node)
            phases.current.sent(intra=2 * (self._local - 1) * result.nbytes)
            result = whole
        if result.data_ptr() != buffer.data_ptr():
            buffer.copy_(result[:count])

    def _sum_in_node(self, whole: torch.Tensor, length: int) -> torch.Tensor:
        """Return this rank's shard of the node's sum, added in rank order. (local * length,) -> (length,) float32."""
        rows = whole.view(self._local, length)
        if self._local > 1:
            rows = torch.empty_like(rows)
            dist.all_to_all_single(rows.view(-1), whole, group=self._in_node)
        shard = rows[0].to(torch.float32, copy=True)
        for row in rows[1:]:
            shard += row
        return shard

    def _sum_between_nodes(self, shard: torch.Tensor, index: int, step: int) -> torch.Tensor:
        """Return the sum of a shard over all nodes, added in rank order. (length,) -> (length,), float32."""
        length, values = len(shard), self._aggregation
        density = values.density_at(step)
        if values.algorithm in CHOICES or step == 0 or density >= 1:
            rows = torch.empty(self._nodes, length)
            with phases.current.timed("inter"):
                _all_gather(rows.view(-1), shard, group=self._across)
            phases.current.sent(inter=(self._nodes - 1) * shard.nbytes)
            shard = rows[0]
            for row in rows[1:]:
                shard += row
            return shard
        residual = self._residuals.get(index)
        if residual is None or len(residual) != length:
            residual = torch.zeros(length)
        entries = entries_kept(length, density)
        pending = torch.empty(length)
        with phases.current.timed("select"):
            places, chosen = kernels.compress_(shard, residual, entries, out=pending)
            payload = kernels.encode(places, chosen, length, wire=values.wire, residual=pending)
        self._pending[index] = pending
        row_bytes = torch.as_tensor(payload)
        received = torch.empty(self._nodes, len(row_bytes), dtype=torch.uint8)
        with phases.current.timed("inter"):
            _all_gather(received.view(-1), row_bytes, group=self._across)
        phases.current.sent(inter=(self._nodes - 1) * len(row_bytes))
        total = torch.zeros(length)
        for row in received:
            kernels.decode_add_(total, row)
        return total
