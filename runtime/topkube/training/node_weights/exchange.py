"""The exchange of the changes of weights between nodes.

x are the weights that all nodes agree on. Node i trains x_i = x + e_i, and e_i is what node i has not sent. In an
exchange, node i sends c_i = C(x_i - x). All nodes add the mean of all c_i to x, weighted by the ranks per node. Then
e_i = (x_i - x_before) - c_i, and x_i = x + e_i (chunk_exchange.py). C is the codec of the algorithm
(collectives/codec_all_reduce.py): onebit keeps the sign of each element and the mean magnitude of each block of 256,
and rounds small tensors to bf16 instead.

Every rank works on its shard: it keeps x of its shard only. The ranks of equal local rank on all nodes send each other
their shards, and add them up in the order of the nodes: x has the same bits on all nodes. The ranks of a node gather
the shards of x_i, so they have the same weights. From `two_stage_from` nodes on (the algorithm declares it), the
exchange has two stages, and x changes by the part of the mean that the owners of segments send. What an owner does not
send is in its own x_i, so the mean of all x_i is the mean without compression (collectives/two_stage.py).

If the weights are on a GPU, the changes of large tensors with `onebit` are packed and added there, and x of them is
there too (device_chunk.py). Otherwise x and all codecs are in host memory: a rank copies its shard of x_i to the host,
and the whole x_i back to the GPU (weights_device.py).

With one stage, the parts of a chunk travel while the processor packs the next parts and the next chunk
(collectives/one_stage.py).

A delayed exchange sends the changes that the weights have at the end of step() (`keep_changes`). Later changes of the
parameters do not affect it. The exchange runs in a thread of its own, in a world of its own: with its own
communicators, order of collectives and work buffers, so nothing else waits for it. The next step adds its result to the
parameters (`apply`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future

import numpy as np
import torch

from topkube.algorithms import Route, find_algorithm
from topkube.arrays import Array
from topkube.collectives.all_reduce import build_exchange, finish_exchange, load
from topkube.collectives.call import Call
from topkube.collectives.codec_all_reduce import CodecAllReduce
from topkube.collectives.codecs import CodecOf, PartsCodec, TensorCodec
from topkube.collectives.device.memory import DeviceMemory, Slot
from topkube.collectives.device.series_groups import SeriesGroups
from topkube.collectives.exchange import Exchanges
from topkube.collectives.one_stage import OneStage
from topkube.collectives.request import Request
from topkube.collectives.two_stage import TwoStage
from topkube.training.exchange.aggregation import AggregationSettings
from topkube.training.exchange.buckets.fusion import BUCKET_BYTES
from topkube.training.exchange.buckets.parameter import Parameter
from topkube.training.node_weights.chunk_exchange import ChunkCall, ChunkExchange, ChunkSetting, MovedChunk, RestChunk
from topkube.training.node_weights.chunk_memory import ChunkMemory
from topkube.training.node_weights.device_chunk import (
    DEVICE_LANES,
    DeviceChunk,
    DeviceRestChunk,
    DeviceSetting,
)
from topkube.training.node_weights.guard import Squares
from topkube.training.node_weights.layout import Chunk, cut_into_chunks
from topkube.training.node_weights.outer_momentum import OuterMomentum
from topkube.training.node_weights.weights_device import WeightsDevice
from topkube.training.node_weights.worlds import find_node_world
from topkube.world import World

DEVICE_CHUNK_BYTES = 4 * BUCKET_BYTES
"""The size of chunks on a device, where calls from Python take most of the time: fewer, larger chunks."""


class WeightExchange:
    """The exchange among the nodes of `world`. `device` is that of the weights, None for host memory.

    All methods but `capture` and those with "delayed" in their names are collectives of all ranks, or of the ranks of a
    node. They run in the communication thread (`WeightsDevice.run`). `capture` and the delayed ones, with
    `keep_changes`, run in the script's thread. Delayed exchanges run in another thread, in `delayed_world`, which has
    the ranks and nodes of `world`."""

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
        self._delayed_memory = DeviceMemory(device) if device is not None and delayed_world is not None else None
        """The stream of delayed exchanges on the device."""
        chunk_bytes = DEVICE_CHUNK_BYTES if self._may_have_large_chunks() else BUCKET_BYTES
        self.chunks = cut_into_chunks(parameters, world, chunk_bytes)
        self._agreed: list[Array] = []
        self._delayed: Future[None] | None = None
        self.weights = [len(ranks) / world.size for ranks in world.node_ranks]
        """The weight of each node in means: its share of the ranks."""
        self.outer: OuterMomentum | None = None
        """The momentum of the mean change of all nodes, if the algorithm has an outer step."""
        if self.algorithm.has_outer_step:
            self.outer = OuterMomentum(self.chunks, aggregation.outer_learning_rate, aggregation.outer_momentum)
        self.memory = ChunkMemory(world, self.device)
        self._slots = [Slot() for _ in range(DEVICE_LANES)]
        """The work buffers of the chunks on the device that are under way at the same time."""
        self._groups, self._gather_slot = SeriesGroups(find_node_world(world), device), Slot()
        """The ranks of this node on the device, and the buffers in which they gather."""
        self.chunk_exchanges = [self._build_chunk_exchange(chunk) for chunk in self.chunks]

    def _build_chunk_exchange(self, chunk: Chunk) -> ChunkExchange:
        world, codec_of = self.world, self._find_codecs(chunk.is_always_dense)
        places = [piece.place for piece in chunk.pieces]
        memory = self._find_device_memory(chunk.is_always_dense)
        stage: OneStage | TwoStage
        if self.algorithm.has_two_stages(world.nodes):
            allocate_zeros = memory.allocate_zeros if memory is not None else None
            stage = TwoStage(codec_of, places, chunk.shard, world.node, self.weights, allocate_zeros)
        else:
            stage = OneStage(codec_of, places, chunk.shard)
        setting = ChunkSetting(chunk, world, self.weights, stage, self.memory)
        moves = self.outer is None and all(isinstance(codec, TensorCodec) for codec in stage.codecs)
        if memory is None:
            return MovedChunk(setting) if moves else RestChunk(setting, self.outer)
        whole = codec_of(stage.places if isinstance(stage, TwoStage) else places, chunk.shard)
        slot, is_delayed = self._slots[chunk.number % DEVICE_LANES], self._delayed_memory is not None
        on_device = DeviceSetting(memory, slot, whole, self._groups, self._gather_slot, is_delayed)
        return DeviceChunk(setting, on_device) if moves else DeviceRestChunk(setting, on_device)

    def _may_have_large_chunks(self) -> bool:
        """Return True if the chunks of a device may be large: if rows are short, and if a saved state does not depend
        on the chunks. It does if they decide which rank of a node has a shard, or which node owns a segment."""
        if self.world.shards > 1 or self.algorithm.has_two_stages(self.world.nodes):
            return False
        has_short_rows = isinstance(self._find_codecs(False)([], 0), PartsCodec)
        return has_short_rows and self._find_device_memory(is_always_dense=False) is not None

    def _find_device_memory(self, is_always_dense: bool) -> DeviceMemory | None:
        """Return the memory of the device on which chunks are exchanged, None if the codecs work in host memory."""
        codec = self._find_codecs(is_always_dense)([], 0)
        if self.algorithm.has_outer_step or not codec.works_on_device:
            return None
        return self._delayed_memory or self.device.memory

    def _find_codecs(self, is_always_dense: bool) -> CodecOf:
        """Return the function that builds the codec of a part of a chunk."""
        implementation = load(self.algorithm)
        assert isinstance(implementation, CodecAllReduce), self.algorithm.name
        return lambda places, length: implementation.codec(places, length, self._wire, is_always_dense)

    @property
    def agreed(self) -> list[Array]:
        """This rank's shards of x, one per chunk; empty until `capture` or until it is set. Those of chunks on a device
        are copied from there, if they have changed."""
        for exchange, agreed in zip(self.chunk_exchanges, self._agreed, strict=False):
            if isinstance(exchange, DeviceChunk):
                exchange.write_agreed(agreed)
        return self._agreed

    @agreed.setter
    def agreed(self, shards: list[Array]) -> None:
        self._agreed = shards
        for exchange in self.chunk_exchanges:
            if isinstance(exchange, DeviceChunk):
                exchange.forget_agreed()

    @property
    def has_agreed(self) -> bool:
        """True if the nodes have agreed on weights."""
        return bool(self._agreed)

    def find_stages(self, chunk: Chunk) -> TwoStage | None:
        """Return the two stages of a chunk; None if it is exchanged in one stage."""
        return self.chunk_exchanges[chunk.number].two_stages

    def capture(self) -> None:
        """Take the current weights of this rank as x: they are the same on all ranks. Nothing is owed then."""
        self.agreed = [np.zeros(chunk.shard, np.float32) for chunk in self.chunks]
        for chunk, agreed in zip(self.chunks, self._agreed, strict=True):
            self.memory.collect(chunk, agreed)
            stages = self.find_stages(chunk)
            if stages is not None:
                stages.owed[:] = 0
        if self.outer is not None:
            self.outer.reset()

    def sum_over_nodes(self, shard: Array) -> None:
        """Replace `shard`, this rank's shard of a chunk in float32, by the sum over all nodes. A collective of all
        ranks."""
        call = Call(self.world, f"{self.algorithm.name} sums", Request(shard, "sum"))
        call.check_between_nodes()
        if self.world.nodes > 1 and self.world.cross_comm is not None:
            exchange, sent = build_exchange(Route.ALL_REDUCE, self.world.cross_links, shard)
            finish_exchange(call, exchange, sent)

    @torch.no_grad()
    def run(self, squares: Squares | None = None, is_delayed: bool = False) -> None:
        """Exchange what has changed in the weights since the last exchange. Add to `squares`, if it is passed. A chunk
        travels while the next one is prepared. If `is_delayed` is True, `keep_changes` was called with the same
        `squares`. The parameters then stay as they are, and `apply` adds the result. If something changes the
        parameters in between, the next exchange sends that change."""
        world = self.world
        if is_delayed:
            assert self.delayed_world is not None
            world = self.delayed_world
        exchanges = Exchanges(world)

        def enter(number: int) -> ChunkCall:
            call = self._enter_call(self.chunks[number], world)
            return ChunkCall(call, exchanges, self._agreed[number], squares, is_delayed)

        following = enter(0) if self.chunks else None
        under_way: deque[tuple[ChunkExchange, ChunkCall]] = deque()
        for number, exchange in enumerate(self.chunk_exchanges):
            # The hashes of the next call travel before the data of this chunk, and do not wait for them.
            current, following = following, enter(number + 1) if number + 1 < len(self.chunks) else None
            assert current is not None
            exchange.begin(current)
            under_way.append((exchange, current))
            while len(under_way) >= exchange.most_under_way:
                earlier, call = under_way.popleft()
                earlier.finish(call)
        for earlier, call in under_way:
            earlier.finish(call)

    @torch.no_grad()
    def keep_changes(self, squares: Squares | None = None) -> None:
        """Keep what a delayed exchange sends of the changes of the parameters. Add to `squares`, if it is passed."""
        for exchange, agreed in zip(self.chunk_exchanges, self._agreed, strict=True):
            exchange.keep(agreed, squares)

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
        return self.chunk_exchanges[chunk.number].delayed_change

    def restore_delayed(self, changes: Sequence[Array]) -> None:
        """Restore a delayed exchange that has ended: `changes` holds what `apply` will add, one shard per chunk."""
        for exchange, change in zip(self.chunk_exchanges, changes, strict=True):
            exchange.delayed_change = change
        self._delayed = Future()
        self._delayed.set_result(None)

    def forget_delayed(self) -> None:
        """Note that the parameters have the result of the delayed exchange, or other weights."""
        self._delayed = None

    @torch.no_grad()
    def apply(self) -> None:
        """Add the result of a delayed exchange to the parameters. The ranks of a node gather it, and add the same."""
        # If every node has one rank, no rank gathers: all ranks must enter the same calls.
        is_whole = self.world.size == self.world.nodes
        for chunk, exchange in zip(self.chunks, self.chunk_exchanges, strict=True):
            if isinstance(exchange, DeviceChunk):
                call = None if is_whole else self._enter_call(chunk, self.world)
                if call is not None:
                    call.check_between_nodes()
                exchange.apply(call)
                continue
            change = self.find_delayed(chunk)
            whole = change if is_whole else self.gather(chunk, change)
            for parameter, values in self.memory.list_tensors(chunk, whole):
                parameter += values

    @torch.no_grad()
    def place(self, shards: Sequence[Array]) -> None:
        """Write the weights that `shards` holds, this rank's shard of each chunk, into the parameters. The ranks of a
        node gather them."""
        for chunk, shard in zip(self.chunks, shards, strict=True):
            staging, own = self.memory.take_staging(chunk)
            own[:] = shard
            call = self._enter_call(chunk, self.world)
            call.check_between_nodes()
            self.memory.write(chunk, call, staging)

    def gather(self, chunk: Chunk, shard: Array) -> Array:
        """Return the chunk of which every rank of the node passes its shard: a work buffer, until the next call."""
        staging, own = self.memory.take_staging(chunk)
        own[:] = shard
        call = self._enter_call(chunk, self.world)
        call.check_between_nodes()
        call.all_gather(staging)
        return staging

    def _enter_call(self, chunk: Chunk, world: World) -> Call:
        name = f"{self.algorithm.name} weights {chunk.number}"
        return Call(world, name, Request(self.memory.take_staging(chunk, world)[0], "sum"))
