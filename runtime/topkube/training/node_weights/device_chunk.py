"""The exchange of the changes of one chunk whose weights are on a device, where the codecs work too.

It computes what `MovedChunk` computes (chunk_exchange.py), with the same bits. Only the rows of bytes that nodes send
cross to the host and back, if each node has one rank. Otherwise the ranks of a node gather the new weights through
their shared memory in the host.
"""

from __future__ import annotations

from typing import Any, cast

import torch

from topkube.arrays import Array
from topkube.collectives.codecs import TensorCodec
from topkube.collectives.device.memory import DeviceMemory, Slot
from topkube.collectives.one_stage import OneStage
from topkube.telemetry import phases
from topkube.training.node_weights.chunk_exchange import (
    ChunkCall,
    ChunkExchange,
    ChunkSetting,
)
from topkube.training.node_weights.guard import Squares


class DeviceChunk(ChunkExchange):
    """The exchanges of a chunk in one stage with one part, not delayed. Its codec is a `TensorCodec` whose kernels run
    on the device of `memory`. This rank's shard of the agreed weights is on the device too. `slot` has the work
    buffers; the next chunk uses another."""

    def __init__(self, setting: ChunkSetting, memory: DeviceMemory, slot: Slot) -> None:
        super().__init__(setting)
        self._device, self._slot = memory, slot
        stage = cast(OneStage, setting.stage)
        (self._codec,) = cast(list[TensorCodec], stage.codecs)
        self._moves = [factor - (node == self._world.node) for node, factor in enumerate(self._factors)]
        self._agreed: torch.Tensor | None = None
        """This rank's shard of the agreed weights; None if only the host has them."""
        self._is_newer = False
        """True if the host does not have the agreed weights of the last exchange."""
        self._written: Any = None
        """The mark of the device's work on the agreed weights."""
        self._weights, self._rest = torch.empty(0), torch.empty(0)
        """This rank's shards of the node's own weights, and of what was not sent, while an exchange is under way."""

    def keep(self, agreed: Array, squares: Squares | None) -> None:
        raise TypeError("a delayed exchange packs in host memory")

    def begin(self, current: ChunkCall) -> None:
        weights = self._weights = torch.zeros(self.chunk.shard, device=self._device.device)
        if pieces := self.chunk.pieces:
            torch._foreach_copy_(
                [weights[piece.place] for piece in pieces], [piece.view(piece.parameter.tensor) for piece in pieces]
            )
        agreed = self._take_agreed(current.agreed)
        self._rest = weights - agreed
        if current.squares is not None:
            current.squares.change += _sum_squares(self._rest)
        if self._world.cross_comm is None:
            current.call.check_between_nodes()
            return
        assert self.one_stage is not None
        own = self._pack()
        self.one_stage.begin(current.call, lambda _, row: _copy_row(row, own), current.exchanges, self.chunk.number)

    def finish(self, current: ChunkCall) -> None:
        assert self._agreed is not None
        if self._world.cross_comm is not None:
            self._receive(current)
        if current.squares is not None:
            current.squares.unsent += _sum_squares(self._rest)
            current.squares.agreed += _sum_squares(self._agreed)
        self._write(current)
        self._weights = self._rest = torch.empty(0)

    def write_agreed(self, agreed: Array) -> None:
        """Write this rank's shard of the agreed weights into `agreed`, if the last exchange changed it."""
        if self._is_newer and self._agreed is not None:
            if self._written is not None:
                self._written.synchronize()
            torch.from_numpy(agreed).copy_(self._agreed)
            self._is_newer = False

    def forget_agreed(self) -> None:
        """Note that the host has other agreed weights now."""
        self._agreed, self._is_newer = None, False

    # ---- the steps of an exchange

    def _take_agreed(self, agreed: Array) -> torch.Tensor:
        if self._agreed is None:
            self._agreed = torch.from_numpy(agreed).to(self._device.device, copy=True)
        return self._agreed

    def _pack(self) -> torch.Tensor:
        """Return what this node sends, in the host's memory. What is not sent stays in `_rest`. Waits for the
        device."""
        packed = self._device.find_buffer(self._slot, "own row", self._codec.row_bytes, torch.uint8)
        with phases.current.timed("select"):
            self._codec.pack(self._rest, packed)
            in_host: torch.Tensor = self._device.find_host_memory(self._slot, packed, "own row in the host")
            self._copy(in_host, packed)
            self._wait_for_device()
        return in_host

    def _receive(self, current: ChunkCall) -> None:
        """Receive the rows of all nodes, and add them to the agreed weights and to the node's own weights."""
        assert self.one_stage is not None
        assert self._agreed is not None
        nodes, row_bytes = self._world.nodes, self._codec.row_bytes
        arrived = self._device.find_buffer(self._slot, "rows of nodes", nodes * row_bytes, torch.uint8)
        arrived = arrived.view(nodes, row_bytes)
        in_host = self._device.find_host_memory(self._slot, arrived, "rows of nodes in the host")

        def take(_: int, rows: list[Array]) -> None:
            for to, row in zip(in_host, rows, strict=True):
                to.copy_(torch.from_numpy(row))

        self.one_stage.finish(current.call, take, current.exchanges, self.chunk.number, self._choose_pause(current))
        with phases.current.timed("select"):
            self._copy(arrived, in_host)
            self._slot.read = self._device.mark()
            self._codec.unpack_add(self._agreed, list(arrived), self._factors)
            self._codec.unpack_add(self._weights, list(arrived), self._moves)
        self._is_newer, self._written = True, self._device.mark()

    def _write(self, current: ChunkCall) -> None:
        """Write the node's new weights into the parameters."""
        if self._world.local_size > 1:
            staging, shard = self._memory.take_staging(self.chunk, current.call.world)
            torch.from_numpy(shard).copy_(self._weights)
            self._memory.write(self.chunk, current.call, staging)
            return
        pairs = zip(self.chunk.parameters, self.chunk.starts, strict=True)
        values = [self._weights[start : start + p.length].view(p.tensor.shape) for p, start in pairs]
        torch._foreach_copy_([parameter.tensor for parameter in self.chunk.parameters], values)

    def _copy(self, to: torch.Tensor, source: torch.Tensor) -> None:
        """Copy on the stream, unless the host's memory is that of the tensors."""
        if to is not source:
            to.copy_(source, non_blocking=True)

    def _wait_for_device(self) -> None:
        mark = self._device.mark()
        if mark is not None:
            mark.synchronize()


def _copy_row(row: Array, own: torch.Tensor) -> None:
    row[:] = own.numpy()


def _sum_squares(values: torch.Tensor) -> float:
    """Return the sum of the squares of `values`, float32. Waits for the device."""
    return float(torch.dot(values, values))
