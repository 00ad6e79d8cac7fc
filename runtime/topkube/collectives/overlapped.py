"""All-reduces that overlap: dense ones in pieces, and compressed ones in two stages, as a whole. Several pieces travel
between nodes at the same time, of one array or of arrays that follow each other.

Every rank works in the same order inside its node, because the ranks of a node match their stages by order: piece i is
reduced, its exchange starts, then piece i - UNDER_WAY is gathered. A rank that is alone on its node has no such stages,
so its pieces end as soon as their messages have arrived.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from topkube.algorithms.cost import count_wider_bytes
from topkube.arrays import BFLOAT16, Array
from topkube.collectives.call import Call, find_own_shard, reserve_workspace
from topkube.collectives.exchange import (
    Exchanges,
    Place,
    count_bytes_with_greetings,
    greeted_all_reduce,
    narrow_all_reduce,
)
from topkube.collectives.greetings import count_greeted_bytes
from topkube.collectives.pauses import choose_pause, note_rate
from topkube.collectives.rounds import Exchange, all_reduce, count_buffer_elements
from topkube.telemetry import phases
from topkube.waiting import CHECK_SECONDS, sleep_until_woken
from topkube.world import World

UNDER_WAY = 3
"""Pieces between nodes at the same time."""
PIECES = 8
"""An array has at least this many pieces, if they are not too small: the last piece of an array has nothing to hide
behind."""
LEAST_PIECE_BYTES, MOST_PIECE_BYTES = 2 << 20, 8 << 20
"""The bounds of the size of a piece. Smaller pieces cost more time than they hide."""
TAGS = 30_000
"""The tags of pieces count up to this number, and start again. MPI has at least 32,767."""
_MOST_ITEM_BYTES = 4
_NARROW = {"bf16": BFLOAT16, "fp16": np.dtype(np.float16)}


def split(x: Array) -> list[Array]:
    """Return the pieces of `x`, the same on all ranks."""
    size = _choose_piece_bytes(x.nbytes) // x.itemsize
    return [x[start : start + size] for start in range(0, max(x.size, 1), size)]


def count_pieces(nbytes: int) -> int:
    """Return the number of pieces of an array of `nbytes` bytes."""
    return max(1, math.ceil(nbytes / _choose_piece_bytes(nbytes)))


def _choose_piece_bytes(nbytes: int) -> int:
    return max(LEAST_PIECE_BYTES, min(MOST_PIECE_BYTES, nbytes // PIECES))


def is_narrow(world: World, wire: str) -> bool:
    """Return True if float32 values travel between nodes in the 16-bit type `wire`. Nothing travels on a single
    node."""
    return wire in _NARROW and world.nodes > 1


def has_stages_inside(world: World) -> bool:
    """Return True if a node has several ranks, which reduce inside the node first."""
    return world.largest_node > 1


def fits_in_greeting(world: World, nbytes: int) -> bool:
    """Return True if the greetings of a call carry the values of an array of `nbytes`: it has one piece, and the
    segments of its shards are small."""
    segment_bytes = nbytes // (world.shards * world.nodes) + 2 * _MOST_ITEM_BYTES  # rounded up twice
    return nbytes < LEAST_PIECE_BYTES and segment_bytes <= count_greeted_bytes(world.nodes)


@dataclass(eq=False)
class Piece:
    """A piece whose exchange between nodes has started. `is_greeted` is True if greetings carry its values: waits for
    it then check often, because the link needs little time for it."""

    call: Call
    number: int
    values: Array
    finished: Callable[[], None] | None
    is_greeted: bool


class OverlappedAllReduce:
    """All-reduces over several nodes, one thread of one rank. `begin` and `begin_exchange` take arrays one after
    another. `advance` moves what is under way without waiting; `finish` waits for it."""

    rounds = 2
    """How many times an exchange sends all segments but one: a reduce-scatter and an all-gather."""

    def __init__(self, world: World) -> None:
        self.world = world
        self._under_way: deque[Piece] = deque()
        self._exchanges = Exchanges(world)
        self._finite = True
        self._number = 0
        self._busy_since, self._busy_bytes, self._selecting_before = 0.0, 0, 0.0

    def begin(
        self,
        call: Call,
        array: Array,
        factor: float,
        finished: Callable[[], None] | None = None,
        wire: str = "fp32",
    ) -> None:
        """Start the reduction of `array`, in place, to the sum times `factor`. `finished` is called in this thread when
        the result is there, at the latest in `finish`. `wire` is the format of float32 values between nodes
        (`is_narrow`). Returns when at most UNDER_WAY pieces are under way."""
        sent_type = _NARROW[wire] if array.dtype == np.float32 and is_narrow(self.world, wire) else array.dtype
        pieces = split(array)
        for piece in pieces:
            scale, is_greeted = self._reduce_inside(call, piece, factor), call.greets_with_values
            self._start(call, piece, scale, sent_type)
            finished_here = finished if piece is pieces[-1] else None
            self._append(Piece(call, self._number, piece, finished_here, is_greeted))

    @property
    def place(self) -> Place:
        """The place of the exchange that begins next."""
        return Place(self._number % TAGS, self._number % (UNDER_WAY + 1))

    def begin_exchange(
        self, call: Call, exchange: Exchange | None, sent: int, array: Array, finished: Callable[[], None]
    ) -> None:
        """Start `exchange`, made for `place`, in which this rank sends `sent` bytes to other nodes. It puts the result
        into this rank's shard of `array`, which was reduced inside the node; a rank without a shard has no exchange.
        `finished` is called, as for `begin`, when the node has gathered `array`. Returns when at most UNDER_WAY pieces
        are under way."""
        if exchange is not None:
            self._run(exchange, sent)
        self._append(Piece(call, self._number, array, finished, False))

    def _append(self, piece: Piece) -> None:
        self._under_way.append(piece)
        self._number += 1
        if len(self._under_way) > UNDER_WAY:
            self._finish_oldest(choose_pause(self.world))

    def advance(self) -> float | None:
        """Move what is under way as far as messages allow. Return the seconds until the next call should come, None if
        no messages are awaited."""
        self._advance()
        if self.world.local_size == 1:
            while self._under_way and not self._exchanges.is_running(self._under_way[0].number):
                self._finish_oldest(0.0)
        return self._choose_pause() if self._exchanges.are_running else None

    def _choose_pause(self) -> float:
        """Return the seconds until the next check. If messages wake this thread, the time between checks for errors."""
        if not self._is_woken():
            return choose_pause(self.world)
        self.world.control.has_seen_roll_call()  # a call of MPI, which may still have to send the end of an agreement
        return CHECK_SECONDS

    def _is_woken(self) -> bool:
        """Return True if this thread waits for nothing but messages that wake it."""
        return self._exchanges.are_on_links

    def _sleep(self, seconds: float) -> None:
        sleep_until_woken(seconds, self.world.links if self._is_woken() else None)

    def finish(self) -> None:
        """Return when nothing is under way. Raises CollectiveTimeout after the world's deadline."""
        while self._under_way:
            is_greeted = self._under_way[0].is_greeted
            self._finish_oldest(None if is_greeted else choose_pause(self.world, delays_step=True))

    def take_finite(self) -> bool:
        """Return True if everything that this rank saw since the last call was finite."""
        finite, self._finite = self._finite, True
        return finite

    def note_finite(self, finite: bool) -> None:
        """Note if something that this rank saw was finite."""
        self._finite = self._finite and finite

    def _reduce_inside(self, call: Call, piece: Array, scale: float) -> float:
        """Reduce the piece inside the node. Return the factor that is left for the exchange between nodes: a rank alone
        on its node saves a pass over the piece."""
        if not has_stages_inside(self.world):
            return scale
        self.note_finite(call.reduce_scatter(piece, scale))
        return 1.0

    def _start(self, call: Call, piece: Array, scale: float, sent_type: np.dtype[Any]) -> None:
        """Start the exchange of this rank's shard of the piece with its equals on other nodes."""
        world = self.world
        if world.cross_comm is None:
            return
        first, last = find_own_shard(world, piece.size)
        shard = piece[first:last]
        length = count_buffer_elements(shard.size, world.nodes)
        # Each piece that is under way uses a buffer of its own.
        buffer = reserve_workspace(world, f"shard {self.place.buffer}", length, sent_type)
        if call.greets_with_values:
            exchange: Exchange = greeted_all_reduce(call, shard, self.place.tag, self.note_finite, scale)
            sent = count_bytes_with_greetings(shard, world.nodes)
        else:
            exchange = _exchange_after_greeting(call, self._exchange(world.cross_links, shard, buffer, scale))
            sent = self.rounds * sent_type.itemsize * (world.nodes - 1) * shard.size // world.nodes
            sent += int(count_wider_bytes(sent_type.itemsize, shard.size, world.nodes))
        self._run(exchange, sent)

    def _run(self, exchange: Exchange, sent: int) -> None:
        """Start an exchange between nodes, in which this rank sends `sent` bytes, under the present number."""
        phases.current.sent(inter=sent)
        if not self._exchanges.are_running:
            self._busy_since, self._busy_bytes = time.perf_counter(), 0
            self._selecting_before = phases.current.total("select")
        self._busy_bytes += sent
        self._exchanges.start(self._number, exchange)

    def _exchange(self, comm: Any, shard: Array, buffer: Array, scale: float) -> Exchange:
        """Return the exchange of the shard with its equals, in the type of `buffer`."""
        tag = self.place.tag
        if buffer.dtype != shard.dtype:
            narrow = reserve_workspace(self.world, f"narrow shard {self.place.buffer}", shard.size, buffer.dtype)
            return narrow_all_reduce(comm, shard, narrow, buffer, tag, self.note_finite, scale)
        return all_reduce(comm, shard, buffer, tag, self.note_finite, scale)

    def _advance(self) -> None:
        was_running = self._exchanges.are_running
        self._exchanges.advance()
        if was_running and not self._exchanges.are_running:
            seconds = time.perf_counter() - self._busy_since
            selecting = phases.current.total("select") - self._selecting_before  # counts as a phase of its own
            phases.current.add("inter", max(seconds - selecting, 0.0))
            note_rate(self.world, self._busy_bytes, seconds)

    def _finish_oldest(self, pause: float | None) -> None:
        piece = self._under_way[0]

        def is_complete() -> bool:
            self._advance()
            return not self._exchanges.is_running(piece.number)

        piece.call.wait(is_complete, pause, self._sleep if self.world.links is not None else None)
        self._under_way.popleft()
        self._end_piece(piece)

    def _end_piece(self, piece: Piece) -> None:
        """Complete a piece whose exchange between nodes has ended."""
        if self.world.local_size > 1:
            piece.call.all_gather(piece.values)
        if piece.finished is not None:
            piece.finished()


def _exchange_after_greeting(call: Call, exchange: Exchange) -> Exchange:
    """Yield the messages of `exchange` after other nodes have shown that they entered the same call."""
    yield from call.await_greetings()
    yield from exchange
