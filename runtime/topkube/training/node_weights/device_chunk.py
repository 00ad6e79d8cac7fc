"""The exchange of the changes of one chunk whose weights are on a device, where the codecs work too.

It computes what the exchanges in host memory compute (chunk_exchange.py), with the same bits. `DeviceChunk` moves the
weights by what was sent, as `MovedChunk` does, and `DeviceRestChunk` adds the rest to the agreed weights, as
`RestChunk` does. Only the rows of bytes that nodes send cross to the host and back (collectives/device/rows.py). The
ranks of a node gather the new weights on the device.

A delayed exchange packs in the stream of the script (`keep`), and adds what has arrived in a stream of its own. Its
thread waits for that work, so when the exchange has ended, every stream may use the result.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
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
from topkube.training.node_weights.parameter_views import ParameterViews

DEVICE_LANES = 4
"""The chunks on a device of which messages are under way at the same time: the link then does not wait for the host."""


@dataclass(frozen=True)
class DeviceSetting:
    """The device of a chunk: `memory` has the stream of its exchange. `codec` writes this rank's whole shard; its
    kernels run on the device. `slot` has the work buffers; the next DEVICE_LANES - 1 chunks use others. The ranks of
    the node gather through `groups`, in buffers of `gather_slot`, which all chunks share: gathers come one after
    another in one stream. Exchanges are delayed if `is_delayed` is True."""

    memory: DeviceMemory
    slot: Slot
    codec: Codec
    groups: SeriesGroups
    gather_slot: Slot
    is_delayed: bool


class DeviceChunk(ChunkExchange):
    """The exchanges of a chunk on a device. This rank's shard of the agreed weights is there too. If `is_delayed`,
    `memory` has a stream that no other exchange uses, `keep` works in the stream of the script, and `apply` in that of
    the weights."""

    most_under_way = DEVICE_LANES

    def __init__(self, setting: ChunkSetting, on_device: DeviceSetting) -> None:
        super().__init__(setting)
        self._device, self._slot = on_device.memory, on_device.slot
        self._codec, self._groups, self._gather_slot = on_device.codec, on_device.groups, on_device.gather_slot
        self._own_slot = Slot() if on_device.is_delayed else self._slot
        self._views = ParameterViews(setting.chunk)
        self._agreed: torch.Tensor | None = None
        """This rank's shard of the agreed weights; None if only the host has them."""
        self._is_newer = False
        """True if the host does not have the agreed weights of the last exchange."""
        self._written: Any = None
        """The mark of the device's work on the agreed weights."""
        self._weights: torch.Tensor | None = None
        """This rank's shard of the node's own weights, if it is needed until the exchange ends."""
        self._rest: torch.Tensor | None = None
        """This rank's shard of what was not sent, if it is needed until the exchange ends."""
        self._rows: DeviceRows | None = None
        """The exchange that is under way between nodes; None on a rank without a shard."""
        self._packed: Any = None
        """The mark of the device's work on what this node sends; None without streams."""
        self._change: torch.Tensor | None = None
        """What `apply` adds to this rank's shard of the parameters; None if only the host has it."""
        self._change_in_host: Array = np.empty(0, np.float32)

    # ---- exchanges

    def begin(self, current: ChunkCall) -> None:
        if not current.is_delayed:
            self._pack(current.agreed, current.squares)
            self._packed = self._device.mark()
        else:
            self._device.enter_thread()
        if self._rows is not None:  # the rank has a shard
            comm = current.call.world.cross_links  # of delayed exchanges, if this one is delayed
            exchange = self._rows.travel(comm, FREE_TAGS + self.chunk.number % DEVICE_LANES)
            current.exchanges.start(self._number, exchange_after_device(self._packed, current.call, exchange))
            phases.current.sent(inter=self._rows.sent_bytes)

    def finish(self, current: ChunkCall) -> None:
        assert self._agreed is not None
        if self._rows is not None:
            current.exchanges.finish(self._number, current.call, self._choose_pause(current))
        if not current.is_delayed:
            self._add(self._agreed)
            self._measure(current.squares)
            self._write_result(current.call)
            return
        with self._device.on_stream():
            self._add(self._agreed)
            if current.squares is not None:
                current.squares.agreed += _sum_squares(self._agreed)
                if isinstance(self._rows, RowsInTwoStages):
                    of_owner = _sum_squares(self._rows.own_rest)
                    current.squares.unsent += of_owner  # `keep` has added the others
                    current.squares.change += of_owner
            self._change = self._take_change()
            if (mark := self._device.mark()) is not None:
                mark.synchronize()
            self._weights = None  # of the script's stream, which may use its memory again from here on

    def keep(self, agreed: Array, squares: Squares | None) -> None:
        self._pack(agreed, squares, is_delayed=True)
        caller = self._device.mark_caller()
        self._packed = caller.event if caller is not None else None
        if squares is not None:
            assert self._rest is not None
            squares.unsent += _sum_squares(self._rest)

    def apply(self, call: Call | None) -> None:
        """Add the result of a delayed exchange that has ended to the parameters. All ranks have entered `call`; it is
        None if every node has one rank."""
        if self._change is None:
            self._change = torch.from_numpy(self._change_in_host).to(self._device.device, copy=True)
        self._device.lend(self._change, self._device.mark_caller())  # it may be freed before it is added
        self._write(torch._foreach_add_, self._change, call)

    @property
    def delayed_change(self) -> Array:
        """After a delayed exchange, what must be added to this rank's shard of the parameters."""
        return self._change_in_host if self._change is None else self._change.cpu().numpy()

    @delayed_change.setter
    def delayed_change(self, change: Array) -> None:
        self._change_in_host, self._change = change, None

    # ---- the agreed weights

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

    def _take_agreed(self, agreed: Array) -> torch.Tensor:
        if self._agreed is None:
            self._agreed = torch.from_numpy(agreed).to(self._device.device, copy=True)
        return self._agreed

    # ---- the steps of an exchange

    def _pack(self, agreed: Array, squares: Squares | None, is_delayed: bool = False) -> None:
        """Pack what this node sends, and begin to copy it to the host."""
        weights = self._collect()
        rest = weights - self._take_agreed(agreed)
        if squares is not None:
            squares.change += _sum_squares(rest)
        if self._world.cross_comm is not None:
            arguments = self._device, self._slot, self._codec, self._world, self._factors, self._own_slot
            stages = self.two_stages
            with phases.current.timed("select"):
                rows = RowsInOneStage(*arguments) if stages is None else RowsInTwoStages(stages, *arguments)
                rows.pack(rest)
            self._rows = rows
        self._keep_for_result(weights, rest, squares is not None, is_delayed)

    def _collect(self) -> torch.Tensor:
        """Return this rank's shard of the node's own weights. The gaps between tensors are zero."""
        weights: torch.Tensor = self._device.allocate_zeros(self.chunk.shard)
        if pieces := self._views.pieces:
            torch._foreach_copy_(self._views.cut_pieces(weights), pieces)
        return weights

    @property
    def _number(self) -> int:
        """The number of this chunk's exchange. Those of chunks in host memory are not negative."""
        return -1 - self.chunk.number

    def _add(self, agreed: torch.Tensor) -> None:
        """Add what all nodes have sent to the agreed weights."""
        if self._rows is not None:
            with phases.current.timed("select"):
                self._codec.unpack_add(agreed, *self._rows.mean)
                if isinstance(self._rows, RowsInTwoStages) and self._rest is not None:
                    self._rest[self._rows.segment] = self._rows.own_rest
        self._is_newer, self._written = True, self._device.mark()

    def _measure(self, squares: Squares | None) -> None:
        if squares is not None:
            assert self._rest is not None
            assert self._agreed is not None
            squares.unsent += _sum_squares(self._rest)
            squares.agreed += _sum_squares(self._agreed)
            if isinstance(self._rows, RowsInTwoStages):
                squares.change += _sum_squares(self._rows.own_rest)

    def _keep_for_result(self, weights: torch.Tensor, rest: torch.Tensor, is_measured: bool, is_delayed: bool) -> None:
        """Keep what the end of the exchange needs."""
        self._rest = rest if is_measured else None

    def _write_result(self, call: Call) -> None:
        """Write the node's new weights into the parameters."""
        self._write(torch._foreach_add_, self._take_move(-0.0), call)

    def _take_change(self) -> torch.Tensor:
        """Return the change of this rank's shard of the parameters, after a delayed exchange."""
        return self._take_move(0.0)

    def _take_move(self, start: float) -> torch.Tensor:
        """Return what the exchange adds to the node's own weights, plus `start`. (-0.0 + x has the bits of x.)"""
        move = torch.full((self.chunk.shard,), start, dtype=torch.float32, device=self._device.device)
        if self._rows is not None:
            with phases.current.timed("select"):
                if isinstance(self._rows, RowsInTwoStages):
                    torch.sub(self._rows.own_rest, self._rows.own_change, out=move[self._rows.segment])
                self._codec.unpack_add(move, *self._rows.moved)
        self._rows = self._rest = None
        return move

    def _write(self, act: Any, shard: torch.Tensor, call: Call | None) -> None:
        """Write this node's shards of the chunk into the parameters by `act`, an operation on lists. The ranks of a
        node gather them; they have entered `call`, which is None if every node has one rank."""
        whole = shard
        if self._world.local_size > 1:
            assert call is not None
            call.check_inside()  # a rank that is missing would let the device wait without a deadline
            slot = self._gather_slot
            whole = self._device.find_buffer(slot, "chunk", self.chunk.length, torch.float32)
            whole[self.chunk.first : self.chunk.last] = shard
            own = self._device.find_buffer(slot, "shard", self.chunk.shard, torch.float32)
            own.copy_(shard)
            self._groups.claim_node()
            try:
                gather_in_node(self._world, self._groups.node, self._device, slot, whole, whole)
            finally:
                self._groups.release()
        parts, parameters = list(self._views.cut(whole)), self._views.whole
        if parameters is None:
            parameters = [parameter.tensor for parameter in self.chunk.parameters]
            parts = [part.view_as(tensor) for part, tensor in zip(parts, parameters, strict=True)]
        act(parameters, parts)


class DeviceRestChunk(DeviceChunk):
    """The exchanges of a chunk whose rests are stored, and added to the agreed weights."""

    def _keep_for_result(self, weights: torch.Tensor, rest: torch.Tensor, is_measured: bool, is_delayed: bool) -> None:
        self._weights, self._rest = weights if is_delayed else None, rest

    def _write_result(self, call: Call) -> None:
        self._write(torch._foreach_copy_, self._take_weights(), call)

    def _take_change(self) -> torch.Tensor:
        assert self._weights is not None
        return self._take_weights().sub_(self._weights)

    def _take_weights(self) -> torch.Tensor:
        """Return this rank's shard of the node's new weights."""
        assert self._rest is not None
        assert self._agreed is not None
        weights = self._rest.add_(self._agreed)
        self._rows = self._rest = None
        return weights


def _sum_squares(values: torch.Tensor) -> float:
    """Return the sum of the squares of `values`, float32. Waits for the device."""
    return float(torch.dot(values, values))
