"""The exchange of the changes of one chunk whose weights are on a device, where the codecs work too.

It computes what `MovedChunk` computes (chunk_exchange.py), with the same bits. Only the rows of bytes that nodes send
cross to the host and back (collectives/device/rows.py). The ranks of a node gather the new weights on the device.

A delayed exchange packs in the stream of the script (`keep`), and adds what has arrived in a stream of its own. Its
thread waits for that work, so when the exchange has ended, every stream may use the result.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from topkube.arrays import Array
from topkube.collectives.call import Call
from topkube.collectives.codecs import Codec
from topkube.collectives.device.memory import DeviceMemory, Slot
from topkube.collectives.device.node_stages import gather_in_node
from topkube.collectives.device.rows import DeviceRows, RowsInOneStage, RowsInTwoStages, exchange_after_device
from topkube.collectives.device.series_groups import SeriesGroups
from topkube.collectives.one_stage import FREE_TAGS
from topkube.telemetry import phases
from topkube.training.node_weights.chunk_exchange import ChunkCall, ChunkExchange, ChunkSetting
from topkube.training.node_weights.guard import Squares


@dataclass(frozen=True)
class DeviceSetting:
    """The device of a chunk: `memory` has the stream of its exchange. `codec` writes this rank's whole shard; its
    kernels run on the device. The ranks of the node gather through `groups`. `slot` has the work buffers; the next
    chunk uses another."""

    memory: DeviceMemory
    slot: Slot
    codec: Codec
    groups: SeriesGroups


class DeviceChunk(ChunkExchange):
    """The exchanges of a chunk on a device. This rank's shard of the agreed weights is there too. Exchanges are not
    delayed."""

    def __init__(self, setting: ChunkSetting, on_device: DeviceSetting) -> None:
        super().__init__(setting)
        self._device, self._slot = on_device.memory, on_device.slot
        self._codec, self._groups = on_device.codec, on_device.groups
        self._agreed: torch.Tensor | None = None
        """This rank's shard of the agreed weights; None if only the host has them."""
        self._is_newer = False
        """True if the host does not have the agreed weights of the last exchange."""
        self._written: Any = None
        """The mark of the device's work on the agreed weights."""
        self._weights, self._rest = torch.empty(0), torch.empty(0)
        """This rank's shards of the node's own weights, and of what was not sent, while an exchange is under way. The
        rest is kept only if the exchange is measured."""
        self._rows: DeviceRows | None = None
        """The exchange that is under way between nodes."""

    def keep(self, agreed: Array, squares: Squares | None) -> None:
        raise TypeError("this exchange is not delayed")

    def begin(self, current: ChunkCall) -> None:
        self._weights = self._collect()
        rest = self._weights - self._take_agreed(current.agreed)
        if current.squares is not None:
            current.squares.change += _sum_squares(rest)
        if self._world.cross_comm is not None:
            self._rows = self._pack(rest, self._slot)
            self._send(current, self._device.mark())
        self._rest = rest if current.squares is not None else torch.empty(0)

    def finish(self, current: ChunkCall) -> None:
        assert self._agreed is not None
        if self._world.cross_comm is not None:
            self._receive(current, self._weights)
        if current.squares is not None:
            current.squares.unsent += _sum_squares(self._rest)
            current.squares.agreed += _sum_squares(self._agreed)
        self._write(torch._foreach_copy_, self._weights, current.call)
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

    def _take_agreed(self, agreed: Array) -> torch.Tensor:
        if self._agreed is None:
            self._agreed = torch.from_numpy(agreed).to(self._device.device, copy=True)
        return self._agreed

    def _pack(self, rest: torch.Tensor, own_slot: Slot) -> DeviceRows:
        """Return an exchange of what this node sends of `rest`: it is packed, in buffers of `own_slot`, and on its way
        to the host. What is not sent stays in `rest`."""
        arguments = self._device, self._slot, self._codec, self._world, self._factors, own_slot
        with phases.current.timed("select"):
            stages = self.two_stages
            rows = RowsInOneStage(*arguments) if stages is None else RowsInTwoStages(stages, *arguments)
            rows.pack(rest)
        return rows

    def _send(self, current: ChunkCall, sent: Any) -> None:
        """Begin to exchange rows, once the device has passed the mark `sent`."""
        assert self._rows is not None
        exchange = self._rows.travel(FREE_TAGS + self.chunk.number % 2)
        current.exchanges.start(self._number, exchange_after_device(sent, current.call, exchange))
        phases.current.sent(inter=self._rows.sent_bytes)

    @property
    def _number(self) -> int:
        """The number of this chunk's exchange. Those of chunks in host memory are not negative."""
        return -1 - self.chunk.number

    def _receive(self, current: ChunkCall, moved: torch.Tensor) -> None:
        """Receive the rows of all nodes, and add them to the agreed weights, and to `moved` what they change in the
        node's own weights."""
        assert self._agreed is not None
        assert self._rows is not None
        current.exchanges.finish(self._number, current.call, self._choose_pause(current))
        with phases.current.timed("select"):
            self._codec.unpack_add(self._agreed, *self._rows.mean)
            self._codec.unpack_add(moved, *self._rows.moved)
        self._is_newer, self._written, self._rows = True, self._device.mark(), None

    def _write(self, act: Any, shard: torch.Tensor, call: Call | None) -> None:
        """Write this node's shards of the chunk into the parameters by `act`, an operation on lists. The ranks of a
        node gather them; they have entered `call`, which is None if every node has one rank."""
        whole = shard
        if self._world.local_size > 1:
            assert call is not None
            call.check_inside()  # a rank that is missing would let the device wait without a deadline
            whole = self._device.find_buffer(self._slot, "chunk", self.chunk.length, torch.float32)
            whole[self.chunk.first : self.chunk.last] = shard
            own = self._device.find_buffer(self._slot, "shard", self.chunk.shard, torch.float32)
            own.copy_(shard)
            self._groups.claim_node()
            gather_in_node(self._world, self._groups.node, self._device, self._slot, whole, whole)
            self._groups.release()
        parameters = self.chunk.parameters
        pairs = zip(parameters, self.chunk.starts, strict=True)
        values = [whole[start : start + p.length].view(p.tensor.shape) for p, start in pairs]
        act([parameter.tensor for parameter in parameters], values)

    @staticmethod
    def _wait_for_device(mark: Any) -> None:
        """Wait until the device has passed the mark; None without streams."""
        if mark is not None:
            mark.synchronize()


class DelayedDeviceChunk(DeviceChunk):
    """The delayed exchanges of a chunk. `keep` works in the stream of the script, `apply` in that of the weights, and
    the other methods in that of `memory`, which no other exchange uses."""

    def __init__(self, setting: ChunkSetting, on_device: DeviceSetting) -> None:
        self._change: torch.Tensor | None = None
        """What must be added to this rank's shard of the parameters; None if only the host has it."""
        super().__init__(setting, on_device)
        self._own_slot = Slot()
        self._packed: Any = None
        """The mark of the device's work in `keep`."""

    @property
    def delayed_change(self) -> Array:
        """After a delayed exchange, what must be added to this rank's shard of the parameters."""
        return self._change_in_host if self._change is None else self._change.cpu().numpy()

    @delayed_change.setter
    def delayed_change(self, change: Array) -> None:
        self._change_in_host, self._change = change, None

    def keep(self, agreed: Array, squares: Squares | None) -> None:
        rest = self._collect() - self._take_agreed(agreed)
        if squares is not None:
            squares.change += _sum_squares(rest)
        if self._world.cross_comm is not None:
            self._rows = self._pack(rest, self._own_slot)
            caller = self._device.mark_caller()
            self._packed = caller.event if caller is not None else None
        if squares is not None:
            squares.unsent += _sum_squares(rest)

    def begin(self, current: ChunkCall) -> None:
        self._device.enter_thread()
        if self._world.cross_comm is not None:
            self._send(current, self._packed)

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

    def apply(self, call: Call | None) -> None:
        """Add the result of an exchange that has ended to the parameters. All ranks have entered `call`; it is None if
        every node has one rank."""
        if self._change is None:
            self._change = torch.from_numpy(self._change_in_host).to(self._device.device, copy=True)
        self._write(torch._foreach_add_, self._change, call)


def _sum_squares(values: torch.Tensor) -> float:
    """Return the sum of the squares of `values`, float32. Waits for the device."""
    return float(torch.dot(values, values))
