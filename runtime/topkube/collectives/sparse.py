"""Sparse all-reduce: `HiTopK` and `Naive`. Both send the largest entries only; what is not sent stays in the
residual."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np

from topkube import _kernels, kernels
from topkube.algorithms.cost import PAIRWISE_LIMIT, SPARSE_INSIDE
from topkube.arrays import DTYPE_CODES, FLOATS, Array, as_bytes, is_tensor
from topkube.collectives.all_reduce import AllReduce, ShardAllReduce, count_dense, reduce_into_residual
from topkube.collectives.call import Call, compute_shard_bounds, find_own_shard, reserve_workspace
from topkube.collectives.exchange import Exchanges, Place
from topkube.collectives.halves import HalvableAllReduce, Halves
from topkube.collectives.request import Request
from topkube.collectives.rings import gather_rows_around
from topkube.collectives.rounds import Exchange, gather_rows
from topkube.collectives.shard import Shard
from topkube.telemetry import phases
from topkube.world import World

_SURELY_FINITE = dict(zip(FLOATS, (3e38, 3e38, 6e4), strict=True))
"""A sum of fewer magnitudes than 2^16 that is below this bound is finite in its type, also if each addition is
rounded."""


def count_selected(length: int, density: float, shards: int = 1) -> int:
    """Return how many entries of a shard are sent: max(1, ceil(density * length / shards))."""
    return max(1, math.ceil(round(density * length / shards, 6)))  # 0.07 * 100 is 7.000000000000001


class HiTopK(ShardAllReduce, HalvableAllReduce):
    """HiTopKComm (Shi et al., "Towards Scalable Distributed Training of Deep Learning on Public Cloud Clusters",
    2021, section 3.2): reduce-scatter inside the node, top-k of each shard, all-gather of the entries among equal
    local ranks, all-gather inside the node. The mean is taken before selection; the residual belongs to the shard. With
    DeAR, the second half begins with the all-gather between nodes."""

    is_repeatable = True

    def run(self, world: World, request: Request) -> bool:
        call, x = Call(world, self.algorithm.name, request), request.array
        count_dense(world, request.nbytes)
        first, last = find_own_shard(world, x.size)
        shard, finite = _reduce_inside(call, request)
        bounds, k, row_bytes = _plan_rows(world, request)
        rows = reserve_workspace(world, "rows", world.shards * world.nodes * row_bytes, np.uint8)
        rows = rows.reshape(world.shards, world.nodes, row_bytes)
        if world.cross_comm is not None:
            own_row = rows[world.local_rank]
            _select(shard, min(k, shard.size), request, own_row[world.node])
            call.check_between_nodes()
            exchanges = Exchanges(world)
            exchanges.start(0, gather_rows(world.cross_links, own_row, 0))
            exchanges.finish(0, call)
            phases.current.sent(inter=(world.nodes - 1) * row_bytes)
        if rows.nbytes <= SPARSE_INSIDE * x.nbytes:
            call.all_gather(rows.reshape(-1))
            with phases.current.timed("intra", "add entries"):
                for shard_rows, start, stop in zip(rows, bounds, bounds[1:], strict=False):
                    finite = _sum_rows(x[start:stop], shard_rows, k, request.wire) and finite
        else:
            if world.cross_comm is not None:
                with phases.current.timed("intra", "add entries"):
                    finite = _sum_rows(x[first:last], rows[world.local_rank], k, request.wire) and finite
            call.all_gather(x)
        return finite

    def can_halve(self, dtype: str) -> bool:
        return dtype != "float16"  # the sum forms in the second half, and may be beyond the range of float16

    def begin_in_halves(self, world: World, request: Request, place: Place, kept: str) -> Halves:
        call, x = Call(world, self.algorithm.name, request), request.array
        count_dense(world, request.nbytes)
        first, last = find_own_shard(world, x.size)
        shard, is_finite = _reduce_inside(call, request)
        finite = [is_finite]
        if world.cross_comm is None:
            return Halves(call, None, 0, lambda comm: iter(()), None, finite)
        _, k, row_bytes = _plan_rows(world, request)
        rows = reserve_workspace(world, f"gathered rows{kept}", world.nodes * row_bytes, np.uint8)
        rows = rows.reshape(world.nodes, row_bytes)
        own_row = rows[world.node]
        _select(shard, min(k, shard.size), request, own_row)
        finite.append(_is_finite(own_row, last - first, k, request.wire))  # the wire may have a smaller range

        def greet() -> Exchange:
            yield from call.await_greetings()

        def gather(comm: Any) -> Exchange:
            phases.current.sent(inter=(world.nodes - 1) * row_bytes)
            yield from gather_rows(comm, rows, place.tag)
            with phases.current.timed("intra", "add entries", call.traced_bucket):
                _sum_rows(x[first:last], rows, k, request.wire)

        return Halves(call, greet(), 0, gather, None, finite)

    def pack(self, shard: Shard) -> Any:
        request, residual, length = shard.request, shard.request.residual, len(shard.values)
        k = count_selected(request.length, request.density, shard.world.shards)
        rows = shard.rows(max(_count_row_bytes(part, k, request.wire) for part in shard.lengths))
        k = min(k, length)
        is_fused = residual is not None and not residual.has_velocity and request.selection == "topk"
        if k == 0:
            indices, values = shard.scratch("no indices", 0, "uint32"), shard.scratch("no values", 0, "float32")
        elif residual is not None and is_fused:
            indices, values = kernels.compress_(
                shard.values, residual.current, k, out=residual.pending, previous=residual.threshold
            )
        else:
            total = shard.accumulate() if residual is not None else shard.values
            previous = residual.threshold if residual is not None else None
            indices, values = select_largest(total, k, request.selection, previous)
            if residual is not None:
                residual.clear(_convert_to_positions(indices))
        pending = residual.pending if residual is not None else None
        own = rows[shard.world.node, : kernels.encoded_size(length, k, request.wire)]
        kernels.encode(indices, values, length, wire=request.wire, residual=pending, out=own, wait=False)
        return rows

    def unpack(self, shard: Shard, received: Any) -> None:
        values, request = shard.values, shard.request
        k = min(count_selected(request.length, request.density, shard.world.shards), len(values))
        size = kernels.encoded_size(len(values), k, request.wire)
        shard.finite.append(kernels.sum_rows_(values, received, size, wait=False))
        if request.dtype != "float32":  # the sum may be beyond the range of 16 bits
            shard.check(values)


class Naive(AllReduce):
    """Every rank selects from its own array; entries go from all to all and are added in rank order. The residual has
    the array's length."""

    def run(self, world: World, request: Request) -> bool:
        call, x = Call(world, self.algorithm.name, request), request.array
        count_dense(world, request.nbytes)
        residual, scale = request.residual, request.scale(world.size)
        entries = reserve_workspace(world, "entries", x.size, np.float32) if residual is None else residual.pending
        with phases.current.timed("select"):
            kernels.sum_(entries if residual is None else residual.arriving, [x], scale)
            if residual is not None and residual.has_velocity:
                residual.accumulate()
            elif residual is not None:
                kernels.add_(entries, residual.current)
            finite = kernels.is_finite(entries)
        k = min(count_selected(x.size, request.density), x.size)
        size = _count_row_bytes(x.size, k, request.wire)
        rows = reserve_workspace(world, "rows", world.size * size, np.uint8).reshape(world.size, size)
        _select(entries, k, request, rows[world.rank])
        call.check_everywhere()
        exchanges = Exchanges(world)
        exchanges.start(0, gather_rows_around(world.comm, rows, 0))
        exchanges.finish(0, call)
        phases.current.sent(**count_sent_bytes(world, size))
        with phases.current.timed("intra", "add entries"):
            return _sum_rows(x, rows, k, request.wire) and finite


def count_sent_bytes(world: World, row_bytes: int) -> dict[str, int]:
    """Return the bytes that this rank sends inside its node and between nodes if all ranks gather rows
    (`gather_rows_around`)."""
    local_ranks, rows = world.node_ranks[world.node], world.size - 1
    if world.size <= PAIRWISE_LIMIT:
        between = world.size - len(local_ranks)
    else:
        between = 0 if (world.rank + 1) % world.size in local_ranks else rows
    return {"intra": (rows - between) * row_bytes, "inter": between * row_bytes}


def _reduce_inside(call: Call, request: Request) -> tuple[Array, bool]:
    """Reduce the array inside the node. Return this rank's shard, float32, to which the residual is added, and True if
    it is finite. Without a residual, the shard may be a buffer that the next call uses again."""
    world, x, residual = call.world, request.array, request.residual
    first, last = find_own_shard(world, x.size)
    if residual is not None:
        finite = reduce_into_residual(call, request, residual)
        return residual.pending, finite
    if x.dtype == np.float32:
        return x[first:last], call.reduce_scatter(x, request.scale(world.size))
    shard = reserve_workspace(world, "shard", last - first, np.float32)
    return shard, call.reduce_scatter(x, request.scale(world.size), shard)


def _plan_rows(world: World, request: Request) -> tuple[list[int], int, int]:
    """Return the bounds of all shards, how many entries of a shard are sent, and the bytes of a row."""
    bounds = compute_shard_bounds(request.length, world.shards)
    k = count_selected(request.length, request.density, world.shards)
    return bounds, k, max(_count_row_bytes(stop - start, k, request.wire) for start, stop in itertools.pairwise(bounds))


def _count_row_bytes(length: int, k: int, wire: str) -> int:
    """Return the bytes of a row of encoded entries: a multiple of 8, so that the next row is aligned."""
    return -(-kernels.encoded_size(length, min(k, length), wire) // 8) * 8


def _select(shard: Array, k: int, request: Request, row: Array) -> None:
    """Write the largest k entries of `shard` into `row`, encoded. With a residual, their rounding errors replace them
    in `shard`."""
    with phases.current.timed("select"):
        indices, values = np.empty(0, np.uint32), np.empty(0, np.float32)
        if k:
            indices, values = select_largest(shard, k, request.selection)
        if request.residual is not None:
            request.residual.clear(indices)
        payload = kernels.encode(
            indices, values, shard.size, wire=request.wire, residual=shard if request.residual is not None else None
        )
        row[: payload.size] = payload


def _sum_rows(out: Array, rows: Array, k: int, wire: str) -> bool:
    """Replace out by the sum of the sparse vectors in `rows`, added in their order. Return True if it is finite: a sum
    of finite values may be beyond the range of out's type."""
    if out.size == 0:
        return True
    size = kernels.encoded_size(out.size, min(k, out.size), wire)
    parts = [kernels.decode(row[:size], length=out.size) for row in rows]
    _kernels.sum_sparse(as_bytes(out), DTYPE_CODES[out.dtype], parts)
    # A sum that is surely in the range needs no pass over `out`. The comparison with a NaN is False.
    bound = sum(max(values.max(initial=0).item(), -values.min(initial=0).item()) for _, values in parts)
    return bound < _SURELY_FINITE[out.dtype] or bool(kernels.is_finite(out))


def _is_finite(row: Array, length: int, k: int, wire: str) -> bool:
    """Return True if the values of a row of encoded entries of a shard are finite."""
    if length == 0:
        return True
    _, values = kernels.decode(row[: kernels.encoded_size(length, min(k, length), wire)], length=length)
    return bool(kernels.is_finite(values))


def select_largest(
    x: Any, k: int, selection: str, previous: kernels.PreviousThreshold | None = None
) -> tuple[Any, Any]:
    """Return (indices, values) of k entries of `x`: the largest, or those that MSTopK takes for the largest."""
    select = kernels.mstopk if selection == "mstopk" else kernels.topk
    return select(x, k, previous=previous)


def _convert_to_positions(indices: Any) -> Any:
    """Return uint32 indices in the type that torch indexes with: int64."""
    if not is_tensor(indices):
        return indices
    import torch

    return indices.view(torch.int32).to(torch.int64) & 0xFFFFFFFF
