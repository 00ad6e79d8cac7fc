"""The exchange of the changes of weights between nodes.

x are the weights that all nodes agree on. Node i trains x_i = x + e_i, and e_i is what node i has not sent. In an
exchange, node i sends c_i = C(x_i - x). All nodes add the mean of all c_i to x, weighted by the ranks per node. Then
e_i = (x_i - x_before) - c_i, and x_i = x + e_i. C keeps the sign of each element and the mean magnitude of each
block of 256 (`kernels.sign_pack_`); small tensors are rounded to bf16 instead.

Every rank works on its shard: it keeps x of its shard only. The ranks of equal local rank on all nodes send each other
their shards, and add them up in the order of the nodes: x has the same bits on all nodes. The ranks of a node gather
the shards of x_i, so they have the same weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from topkube import kernels
from topkube.algorithms import Algorithm, Route
from topkube.arrays import BFLOAT16, Array
from topkube.collectives.all_reduce import between_nodes
from topkube.collectives.call import Call, workspace
from topkube.collectives.exchange import Exchanges
from topkube.collectives.request import Request
from topkube.collectives.sign import sign_row_bytes, sign_row_views
from topkube.telemetry import phases
from topkube.training.exchange.buckets import Parameter
from topkube.training.node_weights.layout import Chunk, Piece, chunks_of
from topkube.world import World


class WeightExchange:
    """The exchange among the nodes of `world`. `agreed` holds this rank's shards of x, one per chunk; it is empty until
    `capture` or `place`. All methods but `capture` are collectives of all ranks, or of the ranks of a node, and run in
    the communication thread."""

    def __init__(self, world: World, parameters: Sequence[Parameter], algorithm: Algorithm) -> None:
        self.world, self.algorithm = world, algorithm
        self.chunks = chunks_of(parameters, world)
        self.agreed: list[Array] = []
        self.weights = [len(ranks) / world.size for ranks in world.node_ranks]
        """The weight of each node in means: its share of the ranks."""

    def capture(self) -> None:
        """Take the current weights of this rank as x: they are the same on all ranks."""
        self.agreed = [self._collected(chunk) for chunk in self.chunks]

    @torch.no_grad()
    def run(self) -> None:
        """Exchange what has changed in the weights since the last exchange."""
        for chunk, agreed in zip(self.chunks, self.agreed, strict=True):
            staging, own = self._staging(chunk)
            self._collect(chunk, own)
            call = self._call(chunk, staging)
            own -= agreed
            if self.world.cross_comm is not None:
                self._exchange(call, chunk, own, agreed)
            own += agreed
            call.all_gather(staging)
            _scatter(chunk, staging)

    @torch.no_grad()
    def place(self, shards: Sequence[Array]) -> None:
        """Write the weights that `shards` holds, this rank's shard of each chunk, into the parameters. The ranks of a
        node gather them."""
        for chunk, shard in zip(self.chunks, shards, strict=True):
            staging, own = self._staging(chunk)
            own[:] = shard
            self._call(chunk, staging).all_gather(staging)
            _scatter(chunk, staging)

    def gather(self, chunk: Chunk, shard: Array) -> Array:
        """Return the chunk of which every rank of the node passes its shard: a work buffer, until the next call."""
        staging, own = self._staging(chunk)
        own[:] = shard
        self._call(chunk, staging).all_gather(staging)
        return staging

    def _call(self, chunk: Chunk, staging: Array) -> Call:
        call = Call(self.world, f"{self.algorithm.name} weights {chunk.number}", Request(staging, "sum"))
        call.same_between_nodes()
        return call

    def _exchange(self, call: Call, chunk: Chunk, own: Array, agreed: Array) -> None:
        """Send `own`, the change of this shard, and leave in it what was not sent. Add the mean change of all nodes to
        `agreed`."""
        world, comm = self.world, self.world.cross_comm
        codec = _Rounded(own.size) if chunk.small else _Signs(chunk)
        rows = workspace(world, "rows of weights", world.nodes * codec.row_bytes, np.uint8)
        rows = rows.reshape(world.nodes, codec.row_bytes)
        with phases.current.timed("select"):
            codec.pack(own, rows[world.node])
        exchange, sent = between_nodes(Route.ALL_GATHER, comm, rows)
        exchanges = Exchanges()
        exchanges.start(0, exchange)
        exchanges.finish(0, call)
        phases.current.sent(inter=sent)
        with phases.current.timed("select"):
            codec.unpack_add(agreed, rows, self.weights)

    def _staging(self, chunk: Chunk) -> tuple[Array, Array]:
        """Return a work buffer for the chunk, and this rank's shard of it."""
        staging = workspace(self.world, "staging of weights", chunk.length, np.float32)
        return staging, staging[chunk.first : chunk.last]

    def _collected(self, chunk: Chunk) -> Array:
        shard: Array = np.empty(chunk.last - chunk.first, np.float32)
        self._collect(chunk, shard)
        return shard

    @staticmethod
    def _collect(chunk: Chunk, shard: Array) -> None:
        """Copy this rank's shard of the parameters into `shard`. The gaps between tensors become zero."""
        filled = 0
        for piece in chunk.pieces:
            shard[filled : piece.at] = 0
            shard[piece.place] = piece.of(piece.parameter.tensor).numpy()
            filled = piece.place.stop
        shard[filled:] = 0


class _Signs:
    """Signs with a scale per block of 256 elements, tensor by tensor. The last block of a tensor may be shorter."""

    def __init__(self, chunk: Chunk) -> None:
        self._pieces = chunk.pieces
        self._offsets = [0]
        for piece in chunk.pieces:
            self._offsets.append(self._offsets[-1] + sign_row_bytes(piece.end - piece.begin))
        self.row_bytes = self._offsets[-1]

    def _parts(self, row: Array) -> list[tuple[Piece, Any]]:
        return [
            (piece, sign_row_views(row[offset:], piece.end - piece.begin))
            for piece, offset in zip(self._pieces, self._offsets, strict=False)
        ]

    def pack(self, values: Array, row: Array) -> None:
        for piece, (scales, bits) in self._parts(row):
            kernels.sign_pack_(values[piece.place], scales, bits)

    def unpack_add(self, out: Array, rows: Array, weights: Sequence[float]) -> None:
        for parts in zip(*map(self._parts, rows), strict=True):
            kernels.sign_unpack_add_(out[parts[0][0].place], [views for _, views in parts], weights)


class _Rounded:
    """All values, rounded to bf16."""

    def __init__(self, length: int) -> None:
        self.row_bytes = 2 * length

    def pack(self, values: Array, row: Array) -> None:
        sent = row.view(BFLOAT16)
        kernels.cast_(sent, values)
        values -= sent.astype(np.float32)

    def unpack_add(self, out: Array, rows: Array, weights: Sequence[float]) -> None:
        total = np.zeros_like(out)
        for row, weight in zip(rows, weights, strict=True):
            total += row.view(BFLOAT16).astype(np.float32) * np.float32(weight)
        out += total


def _scatter(chunk: Chunk, staging: Array) -> None:
    values = torch.from_numpy(staging)
    for parameter, start in zip(chunk.parameters, chunk.starts, strict=True):
        tensor = parameter.tensor
        tensor.copy_(values[start : start + parameter.length].view(tensor.shape))
