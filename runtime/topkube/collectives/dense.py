"""Dense all-reduce: `flat`, `hierarchical` and `torus2d`. On one node all three are the shared-memory all-reduce.

With m nodes, P ranks and b bytes, the least that a node sends is 2(P-1)/P·b for `flat` and 2(m-1)/m·b for the other
two.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from topkube import kernels
from topkube.arrays import Array
from topkube.collectives.call import Call, own_shard, workspace
from topkube.collectives.exchange import (
    PAIRWISE_LIMIT,
    Exchanges,
    all_reduce_buffer_length,
    pairwise_all_reduce,
    ring_all_reduce,
)
from topkube.collectives.registry import Algorithm, Request, register
from topkube.telemetry import phases
from topkube.world import World

PIECE_BYTES = 8 << 20
"""A bucket is exchanged in pieces of this size, so that the stages of one hide behind the wire of another."""
_UNDER_WAY = 3
"""Pieces between nodes at the same time."""


class _Finite:
    """Remembers whether everything it was told was finite."""

    def __init__(self) -> None:
        self.all = True

    def __call__(self, finite: bool) -> None:
        self.all = self.all and finite


def count_dense(world: World, array: Array) -> None:
    """Tells telemetry what a dense ring would have sent per rank."""
    phases.current.sent(dense=2 * (world.size - 1) * array.nbytes // world.size)


def _on_one_node(call: Call, request: Request) -> bool:
    world = call.world
    return call.all_reduce_inside(request.array, request.scale(world.size))


def _flat(world: World, request: Request) -> bool:
    """A ring over all ranks, in rank order: one stream leaves each node and one enters it."""
    call, x = Call(world, "flat", request), request.array
    count_dense(world, x)
    if world.nodes == 1:
        return _on_one_node(call, request)
    call.same_everywhere()
    scale = request.scale(world.size)
    if x.dtype == np.float16:  # the sum of all ranks may exceed fp16; the mean does not
        kernels.scale_(x, scale)
        scale = 1.0
    finite, exchanges = _Finite(), Exchanges(call)
    length = all_reduce_buffer_length(min(x.size, PIECE_BYTES // x.itemsize), world.size)
    buffers = workspace(world, "ring", _UNDER_WAY * length, x.dtype).reshape(_UNDER_WAY, length)
    pieces = _pieces(x)
    for number in range(len(pieces) + _UNDER_WAY):
        if number >= _UNDER_WAY:
            exchanges.finish(number - _UNDER_WAY)
        if number < len(pieces):
            buffer = buffers[number % _UNDER_WAY]
            exchanges.start(number, ring_all_reduce(world.comm, pieces[number], buffer, number, finite, scale))
    right = (world.rank + 1) % world.size
    sent = 2 * (world.size - 1) * x.nbytes // world.size
    phases.current.sent(**{"intra" if right in world.node_ranks[world.node] else "inter": sent})
    return finite.all


def _hierarchical(world: World, request: Request) -> bool:
    """Reduce-scatter inside the node, all-reduce of each shard among equal local ranks, all-gather inside the node;
    piece by piece, so that only the wire is waited for."""
    call, x = Call(world, "hierarchical", request), request.array
    count_dense(world, x)
    if world.nodes == 1:
        return _on_one_node(call, request)
    finite, exchanges = _Finite(), Exchanges(call)
    pieces = _pieces(x)
    scale = request.scale(world.size)
    for number in range(len(pieces) + _UNDER_WAY):
        if number < len(pieces):
            piece = pieces[number]
            finite(call.reduce_scatter(piece, scale))
            if number == 0:
                call.same_between_nodes()
            _start_shard(world, exchanges, piece, number, finite, ring=world.nodes > PAIRWISE_LIMIT)
        if number >= _UNDER_WAY:
            exchanges.finish(number - _UNDER_WAY)
            call.all_gather(pieces[number - _UNDER_WAY])
    return finite.all


def _torus2d(world: World, request: Request) -> bool:
    """The 2D-torus all-reduce (Mikami et al., "Massively distributed SGD", 2018): reduce-scatter along the node, a
    ring all-reduce of each shard across nodes, all-gather along the node; each phase over the whole bucket. Each rank
    talks to two neighbours only."""
    call, x = Call(world, "torus2d", request), request.array
    count_dense(world, x)
    if world.nodes == 1:
        return _on_one_node(call, request)
    finite, exchanges = _Finite(), Exchanges(call)
    finite(call.reduce_scatter(x, request.scale(world.size)))
    call.same_between_nodes()
    _start_shard(world, exchanges, x, 0, finite, ring=True)
    exchanges.finish(0)
    call.all_gather(x)
    return finite.all


def _start_shard(world: World, exchanges: Exchanges, x: Array, number: int, finite: _Finite, *, ring: bool) -> None:
    """Starts the exchange of this rank's shard of x with its equals on other nodes."""
    if world.cross_comm is None:
        return
    first, last = own_shard(world, x.size)
    shard = x[first:last]
    length = all_reduce_buffer_length(shard.size, world.nodes)
    # Pieces under way use buffers of their own.
    buffer = workspace(world, f"shard {number % (_UNDER_WAY + 1)}", length, x.dtype)
    algorithm: Any = ring_all_reduce if ring else pairwise_all_reduce
    exchanges.start(number, algorithm(world.cross_comm, shard, buffer, number, finite))
    phases.current.sent(inter=2 * (world.nodes - 1) * shard.nbytes // world.nodes)


def _pieces(x: Array) -> list[Array]:
    size = PIECE_BYTES // x.itemsize
    return [x[start : start + size] for start in range(0, max(x.size, 1), size)]


register(Algorithm("flat", sparse=False, run=_flat))
register(Algorithm("hierarchical", sparse=False, run=_hierarchical))
register(Algorithm("torus2d", sparse=False, run=_torus2d))
