"""Sparse all-reduce: `naive` and `hitopk`. Both send the largest entries only; what is not sent stays in the
residual."""

from __future__ import annotations

import itertools
import math

import numpy as np

from topkube import _kernels, kernels
from topkube.arrays import BFLOAT16, Array
from topkube.collectives.call import Call, as_bytes, own_shard, shard_bounds, workspace
from topkube.collectives.dense import count_dense
from topkube.collectives.exchange import Exchanges, all_gather_rows
from topkube.collectives.registry import Algorithm, Request, register
from topkube.compression.error_feedback import Residual
from topkube.telemetry import phases
from topkube.world import World

_CODES = {np.dtype(np.float32): 0, BFLOAT16: 1, np.dtype(np.float16): 2}
_SPARSE_INSIDE = 0.25
"""Inside the node, encoded shards are gathered instead of dense ones where they are at most this share of the bytes."""


def kept(length: int, density: float, shards: int = 1) -> int:
    """How many entries of a shard are sent: max(1, ceil(density * length / shards))."""
    return max(1, math.ceil(round(density * length / shards, 6)))  # 0.07 * 100 is 7.000000000000001


def _hitopk(world: World, request: Request) -> bool:
    """HiTopKComm (Shi et al., "Towards Scalable Distributed Training of Deep Learning on Public Cloud Clusters",
    2021, section 3.2): reduce-scatter inside the node, top-k of each shard, all-gather of the entries among equal
    local ranks, all-gather inside the node. The mean is taken before selection; the residual belongs to the shard."""
    call, x = Call(world, "hitopk", request), request.array
    count_dense(world, x)
    first, last = own_shard(world, x.size)
    residual = request.residual
    if residual is not None:
        shard = residual.pending
        finite = _into_residual(call, request, residual)
    elif x.dtype == np.float32:
        shard = x[first:last]
        finite = call.reduce_scatter(x, request.scale(world.size))
    else:
        shard = workspace(world, "shard", last - first, np.float32)
        finite = call.reduce_scatter(x, request.scale(world.size), shard)

    bounds = shard_bounds(x.size, world.shards)
    k = kept(x.size, request.density, world.shards)
    sizes = [_row_bytes(stop - start, k, request.wire) for start, stop in itertools.pairwise(bounds)]
    rows = workspace(world, "rows", world.shards * world.nodes * max(sizes), np.uint8)
    rows = rows.reshape(world.shards, world.nodes, max(sizes))
    if world.cross_comm is not None:
        mine = rows[world.local_rank]
        _select(shard, min(k, shard.size), request, mine[world.node])
        call.same_between_nodes()
        exchanges = Exchanges(call)
        exchanges.start(0, all_gather_rows(world.cross_comm, mine, 0))
        exchanges.finish(0)
        phases.current.sent(inter=(world.nodes - 1) * max(sizes))
    if rows.nbytes <= _SPARSE_INSIDE * x.nbytes:
        call.all_gather(rows.reshape(-1))
        with phases.current.timed("intra"):
            for shard_rows, start, stop in zip(rows, bounds, bounds[1:], strict=False):
                finite = _spread(x[start:stop], shard_rows, k, request.wire) and finite
    else:
        if world.cross_comm is not None:
            with phases.current.timed("intra"):
                finite = _spread(x[first:last], rows[world.local_rank], k, request.wire) and finite
        call.all_gather(x)
    return finite


def _naive(world: World, request: Request) -> bool:
    """Every rank selects from its own array; entries go from all to all and are added in rank order. The residual has
    the array's length."""
    call, x = Call(world, "naive", request), request.array
    count_dense(world, x)
    residual, scale = request.residual, request.scale(world.size)
    entries = workspace(world, "entries", x.size, np.float32) if residual is None else residual.pending
    with phases.current.timed("select"):
        kernels.sum_(entries if residual is None else residual.arriving, [x], scale)
        if residual is not None and residual.momentum:
            residual.accumulate()
        elif residual is not None:
            kernels.add_(entries, residual.current)
        finite = kernels.is_finite(entries)
    k = min(kept(x.size, request.density), x.size)
    size = _row_bytes(x.size, k, request.wire)
    rows = workspace(world, "rows", world.size * size, np.uint8).reshape(world.size, size)
    _select(entries, k, request, rows[world.rank])
    call.same_everywhere()
    exchanges = Exchanges(call)
    exchanges.start(0, all_gather_rows(world.comm, rows, 0))
    exchanges.finish(0)
    neighbours = world.local_size - 1
    phases.current.sent(intra=neighbours * size, inter=(world.size - 1 - neighbours) * size)
    with phases.current.timed("intra"):
        return _spread(x, rows, k, request.wire) and finite


def _into_residual(call: Call, request: Request, residual: Residual) -> bool:
    """The node's sum of this rank's shard, with what was left of earlier ones, into `residual.pending`; whether it is
    finite."""
    scale = request.scale(call.world.size)
    if not residual.momentum:
        return call.reduce_scatter(request.array, scale, residual.pending, residual.current)
    finite = call.reduce_scatter(request.array, scale, residual.arriving)
    with phases.current.timed("select"):
        residual.accumulate()
    return finite


def _row_bytes(length: int, k: int, wire: str) -> int:
    """Bytes kept for the encoded entries of a shard: a whole number of words, so that the next row is aligned."""
    return -(-kernels.encoded_size(length, min(k, length), wire) // 8) * 8


def _select(shard: Array, k: int, request: Request, row: Array) -> None:
    """Puts the largest k entries of `shard` into `row`, encoded; with a residual, what they leave behind replaces
    them."""
    with phases.current.timed("select"):
        if k == 0:
            indices, values = np.empty(0, np.uint32), np.empty(0, np.float32)
        elif request.selection == "mstopk":
            indices, values = kernels.mstopk(shard, k)
        else:
            indices, values = kernels.topk(shard, k)
        if request.residual is not None:
            request.residual.clear(indices)
        payload = kernels.encode(
            indices, values, shard.size, wire=request.wire, residual=shard if request.residual is not None else None
        )
        row[: payload.size] = payload


def _spread(out: Array, rows: Array, k: int, wire: str) -> bool:
    """out becomes the sum of the sparse vectors in `rows`, added in their order; whether all values are finite."""
    if out.size == 0:
        return True
    size = kernels.encoded_size(out.size, min(k, out.size), wire)
    parts = [kernels.decode(row[:size], length=out.size) for row in rows]
    _kernels.spread(as_bytes(out), _CODES[out.dtype], parts)
    return all(kernels.is_finite(values) for _, values in parts)


def _own_shard_length(world: World, length: int) -> int:
    first, last = own_shard(world, length)
    return last - first


register(Algorithm("hitopk", sparse=True, run=_hitopk, residual_length=_own_shard_length))
register(Algorithm("naive", sparse=True, run=_naive, residual_length=lambda world, length: length))
