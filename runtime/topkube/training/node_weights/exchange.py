"""The exchange of the changes of weights between nodes.

x are the weights that all nodes agree on. Node i trains x_i = x + e_i, and e_i is what node i has not sent. In an
exchange, node i sends c_i = C(x_i - x). All nodes add the mean of all c_i to x, weighted by the ranks per node. Then
e_i = (x_i - x_before) - c_i, and x_i = x + e_i. C is the codec of the algorithm (collectives/codec_all_reduce.py):
onebit keeps the sign of each element and the mean magnitude of each block of 256, and rounds small tensors to bf16
instead.

Every rank works on its shard: it keeps x of its shard only. The ranks of equal local rank on all nodes send each other
their shards, and add them up in the order of the nodes: x has the same bits on all nodes. The ranks of a node gather
the shards of x_i, so they have the same weights. From `two_stage_from` nodes on (the algorithm declares it), the
exchange has two stages, and x moves by what the owners of segments send of the mean (collectives/two_stage.py).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from topkube.algorithms import Route, find_algorithm
from topkube.arrays import Array
from topkube.collectives.all_reduce import between_nodes, finish_exchange, load
from topkube.collectives.call import Call, workspace
from topkube.collectives.codec_all_reduce import CodecAllReduce
from topkube.collectives.codecs import Codec
from topkube.collectives.request import Request
from topkube.collectives.two_stage import TwoStage
from topkube.telemetry import phases
from topkube.training.exchange.aggregation import AggregationSettings
from topkube.training.exchange.buckets.parameter import Parameter
from topkube.training.node_weights.guard import Squares, sum_squares
from topkube.training.node_weights.layout import Chunk, cut_into_chunks
from topkube.training.node_weights.outer_momentum import OuterMomentum
from topkube.world import World


class WeightExchange:
    """The exchange among the nodes of `world`. `agreed` holds this rank's shards of x, one per chunk; it is empty until
    `capture` or `place`. All methods but `capture` are collectives of all ranks, or of the ranks of a node, and run in
    the communication thread."""

    def __init__(self, world: World, parameters: Sequence[Parameter], aggregation: AggregationSettings) -> None:
        self.world, self.algorithm, self._wire = world, find_algorithm(aggregation.algorithm), aggregation.wire
        self.chunks = cut_into_chunks(parameters, world)
        self.agreed: list[Array] = []
        self.weights = [len(ranks) / world.size for ranks in world.node_ranks]
        """The weight of each node in means: its share of the ranks."""
        self._codecs = [self._build_codec(chunk, [p.place for p in chunk.pieces], chunk.shard) for chunk in self.chunks]
        self.stages: list[TwoStage | None] = [self._build_two_stage(chunk) for chunk in self.chunks]
        """The two stages of each chunk; None if the chunk is exchanged in one stage."""
        self.outer: OuterMomentum | None = None
        """The momentum of the mean change of all nodes, if the algorithm has an outer step."""
        if self.algorithm.has_outer_step:
            self.outer = OuterMomentum(self.chunks, aggregation.outer_learning_rate, aggregation.outer_momentum)

    def _build_codec(self, chunk: Chunk, places: list[slice], length: int) -> Codec:
        implementation = load(self.algorithm)
        assert isinstance(implementation, CodecAllReduce), self.algorithm.name
        return implementation.codec(places, length, self._wire, chunk.small)

    def _build_two_stage(self, chunk: Chunk) -> TwoStage | None:
        world, least_nodes = self.world, self.algorithm.two_stage_from
        if least_nodes is None or world.nodes < max(least_nodes, 2):
            return None
        places = [piece.place for piece in chunk.pieces]

        def build_codec(places: list[slice], length: int) -> Codec:
            return self._build_codec(chunk, places, length)

        return TwoStage(build_codec, places, chunk.shard, world.node, world.nodes)

    def capture(self) -> None:
        """Take the current weights of this rank as x: they are the same on all ranks. Nothing is owed then."""
        self.agreed = [self._collect_shard(chunk) for chunk in self.chunks]
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
            exchange, sent = between_nodes(Route.ALL_REDUCE, self.world.cross_comm, shard)
            finish_exchange(call, exchange, sent)

    @torch.no_grad()
    def run(self, squares: Squares | None = None) -> None:
        """Exchange what has changed in the weights since the last exchange. Add to `squares`, if it is passed."""
        for chunk, agreed in zip(self.chunks, self.agreed, strict=True):
            staging, own = self._take_staging(chunk)
            self._collect(chunk, own)
            call = self._build_call(chunk, staging)
            own -= agreed
            if squares is not None:
                squares.change += sum_squares(own)
            if self.world.cross_comm is not None:
                self._exchange_and_step(call, chunk, own, agreed)
            if squares is not None:
                squares.left += sum_squares(own)
                squares.agreed += sum_squares(agreed)
            own += agreed
            call.all_gather(staging)
            _scatter(chunk, staging)

    @torch.no_grad()
    def place(self, shards: Sequence[Array]) -> None:
        """Write the weights that `shards` holds, this rank's shard of each chunk, into the parameters. The ranks of a
        node gather them."""
        for chunk, shard in zip(self.chunks, shards, strict=True):
            staging, own = self._take_staging(chunk)
            own[:] = shard
            self._build_call(chunk, staging).all_gather(staging)
            _scatter(chunk, staging)

    def gather(self, chunk: Chunk, shard: Array) -> Array:
        """Return the chunk of which every rank of the node passes its shard: a work buffer, until the next call."""
        staging, own = self._take_staging(chunk)
        own[:] = shard
        self._build_call(chunk, staging).all_gather(staging)
        return staging

    def _build_call(self, chunk: Chunk, staging: Array) -> Call:
        call = Call(self.world, f"{self.algorithm.name} weights {chunk.number}", Request(staging, "sum"))
        call.check_between_nodes()
        return call

    def _exchange_and_step(self, call: Call, chunk: Chunk, own: Array, agreed: Array) -> None:
        """Exchange `own`, and let `agreed` make the outer step, if there is one."""
        if self.outer is None:
            self._exchange(call, chunk, own, agreed)
            return
        change = workspace(self.world, "mean change of weights", chunk.shard, np.float32)
        change[:] = 0
        self._exchange(call, chunk, own, change)
        self.outer.step(chunk, change)
        agreed += change

    def _exchange(self, call: Call, chunk: Chunk, own: Array, agreed: Array) -> None:
        """Send `own`, the change of this shard, and leave in it what was not sent. Add the mean change of all nodes to
        `agreed`."""
        world, codec, stage = self.world, self._codecs[chunk.number], self.stages[chunk.number]
        if stage is not None:
            self._exchange_in_two_stages(call, stage, own, agreed)
            return
        rows = workspace(world, "rows of weights", world.nodes * codec.row_bytes, np.uint8)
        rows = rows.reshape(world.nodes, codec.row_bytes)
        with phases.current.timed("select"):
            codec.pack(own, rows[world.node])
        exchange, sent = between_nodes(Route.ALL_GATHER, world.cross_comm, rows)
        finish_exchange(call, exchange, sent)
        with phases.current.timed("select"):
            codec.unpack_add(agreed, list(rows), self.weights)

    def _exchange_in_two_stages(self, call: Call, stage: TwoStage, own: Array, agreed: Array) -> None:
        sums = stage.exchange(call, own, self.weights)
        with phases.current.timed("select"):
            stage.add(agreed, sums)

    def _take_staging(self, chunk: Chunk) -> tuple[Array, Array]:
        """Return a work buffer for the chunk, and this rank's shard of it."""
        staging = workspace(self.world, "staging of weights", chunk.length, np.float32)
        return staging, staging[chunk.first : chunk.last]

    def _collect_shard(self, chunk: Chunk) -> Array:
        shard: Array = np.empty(chunk.shard, np.float32)
        self._collect(chunk, shard)
        return shard

    @staticmethod
    def _collect(chunk: Chunk, shard: Array) -> None:
        """Copy this rank's shard of the parameters into `shard`. The gaps between tensors become zero."""
        filled = 0
        for piece in chunk.pieces:
            shard[filled : piece.at] = 0
            shard[piece.place] = piece.view(piece.parameter.tensor).numpy()
            filled = piece.place.stop
        shard[filled:] = 0


def _scatter(chunk: Chunk, staging: Array) -> None:
    values = torch.from_numpy(staging)
    for parameter, start in zip(chunk.parameters, chunk.starts, strict=True):
        tensor = parameter.tensor
        tensor.copy_(values[start : start + parameter.length].view(tensor.shape))
