"""The exchange of the changes of weights between nodes.

x are the weights that all nodes agree on. Node i trains x_i = x + e_i, and e_i is what node i has not sent. In an
exchange, node i sends c_i = C(x_i - x). All nodes add the mean of all c_i to x, weighted by the ranks per node. Then
e_i = (x_i - x_before) - c_i, and x_i = x + e_i. C is the codec of the algorithm (collectives/codec_all_reduce.py):
onebit keeps the sign of each element and the mean magnitude of each block of 256, and rounds small tensors to bf16
instead.

Every rank works on its shard: it keeps x of its shard only. The ranks of equal local rank on all nodes send each other
their shards, and add them up in the order of the nodes: x has the same bits on all nodes. The ranks of a node gather
the shards of x_i, so they have the same weights. From `two_stage_from` nodes on (the algorithm declares it), the
exchange has two stages, and x changes by the part of the mean that the owners of segments send
(collectives/two_stage.py).

If the weights are on a GPU, x and all codecs stay in host memory. A rank copies its shard of x_i to the host, and the
whole x_i back to the GPU (weights_device.py).

With one stage, the parts of a chunk travel while the processor packs the next parts and the next chunk
(collectives/one_stage.py).

A delayed exchange sends a copy of the weights as they are at the end of step() (`keep_weights`). Later changes of the
parameters do not affect the copy. The exchange runs in a thread of its own, in a world of its own: with its own
communicators, order of collectives and work buffers, so nothing else waits for it. The next step adds its result to the
parameters (`apply`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass

import numpy as np
import torch

from topkube.algorithms import Route, find_algorithm
from topkube.arrays import Array
from topkube.collectives.all_reduce import build_exchange, finish_exchange, load
from topkube.collectives.call import Call, reserve_workspace
from topkube.collectives.codec_all_reduce import CodecAllReduce
from topkube.collectives.codecs import CodecOf
from topkube.collectives.exchange import Exchanges
from topkube.collectives.one_stage import OneStage
from topkube.collectives.request import Request
from topkube.collectives.two_stage import TwoStage
from topkube.telemetry import phases
from topkube.training.exchange.aggregation import AggregationSettings
from topkube.training.exchange.buckets.parameter import Parameter
from topkube.training.node_weights.guard import Squares, sum_squares
from topkube.training.node_weights.layout import Chunk, cut_into_chunks
from topkube.training.node_weights.outer_momentum import OuterMomentum
from topkube.training.node_weights.weights_device import WeightsDevice
from topkube.world import World


@dataclass(frozen=True)
class _ChunkExchange:
    """The exchange of one chunk: its call, and `own`, the change of this rank's shard, which becomes what was not sent.
    It is kept here, because work buffers of the world may be replaced by larger ones before the exchange ends.
    `before` holds the weights of the shard before a delayed exchange."""

    chunk: Chunk
    call: Call
    own: Array
    before: Array | None


class WeightExchange:
    """The exchange among the nodes of `world`. `agreed` holds this rank's shards of x, one per chunk; it is empty until
    `capture` or `place`. `device` is that of the weights, None for host memory.

    All methods but `capture`, `collect_shard` and those with "delayed" in their names are collectives of all ranks, or
    of the ranks of a node. They run in the communication thread (`WeightsDevice.run`). `capture` and the delayed ones,
    with `keep_weights`, run in the script's thread. Delayed exchanges run in another thread, in `delayed_world`, which
    has the ranks and nodes of `world`."""

    def __init__(
        self,
        world: World,
        parameters: Sequence[Parameter],
        aggregation: AggregationSettings,
        delayed_world: World | None = None,
        device: torch.device | None = None,
    ) -> None:
        self.world, self.algorithm, self._wire = world, find_algorithm(aggregation.algorithm), aggregation.wire
        self.device = WeightsDevice(device)
        self.delayed_world = delayed_world
        self.chunks = cut_into_chunks(parameters, world)
        self.agreed: list[Array] = []
        self._changes: list[Array] = []
        """This rank's shards, one per chunk: the weights before a delayed exchange, and when it has ended, what `apply`
        adds to the parameters."""
        self._delayed: Future[None] | None = None
        self.weights = [len(ranks) / world.size for ranks in world.node_ranks]
        """The weight of each node in means: its share of the ranks."""
        least_nodes = self.algorithm.two_stage_from
        self._has_two_stages = least_nodes is not None and world.nodes >= max(least_nodes, 2)
        self._one_stages = [] if self._has_two_stages else [self._build_one_stage(chunk) for chunk in self.chunks]
        self.stages: list[TwoStage | None] = [self._build_two_stage(chunk) for chunk in self.chunks]
        """The two stages of each chunk; None if the chunk is exchanged in one stage."""
        self.outer: OuterMomentum | None = None
        """The momentum of the mean change of all nodes, if the algorithm has an outer step."""
        if self.algorithm.has_outer_step:
            self.outer = OuterMomentum(self.chunks, aggregation.outer_learning_rate, aggregation.outer_momentum)

    def _build_one_stage(self, chunk: Chunk) -> OneStage:
        return OneStage(self._find_codecs(chunk), [piece.place for piece in chunk.pieces], chunk.shard)

    def _build_two_stage(self, chunk: Chunk) -> TwoStage | None:
        if not self._has_two_stages:
            return None
        places = [piece.place for piece in chunk.pieces]
        return TwoStage(self._find_codecs(chunk), places, chunk.shard, self.world.node, self.world.nodes)

    def _find_codecs(self, chunk: Chunk) -> CodecOf:
        """Return the function that builds the codec of a part of the chunk."""
        implementation = load(self.algorithm)
        assert isinstance(implementation, CodecAllReduce), self.algorithm.name
        return lambda places, length: implementation.codec(places, length, self._wire, chunk.is_always_dense)

    def capture(self) -> None:
        """Take the current weights of this rank as x: they are the same on all ranks. Nothing is owed then."""
        self.agreed = [np.zeros(chunk.shard, np.float32) for chunk in self.chunks]
        for chunk, agreed in zip(self.chunks, self.agreed, strict=True):
            self.collect_shard(chunk, agreed)
        for stage in self.stages:
            if stage is not None:
                stage.owed[:] = 0
        if self.outer is not None:
            self.outer.reset()

    def sum_over_nodes(self, shard: Array) -> None:
        """Replace `shard`, this rank's shard of a chunk in float32, by the sum over all nodes. A collective of all
        ranks."""
        call = Call(self.world, f"{self.algorithm.name} sums", Request(shard, "sum"))
        call.check_between_nodes()
        if self.world.nodes > 1 and self.world.cross_comm is not None:
            exchange, sent = build_exchange(Route.ALL_REDUCE, self.world.cross_comm, shard)
            finish_exchange(call, exchange, sent)

    @torch.no_grad()
    def run(self, squares: Squares | None = None, is_delayed: bool = False) -> None:
        """Exchange what has changed in the weights since the last exchange. Add to `squares`, if it is passed. A chunk
        travels while the next one is prepared. If `is_delayed` is True, `keep_weights` was called. The parameters then
        stay as they are, and `apply` adds the result. If something changes the parameters in between, the next exchange
        sends that change."""
        exchanges, earlier = Exchanges(), None
        following = self._prepare(0, is_delayed)
        while following is not None:
            # The hashes of the next call travel before the data of this chunk, and do not wait for them.
            current, following = following, self._prepare(following.chunk.number + 1, is_delayed)
            self._begin(current, exchanges, squares)
            if earlier is not None:
                self._finish(earlier, exchanges, squares)
            earlier = current
        if earlier is not None:
            self._finish(earlier, exchanges, squares)

    def _prepare(self, number: int, is_delayed: bool) -> _ChunkExchange | None:
        """Enter the call for a chunk. Return None if there is no chunk with this number."""
        if number == len(self.chunks):
            return None
        chunk, world = self.chunks[number], self.world
        if is_delayed:
            assert self.delayed_world is not None
            world = self.delayed_world
        own, before = self._take_staging(chunk, world)[1], self._changes[number] if is_delayed else None
        return _ChunkExchange(chunk, self._enter_call(chunk, world), own, before)

    def _begin(self, current: _ChunkExchange, exchanges: Exchanges, squares: Squares | None) -> None:
        """Start the exchange of a chunk."""
        chunk, own = current.chunk, current.own
        if current.before is None:
            self.collect_shard(chunk, own, self.agreed[chunk.number])
        else:
            np.subtract(current.before, self.agreed[chunk.number], out=own)
        if squares is not None:
            squares.change += sum_squares(own)
        if self.world.cross_comm is None or self._has_two_stages:
            current.call.check_between_nodes()
        else:
            self._one_stages[chunk.number].begin(current.call, own, exchanges, chunk.number)

    def _finish(self, current: _ChunkExchange, exchanges: Exchanges, squares: Squares | None) -> None:
        """Finish the exchange of a chunk. Write the new weights. If the exchange is delayed, compute their
        difference."""
        chunk, own, agreed = current.chunk, current.own, self.agreed[current.chunk.number]
        if self.world.cross_comm is not None:
            change = agreed
            if self.outer is not None:
                change = reserve_workspace(current.call.world, "mean change of weights", chunk.shard, np.float32)
                change[:] = 0
            self._add_changes(current, change, exchanges)
            if self.outer is not None:
                self.outer.step(chunk, change)
                agreed += change
        if squares is not None:
            squares.unsent += sum_squares(own)
            squares.agreed += sum_squares(agreed)
        if current.before is not None:
            own += agreed
            np.subtract(own, current.before, out=current.before)
        elif not self._has_whole_chunks or not _write_sums(chunk, own, agreed):
            staging, shard = self._take_staging(chunk, self.world)
            np.add(own, agreed, out=shard)
            current.call.all_gather(staging)
            self._scatter(chunk, staging)

    @property
    def _has_whole_chunks(self) -> bool:
        """True if this rank can write all weights of its node from host memory, without the other ranks."""
        return self.world.local_size == 1 and self.device.device is None

    def keep_weights(self) -> None:
        """Copy this rank's shards of the parameters, for a delayed exchange."""
        if not self._changes:
            self._changes = [np.empty(chunk.shard, np.float32) for chunk in self.chunks]
        for chunk, shard in zip(self.chunks, self._changes, strict=True):
            self.collect_shard(chunk, shard)

    def note_delayed(self, exchange: Future[None]) -> None:
        """Note that a delayed exchange is under way."""
        self._delayed = exchange

    def wait_for_delayed(self) -> bool:
        """Wait for a delayed exchange. Return True if there is one whose result is not in the parameters. Raises the
        error of the exchange."""
        if self._delayed is None:
            return False
        self._delayed.result()
        return True

    def find_delayed(self, chunk: Chunk) -> Array:
        """Return what `apply` will add to this rank's shard of a chunk."""
        return self._changes[chunk.number]

    def restore_delayed(self, changes: Sequence[Array]) -> None:
        """Restore a delayed exchange that has ended: `changes` holds what `apply` will add, one shard per chunk."""
        self._changes = list(changes)
        self._delayed = Future()
        self._delayed.set_result(None)

    def forget_delayed(self) -> None:
        """Note that the parameters have the result of the delayed exchange, or other weights."""
        self._delayed = None

    def _add_changes(self, current: _ChunkExchange, out: Array, exchanges: Exchanges) -> None:
        """Add the mean change of all nodes to `out`. `current.own` keeps what this node does not send."""
        number = current.chunk.number
        stage = self.stages[number]
        if stage is None:
            self._one_stages[number].finish(current.call, out, self.weights, exchanges, number)
            return
        sums = stage.exchange(current.call, current.own, self.weights)
        with phases.current.timed("select"):
            stage.add(out, sums)

    @torch.no_grad()
    def apply(self) -> None:
        """Add the result of a delayed exchange to the parameters. The ranks of a node gather it, and add the same."""
        for chunk, change in zip(self.chunks, self._changes, strict=True):
            values = self.gather(chunk, change)
            for parameter, own in self._list_tensors(chunk, values):
                parameter += own

    @torch.no_grad()
    def place(self, shards: Sequence[Array]) -> None:
        """Write the weights that `shards` holds, this rank's shard of each chunk, into the parameters. The ranks of a
        node gather them."""
        for chunk, shard in zip(self.chunks, shards, strict=True):
            self._scatter(chunk, self.gather(chunk, shard))

    def gather(self, chunk: Chunk, shard: Array) -> Array:
        """Return the chunk of which every rank of the node passes its shard: a work buffer, until the next call."""
        staging, own = self._take_staging(chunk, self.world)
        own[:] = shard
        call = self._enter_call(chunk, self.world)
        call.check_between_nodes()
        call.all_gather(staging)
        return staging

    def _enter_call(self, chunk: Chunk, world: World) -> Call:
        name = f"{self.algorithm.name} weights {chunk.number}"
        return Call(world, name, Request(self._take_staging(chunk, world)[0], "sum"))

    def _take_staging(self, chunk: Chunk, world: World) -> tuple[Array, Array]:
        """Return a work buffer of `world` for the chunk, and this rank's shard of it. The next chunk has another
        buffer."""
        staging = reserve_workspace(world, f"staging of weights {chunk.number % 2}", chunk.length, np.float32)
        return staging, staging[chunk.first : chunk.last]

    def collect_shard(self, chunk: Chunk, shard: Array, agreed: Array | None = None) -> None:
        """Copy this rank's shard of the parameters into `shard`, without `agreed`, its shard of the agreed weights. The
        gaps between tensors become zero."""
        filled = 0
        pieces = [piece.view(piece.parameter.tensor) for piece in chunk.pieces]
        for piece, values in zip(chunk.pieces, self.device.read(pieces), strict=True):
            shard[filled : piece.at] = 0
            if agreed is None:
                shard[piece.place] = values
            else:
                np.subtract(values, agreed[piece.place], out=shard[piece.place])
            filled = piece.place.stop
        shard[filled:] = 0

    def _scatter(self, chunk: Chunk, staging: Array) -> None:
        for parameter, values in self._list_tensors(chunk, staging):
            parameter.copy_(values)

    def _list_tensors(self, chunk: Chunk, staging: Array) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield the parameters of a chunk, and their parts of `staging`, in each one's shape and on their device."""
        values = self.device.copy_to_device(staging)
        for parameter, start in zip(chunk.parameters, chunk.starts, strict=True):
            yield parameter.tensor, values[start : start + parameter.length].view(parameter.tensor.shape)


def _write_sums(chunk: Chunk, own: Array, agreed: Array) -> bool:
    """Write own + agreed into the parameters of a chunk of which this rank has the whole. Return False, and write
    nothing, if a parameter is not contiguous in memory."""
    if not all(piece.parameter.tensor.is_contiguous() for piece in chunk.pieces):
        return False
    for piece in chunk.pieces:
        parts = torch.from_numpy(own[piece.place]), torch.from_numpy(agreed[piece.place])
        torch.add(*parts, out=piece.view(piece.parameter.tensor))  # autograd notices it, as it notices copy_
    return True
