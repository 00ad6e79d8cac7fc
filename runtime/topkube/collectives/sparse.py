"""Sparse all-reduce: `naive` and `hitopk`. Both send the largest entries only; what is not sent stays in the
residual."""

from __future__ import annotations

import math

import numpy as np

from topkube import _kernels, kernels
from topkube.arrays import BFLOAT16, Array
from topkube.collectives import wire
from topkube.collectives.call import Call, as_bytes, own_shard, shard_bounds, workspace
from topkube.collectives.dense import count_dense
from topkube.collectives.exchange import SLOT_HEADER, Exchanges, all_gather_slots, fill_slot, payload_of
from topkube.collectives.registry import Algorithm, Request, register
from topkube.telemetry import phases
from topkube.world import World

_CODES = {np.dtype(np.float32): 0, BFLOAT16: 1, np.dtype(np.float16): 2}
_SPARSE_INSIDE = 0.25
"""Inside the node, encoded shards are gathered instead of dense ones where they are at most this share of the bytes."""


def kept(length: int, density: float, shards: int = 1) -> int:
    """How many entries of a shard are sent: max(1, ceil(density * length / shards))."""
    return max(1, math.ceil(density * length / shards))


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
        finite = call.reduce_scatter(x, request.scale(world.size), shard, residual.current)
    elif x.dtype == np.float32:
        shard = x[first:last]
        finite = call.reduce_scatter(x, request.scale(world.size))
    else:
        shard = workspace(world, "shard", last - first, np.float32)
        finite = call.reduce_scatter(x, request.scale(world.size), shard)

    bounds = shard_bounds(x.size, world.shards)
    k = kept(x.size, request.density, world.shards)
    longest = -(-x.size // world.shards)
    row = SLOT_HEADER + wire.most_bytes(min(k, longest), longest, request.wire)
    row += -row % 8
    slots = workspace(world, "slots", world.shards * world.nodes * row, np.uint8).reshape(
        world.shards, world.nodes, row
    )
    if world.cross_comm is not None:
        mine = slots[world.local_rank]
        _select(shard, min(k, shard.size), request, mine[world.node])
        call.same_everywhere()
        exchanges = Exchanges(call)
        exchanges.start(0, all_gather_slots(world.cross_comm, mine, 0, lambda _, size: phases.current.sent(inter=size)))
        exchanges.finish(0)
    else:
        call.same_everywhere()
    if world.local_size == 1 or slots.nbytes <= _SPARSE_INSIDE * x.nbytes:
        call.all_gather(slots.reshape(-1))
        with phases.current.timed("intra"):
            for shard_slots, start, stop in zip(slots, bounds, bounds[1:], strict=False):
                _spread(x[start:stop], shard_slots, request.wire)
    else:
        if world.cross_comm is not None:
            with phases.current.timed("intra"):
                _spread(x[first:last], slots[world.local_rank], request.wire)
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
        kernels.sum_(entries, [x], scale)
        if residual is not None:
            kernels.add_(entries, residual.current)
        finite = kernels.is_finite(entries)
    k = min(kept(x.size, request.density), x.size)
    row = SLOT_HEADER + wire.most_bytes(k, x.size, request.wire)
    row += -row % 8
    slots = workspace(world, "slots", world.size * row, np.uint8).reshape(world.size, row)
    _select(entries, k, request, slots[world.rank])
    call.same_everywhere()
    exchanges = Exchanges(call)

    def sent(partner: int, size: int) -> None:
        phases.current.sent(**{"intra" if partner in world.node_ranks[world.node] else "inter": size})

    exchanges.start(0, all_gather_slots(world.comm, slots, 0, sent))
    exchanges.finish(0)
    with phases.current.timed("intra"):
        _spread(x, slots, request.wire)
    return finite


def _select(shard: Array, k: int, request: Request, slot: Array) -> None:
    """Puts the largest k entries of `shard` into `slot`; with a residual, what they leave behind replaces them."""
    with phases.current.timed("select"):
        if k == 0:
            indices, values = np.empty(0, np.uint32), np.empty(0, np.float32)
        elif request.selection == "mstopk":
            indices, values = getattr(kernels, "mstopk")(shard, k)
        else:
            indices, values = kernels.topk(shard, k)
        payload, received = wire.pack(indices, values, shard.size, request.wire)
        fill_slot(slot, payload)
        if request.residual is not None:
            shard[indices] = values - received


def _spread(out: Array, slots: Array, wire_type: str) -> None:
    """out becomes the sum of the sparse vectors in `slots`, added in their order."""
    parts = [wire.unpack(payload_of(slot), out.size, wire_type) for slot in slots]
    _kernels.spread(as_bytes(out), _CODES[out.dtype], parts)


def _own_shard_length(world: World, length: int) -> int:
    first, last = own_shard(world, length)
    return last - first


register(Algorithm("hitopk", sparse=True, run=_hitopk, residual_length=_own_shard_length))
register(Algorithm("naive", sparse=True, run=_naive, residual_length=lambda world, length: length))
