"""The exchange of the changes of one chunk whose weights are on a device, where the codecs work too.

It computes what `MovedChunk` computes (chunk_exchange.py), with the same bits. Only the rows of bytes that nodes send
cross to the host and back, if each node has one rank. Otherwise the ranks of a node gather the new weights through
their shared memory in the host.

A delayed exchange packs in the stream of the script (`keep`), and adds what has arrived in a stream of its own. Its
thread waits for that work, so when the exchange has ended, every stream may use the result.
"""

from __future__ import annotations

from typing import Any, cast

import torch

from topkube.arrays import Array
from topkube.collectives.codecs import PartsCodec
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
    """The exchanges of a chunk in one stage with one part. Its codec is a `PartsCodec` whose kernels run on the device
    of `memory`, which has the stream of the exchange. This rank's shard of the agreed weights is on the device too.
    `slot` has the work buffers; the next chunk uses another. Exchanges are not delayed."""

    def __init__(self, setting: ChunkSetting, memory: DeviceMemory, slot: Slot) -> None:
        super().__init__(setting)
        self._device, self._slot = memory, slot
        stage = cast(OneStage, setting.stage)
        (self._codec,) = cast(list[PartsCodec], stage.codecs)
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
        raise TypeError("this exchange is not delayed")

    def begin(self, current: ChunkCall) -> None:
        self._weights = self._collect()
        self._rest = self._weights - self._take_agreed(current.agreed)
        if current.squares is not None:
            current.squares.change += _sum_squares(self._rest)
        own = torch.empty(0)
        if self._world.cross_comm is not None:
            own = self._pack()
            self._wait_for_device(self._device.mark())
        self._send(current, own)

    def finish(self, current: ChunkCall) -> None:
        assert self._agreed is not None
        if self._world.cross_comm is not None:
            self._receive(current, self._weights)
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

    def _collect(self) -> torch.Tensor:
        """Return this rank's shard of the node's own weights. The gaps between tensors are zero."""
        weights = torch.zeros(self.chunk.shard, device=self._device.device)
        if pieces := self.chunk.pieces:
            torch._foreach_copy_(
                [weights[piece.place] for piece in pieces], [piece.view(piece.parameter.tensor) for piece in pieces]
            )
        return weights

    def _send(self, current: ChunkCall, own: torch.Tensor) -> None:
        """Begin to exchange rows: `own` is that of this node, in the host's memory."""
        if self._world.cross_comm is None:
            current.call.check_between_nodes()
            return
        assert self.one_stage is not None
        self.one_stage.begin(current.call, lambda _, row: _copy_row(row, own), current.exchanges, self.chunk.number)

    def _take_agreed(self, agreed: Array) -> torch.Tensor:
        if self._agreed is None:
            self._agreed = torch.from_numpy(agreed).to(self._device.device, copy=True)
        return self._agreed

    def _pack(self) -> torch.Tensor:
        """Return what this node sends, in the host's memory, once the device has done this work. What is not sent stays
        in `_rest`."""
        packed = self._device.find_buffer(self._slot, "own row", self._codec.row_bytes, torch.uint8)
        with phases.current.timed("select"):
            self._codec.pack(self._rest, packed)
            in_host: torch.Tensor = self._device.find_host_memory(self._slot, packed, "own row in the host")
            self._device.copy_between(in_host, packed)
        return in_host

    def _receive(self, current: ChunkCall, moved: torch.Tensor) -> None:
        """Receive the rows of all nodes, and add them to the agreed weights, and to `moved` what they change in the
        node's own weights."""
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
            self._device.copy_between(arrived, in_host)
            self._slot.read = self._device.mark()
            self._codec.unpack_add(self._agreed, list(arrived), self._factors)
            self._codec.unpack_add(moved, list(arrived), self._moves)
        self._is_newer, self._written = True, self._device.mark()

    def _write(self, current: ChunkCall) -> None:
        """Write the node's new weights into the parameters."""
        if self._world.local_size > 1:
            staging, shard = self._memory.take_staging(self.chunk, current.call.world)
            torch.from_numpy(shard).copy_(self._weights)
            self._memory.write(self.chunk, current.call, staging)
            return
        torch._foreach_copy_(*self._list_parameters(self._weights))

    def _list_parameters(self, chunk: torch.Tensor) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Return the parameters of the chunk, and their parts of the whole chunk, each in the parameter's shape."""
        parameters = self.chunk.parameters
        pairs = zip(parameters, self.chunk.starts, strict=True)
        values = [chunk[start : start + p.length].view(p.tensor.shape) for p, start in pairs]
        return [parameter.tensor for parameter in parameters], values

    @staticmethod
    def _wait_for_device(mark: Any) -> None:
        """Wait until the device has passed the mark; None without streams."""
        if mark is not None:
            mark.synchronize()


class DelayedDeviceChunk(DeviceChunk):
    """The delayed exchanges of a chunk. `keep` works in the stream of the script, the other methods in that of
    `memory`, which no other exchange uses."""

    def __init__(self, setting: ChunkSetting, memory: DeviceMemory, slot: Slot) -> None:
        self._change: torch.Tensor | None = None
        """What must be added to this rank's shard of the parameters; None if only the host has it."""
        super().__init__(setting, memory, slot)
        self._own_slot = Slot()
        self._kept: tuple[torch.Tensor, Any] = torch.empty(0), None
        """The row that this node sends, and the mark of the device's work on it."""

    @property
    def delayed_change(self) -> Array:
        """After a delayed exchange, what must be added to this rank's shard of the parameters."""
        return self._change_in_host if self._change is None else self._change.cpu().numpy()

    @delayed_change.setter
    def delayed_change(self, change: Array) -> None:
        self._change_in_host, self._change = change, None

    def keep(self, agreed: Array, squares: Squares | None) -> None:
        self._rest = self._collect() - self._take_agreed(agreed)
        if squares is not None:
            squares.change += _sum_squares(self._rest)
        own, mark = torch.empty(0), None
        if self._world.cross_comm is not None:
            packed = self._device.find_buffer(self._own_slot, "own row", self._codec.row_bytes, torch.uint8)
            self._codec.pack(self._rest, packed)
            own = self._device.find_host_memory(self._own_slot, packed, "own row in the host")
            self._device.copy_between(own, packed)
            caller = self._device.mark_caller()
            mark = caller.event if caller is not None else None
        if squares is not None:
            squares.unsent += _sum_squares(self._rest)
        self._kept, self._rest = (own, mark), torch.empty(0)

    def begin(self, current: ChunkCall) -> None:
        own, mark = self._kept
        self._device.enter_thread()
        self._wait_for_device(mark)
        self._send(current, own)

    def finish(self, current: ChunkCall) -> None:
        assert self._agreed is not None
        with self._device.on_stream():
            if self._change is None:
                self._change = torch.empty(self.chunk.shard, device=self._device.device)
            self._change.zero_()
            if self._world.cross_comm is not None:
                self._receive(current, self._change)
            if current.squares is not None:
                current.squares.agreed += _sum_squares(self._agreed)
            self._wait_for_device(self._device.mark())

    def apply(self) -> None:
        """Add the result of an exchange that has ended to the parameters, if this rank has all of it."""
        if self._change is None:
            self._change = torch.from_numpy(self._change_in_host).to(self._device.device, copy=True)
        torch._foreach_add_(*self._list_parameters(self._change))


def _copy_row(row: Array, own: torch.Tensor) -> None:
    row[:] = own.numpy()


def _sum_squares(values: torch.Tensor) -> float:
    """Return the sum of the squares of `values`, float32. Waits for the device."""
    return float(torch.dot(values, values))
