"""The exchange of the changes of one chunk, in one stage or in two.

x are the agreed weights, x_i those of node i, c_i what node i sends of x_i - x, and e_i the rest. After an exchange, x
has become x + mean(c), and x_i has become x + e_i. There are two ways to compute x_i:

- `MovedChunk` adds mean(c) - c_i to x_i. Neither e_i nor a copy of the weights is stored. An exchange reads x_i and x
  once to pack c_i, and then adds to both. With two stages, the own segment changes in another way (own_segment.py).
- `RestChunk` stores e_i, and adds it to the new x. If everything is sent, as with `localsgd` and fp32, x_i therefore
  has the same bits as x. It also serves algorithms with an outer step, which add something else than mean(c) to x.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, cast

import numpy as np
import torch

from topkube.algorithms.cost import PAIRWISE_LIMIT
from topkube.arrays import Array
from topkube.collectives.call import Call, reserve_workspace
from topkube.collectives.codecs import TensorCodec
from topkube.collectives.exchange import Exchanges
from topkube.collectives.one_stage import OneStage
from topkube.collectives.pauses import choose_pause
from topkube.collectives.two_stage import TwoStage
from topkube.telemetry import phases
from topkube.training.node_weights.chunk_memory import ChunkMemory, cut
from topkube.training.node_weights.guard import Squares, sum_squares
from topkube.training.node_weights.layout import Chunk, list_tensors_of_ranges, select
from topkube.training.node_weights.outer_momentum import OuterMomentum
from topkube.training.node_weights.own_segment import OwnSegment
from topkube.world import World

_Sum = tuple[Sequence[Array], Sequence[float]]
"""Rows, and the factor of each."""


@dataclass
class ChunkCall:
    """One exchange of a chunk: its call, the exchanges under way on this rank, this rank's shard of the agreed weights,
    and the sums of squares to which the exchange adds, if it is measured. If `is_delayed` is True, `keep` was called
    before, and the parameters stay as they are."""

    call: Call
    exchanges: Exchanges
    agreed: Array
    squares: Squares | None
    is_delayed: bool


@dataclass(frozen=True)
class ChunkSetting:
    """A chunk that is exchanged among the nodes of `world`, whose shares of the ranks are `factors`, in `stage`: one
    stage or two. `memory` reads and writes its weights."""

    chunk: Chunk
    world: World
    factors: Sequence[float]
    stage: OneStage | TwoStage
    memory: ChunkMemory


class ChunkExchange(ABC):
    """The exchanges of a chunk."""

    most_under_way: ClassVar[int] = 2
    """The most chunks in the same kind of memory whose exchanges may be under way: so many have work buffers."""

    def __init__(self, setting: ChunkSetting) -> None:
        self.chunk, self._world, self._factors = setting.chunk, setting.world, setting.factors
        self._memory = setting.memory
        self.one_stage = setting.stage if isinstance(setting.stage, OneStage) else None
        self.two_stages = setting.stage if isinstance(setting.stage, TwoStage) else None
        self.delayed_change: Array = np.empty(0, np.float32)
        """After a delayed exchange, what must be added to this rank's shard of the parameters."""

    @abstractmethod
    def keep(self, agreed: Array, squares: Squares | None) -> None:
        """Keep what a delayed exchange sends. `squares` is that of the exchange."""

    @abstractmethod
    def begin(self, current: ChunkCall) -> None:
        """Begin an exchange."""

    @abstractmethod
    def finish(self, current: ChunkCall) -> None:
        """Finish the exchange. Write the new weights, or if it is delayed, `delayed_change`."""

    def _reserve_delayed_change(self) -> None:
        if self.delayed_change.size != self.chunk.shard:
            self.delayed_change = np.zeros(self.chunk.shard, np.float32)

    def _choose_pause(self, current: ChunkCall) -> float | None:
        """Return the pause of waits for messages. With very many nodes, messages travel in rounds, each of which would
        wait for the end of a pause."""
        is_hidden = current.is_delayed and self._world.nodes <= PAIRWISE_LIMIT + 1
        return choose_pause(current.call.world) if is_hidden else None


class RestChunk(ChunkExchange):
    """The exchanges of a chunk whose rests are stored and added to the agreed weights."""

    def __init__(self, setting: ChunkSetting, outer: OuterMomentum | None) -> None:
        super().__init__(setting)
        self._outer = outer
        self._rest: Array = np.empty(0, np.float32)
        """The change of this rank's shard, and after packing, what was not sent of it. It is kept here, because work
        buffers of the world may be replaced by larger ones before the exchange ends."""

    def keep(self, agreed: Array, squares: Squares | None) -> None:
        self._reserve_delayed_change()
        self._memory.collect(self.chunk, self.delayed_change)

    def begin(self, current: ChunkCall) -> None:
        rest = self._rest = self._memory.take_staging(self.chunk, current.call.world)[1]
        if current.is_delayed:
            np.subtract(self.delayed_change, current.agreed, out=rest)
        else:
            self._memory.collect(self.chunk, rest, current.agreed)
        if current.squares is not None:
            current.squares.change += sum_squares(rest)
        if self._world.cross_comm is None or self.one_stage is None:
            current.call.check_between_nodes()
            return
        codecs, parts = self.one_stage.codecs, self.one_stage.cut(rest)
        self.one_stage.begin(
            current.call, lambda part, row: codecs[part].pack(parts[part], row), current.exchanges, self.chunk.number
        )

    def finish(self, current: ChunkCall) -> None:
        rest, agreed = self._rest, current.agreed
        if self._world.cross_comm is not None:
            change = agreed
            if self._outer is not None:
                change = reserve_workspace(current.call.world, "mean change of weights", self.chunk.shard, np.float32)
                change[:] = 0
            self._add_changes(current, change)
            if self._outer is not None:
                self._outer.step(self.chunk, change)
                agreed += change
        if current.squares is not None:
            current.squares.unsent += sum_squares(rest)
            current.squares.agreed += sum_squares(agreed)
            if self.two_stages is not None and self._world.cross_comm is not None:
                current.squares.change += sum_squares(rest[self.two_stages.segment])
        if current.is_delayed:
            rest += agreed
            np.subtract(rest, self.delayed_change, out=self.delayed_change)
        elif (in_place := self._memory.find_in_place(self.chunk)) is not None:
            for piece, weights in zip(self.chunk.pieces, in_place, strict=True):
                np.add(rest[piece.place], agreed[piece.place], out=weights)
            for parameter in self.chunk.parameters:
                torch.autograd.graph.increment_version(parameter.tensor)
        else:
            staging, shard = self._memory.take_staging(self.chunk)
            np.add(rest, agreed, out=shard)
            self._memory.write(self.chunk, current.call, staging)

    def _add_changes(self, current: ChunkCall, out: Array) -> None:
        """Add the mean change of all nodes to `out`. `_rest` keeps what this node does not send."""
        if self.one_stage is not None:
            codecs, parts = self.one_stage.codecs, self.one_stage.cut(out)
            self.one_stage.finish(
                current.call,
                lambda part, rows: codecs[part].unpack_add(parts[part], rows, self._factors),
                current.exchanges,
                self.chunk.number,
                self._choose_pause(current),
            )
            return
        stages = cast(TwoStage, self.two_stages)
        own = self._rest[stages.segment]
        means = stages.exchange(
            current.call, lambda rows: stages.pack(self._rest, rows), own, self._choose_pause(current)
        )
        with phases.current.timed("select"):
            stages.add(out, means)


class MovedChunk(ChunkExchange):
    """The exchanges of a chunk whose codecs are all `TensorCodec`, and whose weights are moved by what was sent."""

    def __init__(self, setting: ChunkSetting) -> None:
        super().__init__(setting)
        self._codecs = cast(list[TensorCodec], setting.stage.codecs)
        self._packs_at_once = self._memory.device.device is None and all(
            codec.packs_differences_fast for codec in self._codecs
        )
        """True if `keep`, for which the script waits, packs what a delayed exchange sends. Otherwise `keep` stores the
        changes, and the thread of the exchange packs them."""
        self._moves = [factor - (node == self._world.node) for node, factor in enumerate(self._factors)]
        """The factors of what the nodes send in the change of this node's own weights."""
        self._tensors = list(list_tensors_of_ranges(self.chunk, setting.stage.bounds))
        """The tensors of each codec: the numbers of pieces, and which elements of them."""
        self._kept_rows: list[Array] = []
        """What a delayed exchange sends, one row for each codec."""
        self._own: OwnSegment | None = None
        """With two stages, the own segment. Its part of the change is kept from the time when the rows are packed."""
        if self.two_stages is not None:
            me = self._world.node
            self._own = OwnSegment(self.chunk, self.two_stages.segment, self._codecs[me], self._tensors[me])
        self._weights: list[Array] = []
        """The node's own weights, one array for each piece, while an exchange that is not delayed is under way."""
        self._is_in_place = False
        """True if these are the parameters themselves."""
        self._agreed: list[Array] = []
        """The agreed weights, one array for each piece, while an exchange is under way."""
        self._staging: Array = np.empty(0, np.float32)
        """The work buffer that holds the node's own weights, if they are not in place."""
        self._rest: list[Array] = []
        """The change of the weights, one array for each piece, and later, what was not sent of it. Empty if the
        exchange is not measured, unless its thread packs the change."""

    def keep(self, agreed: Array, squares: Squares | None) -> None:
        self._reserve_delayed_change()
        weights, agreed_pieces = self._memory.read(self.chunk), cut(agreed, self.chunk)
        if squares is not None or not self._packs_at_once:
            self._subtract_agreed(weights, agreed_pieces, self.delayed_change)
        if squares is not None:
            squares.change += sum(map(sum_squares, self._rest))
        if self._packs_at_once:
            if not self._kept_rows:
                self._kept_rows = [np.zeros(codec.row_bytes, np.uint8) for codec in self._codecs]
            for number, row in enumerate(self._kept_rows):
                if not self._is_own(number):
                    self._pack(number, weights, agreed_pieces, row)
            if self._own is not None:
                self._own.note_difference(weights, agreed_pieces)

    def begin(self, current: ChunkCall) -> None:
        self._agreed = cut(current.agreed, self.chunk)
        if not current.is_delayed:
            self._weights = self._take_weights()
        if self._world.cross_comm is None:
            current.call.check_between_nodes()
            return
        if current.squares is not None and not current.is_delayed:
            name = f"change of weights {self.chunk.number % 2}"
            buffer = reserve_workspace(current.call.world, name, self.chunk.shard, np.float32)
            self._subtract_agreed(self._weights, self._agreed, buffer)
            current.squares.change += sum(map(sum_squares, self._rest))
        if self.one_stage is None:
            current.call.check_between_nodes()
        else:
            self.one_stage.begin(
                current.call,
                lambda part, row: self._pack_or_take(current, part, row),
                current.exchanges,
                self.chunk.number,
            )

    def finish(self, current: ChunkCall) -> None:
        if self._world.cross_comm is not None:
            self._receive(current)
        if current.squares is not None:
            current.squares.agreed += sum_squares(current.agreed)
        self._weights, self._agreed, self._rest = [], [], []
        if current.is_delayed:
            return
        if self._is_in_place:
            for parameter in self.chunk.parameters:
                torch.autograd.graph.increment_version(parameter.tensor)
        else:
            self._memory.write(self.chunk, current.call, self._staging)

    def _take_weights(self) -> list[Array]:
        """Return the node's own weights, one array for each piece: where they are, or in this rank's shard of the work
        buffer."""
        in_place = self._memory.find_in_place(self.chunk)
        self._is_in_place = in_place is not None
        if in_place is not None:
            return in_place
        self._staging, shard = self._memory.take_staging(self.chunk)
        self._memory.collect(self.chunk, shard)
        return cut(shard, self.chunk)

    def _subtract_agreed(self, weights: Sequence[Array], agreed: Sequence[Array], buffer: Array) -> None:
        """Write the changes of the weights into `_rest`, which becomes a part of `buffer`."""
        self._rest = cut(buffer, self.chunk)
        for own, common, change in zip(weights, agreed, self._rest, strict=True):
            np.subtract(own, common, out=change)

    def _pack(self, number: int, weights: Sequence[Array], agreed: Sequence[Array], row: Array) -> None:
        tensors = self._tensors[number]
        self._codecs[number].pack_differences(select(weights, tensors), select(agreed, tensors), row)

    def _pack_or_take(self, current: ChunkCall, number: int, row: Array) -> None:
        """Write what this node sends with a codec into `row`."""
        if not current.is_delayed:
            self._pack(number, self._weights, self._agreed, row)
        elif self._packs_at_once:
            row[:] = self._kept_rows[number]
        else:
            self._codecs[number].pack_tensors(select(self._rest, self._tensors[number]), row)

    def _receive(self, current: ChunkCall) -> None:
        """Receive what all nodes have sent, and add it."""
        moved = cut(self.delayed_change, self.chunk) if current.is_delayed else self._weights
        if self.one_stage is not None:

            def add(part: int, rows: list[Array]) -> None:
                own = self._world.node
                self._add(current, part, moved, rows[own], (rows, self._factors), (rows, self._moves))

            self.one_stage.finish(current.call, add, current.exchanges, self.chunk.number, self._choose_pause(current))
            return
        assert self.two_stages is not None
        assert self._own is not None
        self._receive_in_two_stages(current, self.two_stages, self._own, moved)

    def _receive_in_two_stages(
        self, current: ChunkCall, stages: TwoStage, own: OwnSegment, moved: Sequence[Array]
    ) -> None:
        sent: list[Array] = []

        def pack(rows: Sequence[Array]) -> None:
            sent.extend(rows)
            for number, row in enumerate(rows):
                if not self._is_own(number):
                    self._pack_or_take(current, number, row)

        if not current.is_delayed:
            own.note_difference(self._weights, self._agreed)
        elif not self._packs_at_once:
            own.note_change(self._rest)
        rest = own.copy_change()
        means = stages.exchange(current.call, pack, rest, self._choose_pause(current))
        with phases.current.timed("select"):
            for number, (mean, row) in enumerate(zip(means, sent, strict=True)):
                if not self._is_own(number):
                    self._add(current, number, moved, row, ([mean], [1.0]), ([mean, row], [1.0, -1.0]))
            if current.squares is not None:
                of_rest = sum_squares(rest)
                current.squares.unsent += of_rest
                current.squares.change += of_rest
            own.move(self._agreed, moved, current.is_delayed, rest, means[self._world.node])

    def _is_own(self, number: int) -> bool:
        """Return True if this is the number of the own segment. Nothing is sent of it."""
        return self._own is not None and number == self._world.node

    def _add(
        self, current: ChunkCall, number: int, moved: Sequence[Array], sent: Array, mean: _Sum, move: _Sum
    ) -> None:
        """Add `mean` to the agreed weights of the tensors of a codec, and `move` to `moved`: the node's own weights or
        the delayed change, one array for each piece. `sent` is the row that this node has sent."""
        codec, tensors = self._codecs[number], self._tensors[number]
        codec.unpack_add_tensors(select(self._agreed, tensors), *mean)
        if self._rest and current.squares is not None:
            rest = select(self._rest, tensors)
            if not current.is_delayed or self._packs_at_once:
                codec.unpack_add_tensors(rest, [sent], [-1.0])
            current.squares.unsent += sum(map(sum_squares, rest))
        moved_tensors = select(moved, tensors)
        if current.is_delayed:
            for change in moved_tensors:
                change[:] = 0  # it held the change of the weights until here
        codec.unpack_add_tensors(moved_tensors, *move)
