"""Dense all-reduce: `Hierarchical`, `Torus2d` and `Flat`, and `HierarchicalNccl` and `Nccl` on GPUs. On one node, the
first three are the shared-memory all-reduce, and the others are NCCL's."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

import numpy as np

from topkube import kernels
from topkube.arrays import Array
from topkube.collectives.all_reduce import ShardAllReduce, count_dense
from topkube.collectives.call import Call, find_own_shard, reserve_workspace
from topkube.collectives.exchange import Exchanges, count_bytes_with_greetings, finish_greeted
from topkube.collectives.overlapped import (
    UNDER_WAY,
    OverlappedAllReduce,
    fits_in_greeting,
    has_stages_inside,
    is_narrow,
    split,
)
from topkube.collectives.request import Request
from topkube.collectives.rings import count_ring_bytes, ring_all_reduce
from topkube.collectives.rounds import count_buffer_elements
from topkube.collectives.shard import Shard
from topkube.errors import ArgumentError
from topkube.telemetry import phases
from topkube.world import World


class _FiniteRecord:
    """A record of reports: `all` is True if everything that was reported was finite."""

    def __init__(self) -> None:
        self.all = True

    def note(self, finite: bool) -> None:
        self.all = self.all and finite


class _Dense(ShardAllReduce):
    """The common part of the dense algorithms: one node, and the shards of tensors on a device."""

    def run(self, world: World, request: Request) -> bool:
        call = Call(world, self.algorithm.name, request, self.greets_with_values(world, request))
        count_dense(world, request.nbytes)
        if world.nodes == 1:
            return call.all_reduce_inside(request.array, request.scale(world.size))
        return self._run_on_nodes(call, request)

    def greets_with_values(self, world: World, request: Request) -> bool:
        """Return True if the greeting of a call carries the values: the same on all ranks."""
        return False

    @abstractmethod
    def _run_on_nodes(self, call: Call, request: Request) -> bool:
        """Reduce `request.array` over several nodes. Return True if what this rank saw was finite."""

    def pack(self, shard: Shard) -> Any:
        return shard.values

    def unpack(self, shard: Shard, received: Any) -> None:
        shard.check(shard.values)  # `received` is the same array: see `pack`


class Hierarchical(_Dense):
    """Reduce-scatter inside the node, all-reduce of each shard among equal local ranks, all-gather inside the node;
    piece by piece, so that the work inside the node overlaps with the messages between nodes (`overlapped.py`)."""

    def greets_with_values(self, world: World, request: Request) -> bool:
        return fits_in_greeting(world, request.nbytes) and not (
            request.dtype == "float32" and is_narrow(world, request.dense_wire)
        )

    def _run_on_nodes(self, call: Call, request: Request) -> bool:
        if call.greets_with_values:
            return _reduce_small(call, request)
        pieces = OverlappedAllReduce(call.world)
        pieces.begin(call, request.array, request.scale(call.world.size), wire=request.dense_wire)
        pieces.finish()
        return pieces.take_finite()

    def pack(self, shard: Shard) -> Any:
        request = shard.request
        if request.dtype != "float32" or not is_narrow(shard.world, request.dense_wire):
            return shard.values
        import torch

        sent_type = {"bf16": torch.bfloat16, "fp16": torch.float16}[request.dense_wire]
        narrow = shard.scratch("narrow", 2 * len(shard.values), "uint8").view(sent_type)
        return kernels.cast_(narrow, shard.values)

    def unpack(self, shard: Shard, received: Any) -> None:
        if received is not shard.values:
            kernels.cast_(shard.values, received)
        shard.check(received)

    def enter(self, world: World, request: Request, is_in_halves: bool = False) -> Call:
        """Enter the call for an all-reduce over several nodes whose parts `OverlappedAllReduce.begin` starts, or
        `DecoupledAllReduce.halve` if `is_in_halves`. `request.array` stands for all parts: only its length and type
        count."""
        count_dense(world, request.nbytes)
        greets = not is_in_halves and self.greets_with_values(world, request)
        return Call(world, self.algorithm.name, request, greets)


def _reduce_small(call: Call, request: Request) -> bool:
    """Reduce an array whose values the greetings of the call carry. Return True if what this rank saw was finite."""
    world, x, scale = call.world, request.array, request.scale(call.world.size)
    finite = True
    if has_stages_inside(world):
        finite, scale = call.reduce_scatter(x, scale), 1.0
    first, last = find_own_shard(world, x.size)
    shard = x[first:last]
    phases.current.sent(inter=count_bytes_with_greetings(shard, world.nodes))
    with phases.current.timed("inter"):
        finite = finish_greeted(call, shard, scale) and finite
    if world.local_size > 1:
        call.all_gather(x)
    return finite


class Torus2d(_Dense):
    """The 2D-torus all-reduce (Mikami et al., "Massively distributed SGD", 2018): reduce-scatter along the node, a
    ring all-reduce of each shard across nodes, all-gather along the node; each phase over the whole bucket. Each rank
    exchanges values with two neighbours only."""

    def _run_on_nodes(self, call: Call, request: Request) -> bool:
        world, x = call.world, request.array
        finite, exchanges = _FiniteRecord(), Exchanges(world)
        finite.note(call.reduce_scatter(x, request.scale(world.size)))
        call.check_between_nodes()
        _start_shard(world, exchanges, x, finite)
        exchanges.finish(0, call)
        call.all_gather(x)
        return finite.all


class Flat(_Dense):
    """A ring over all ranks, in rank order: one stream leaves each node and one enters it. On a device, shards are
    reduced as in `Hierarchical`."""

    def _run_on_nodes(self, call: Call, request: Request) -> bool:
        world, x = call.world, request.array
        call.check_everywhere()
        scale = request.scale(world.size)
        if x.dtype == np.float16:  # the sum of all ranks may exceed fp16; the mean does not
            kernels.scale_(x, scale)
            scale = 1.0
        finite, exchanges = _FiniteRecord(), Exchanges(world)
        pieces = split(x)
        length = count_buffer_elements(pieces[0].size, world.size)
        buffers = reserve_workspace(world, "ring", UNDER_WAY * length, x.dtype).reshape(UNDER_WAY, length)
        for number in range(len(pieces) + UNDER_WAY):
            if number >= UNDER_WAY:
                exchanges.finish(number - UNDER_WAY, call)
            if number < len(pieces):
                buffer = buffers[number % UNDER_WAY]
                exchanges.start(number, ring_all_reduce(world.comm, pieces[number], buffer, number, finite.note, scale))
        right = (world.rank + 1) % world.size
        sent = count_ring_bytes(x, world.size)
        phases.current.sent(**{"intra" if right in world.node_ranks[world.node] else "inter": sent})
        return finite.all


class HierarchicalNccl(_Dense):
    """Reduce-scatter inside the node, NCCL's all-reduce of each shard among equal local ranks, all-gather inside the
    node. The pipeline of tensors on a device (device/pipeline.py) launches all three stages on one stream, and the host
    waits for none of them."""

    def run(self, world: World, request: Request) -> bool:
        name = self.algorithm.name
        raise ArgumentError(
            f"{name} reduces tensors on a GPU, and this array is in host memory",
            cause="this process has no GPU, or the model is on the CPU",
            next_step="choose the algorithm dense, or move model and data to topkube.device()",
        )

    def _run_on_nodes(self, call: Call, request: Request) -> bool:
        raise AssertionError("run() refuses arrays in host memory")


class Nccl(HierarchicalNccl):
    """NCCL's all-reduce over all ranks. NCCL chooses rings or trees by itself, without TopKube's topology."""

    over_all_ranks = True


def _start_shard(world: World, exchanges: Exchanges, x: Array, finite: _FiniteRecord) -> None:
    """Start the exchange of this rank's shard of x, around a ring of its equals on other nodes."""
    if world.cross_comm is None:
        return
    first, last = find_own_shard(world, x.size)
    shard = x[first:last]
    buffer = reserve_workspace(world, "shard 0", count_buffer_elements(shard.size, world.nodes), x.dtype)
    exchanges.start(0, ring_all_reduce(world.cross_links, shard, buffer, 0, finite.note))
    phases.current.sent(inter=count_ring_bytes(shard, world.nodes))
