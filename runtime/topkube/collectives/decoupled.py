"""All-reduces in two halves, for DeAR (Zhang et al., "DeAR: Accelerating Distributed Deep Learning with Fine-Grained
All-Reduce Pipelining", 2023): a reduce-scatter now, and the all-gather later, while other work continues.

The first half is that of `OverlappedAllReduce`, piece by piece: the ranks of a node reduce a piece, then each shard is
reduced among equal local ranks, so that every rank holds the sum of its own segment. The second half consists of
messages only, between nodes and inside the node. Ranks need not be at the same point of the program for it: a rank can
wait for an array while another rank computes. The second half has communicators of its own: other collectives may
run before it ends.

A compressed array is one piece, and its algorithm divides the exchange between nodes (halves.py): `int8`, `int4`
and `int3` after the stage that sends to the owners of segments, `hitopk` before its only stage.

First halves alone would leave the link idle while the next array is computed, and the second halves could then take
longer than the work that hides them. So a rank that has nothing to send, because no first half is under way or because
it waits for slower ranks, gathers the piece that was reduced last ("early"). Ranks that are at different points of
backward choose different pieces. A message that a rank sends early waits until its partner gathers the piece too: over
links, a rank sees such messages, and then gathers their pieces first. Early gathers take no place among the later ones,
whose order is the same on all ranks: the first piece that some rank waits for is under way on every rank, so ranks
never wait for each other in a circle.
"""

from __future__ import annotations

import itertools
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from topkube import kernels
from topkube.arrays import Array, as_bytes
from topkube.collectives.call import Call, compute_shard_bounds, find_own_shard, reserve_workspace
from topkube.collectives.exchange import Exchanges
from topkube.collectives.halves import HalvableAllReduce
from topkube.collectives.overlapped import (
    TAGS,
    UNDER_WAY,
    OverlappedAllReduce,
    Piece,
    split,
)
from topkube.collectives.pauses import choose_pause
from topkube.collectives.request import Request
from topkube.collectives.rounds import Exchange, all_gather, find_own_segment, reduce_scatter
from topkube.errors import ArgumentError
from topkube.links import Links
from topkube.telemetry import phases
from topkube.waiting import advance_in_waits
from topkube.world import World

EARLY, EARLY_ALONE = 2, 1
"""The most early gathers at a time that this rank chooses. While one passes its shards inside the node, the link can
carry another. Through MPI, ranks do not see what others gather, and more gathers make it likelier that they have one in
common. A rank alone on its node, over links, begins one only: what two had begun would delay the first half of the next
array, and the end of backward with it."""
_COMMUNICATORS, _USED_BUFFERS, _NEXT_NUMBER = "communicators of gathers", "buffers of gathers", "number of gathers"


class HalvedPiece(NamedTuple):
    """A piece of an array, by its number. `narrow` is this rank's shard in 16 bits if the shard is sent in 16 bits. The
    second half of a compressed piece is `second`, a function of the communicator between nodes (halves.py)."""

    number: int
    values: Array
    narrow: Array | None
    second: Callable[[Any], Exchange] | None = None


@dataclass(eq=False)
class HalvedArray:
    """An array whose reduce-scatter has begun. `ranges` holds the elements [start, stop) that this rank reduces, a
    range for each piece: all ranks together have every element once. It is None if no rank has results before the
    second half. `ungathered` is the number of pieces that are not gathered."""

    call: Call
    ranges: list[tuple[int, int]] | None = field(default_factory=list)
    pieces: list[HalvedPiece] = field(default_factory=list)
    begun: set[int] = field(default_factory=set)
    """The numbers of the pieces whose gather has begun or has its place in the order."""
    ungathered: int = 0

    @property
    def is_gathered(self) -> bool:
        """True if the array holds the whole result."""
        return self.ungathered == 0


class DecoupledAllReduce(OverlappedAllReduce):
    """All-reduces in two halves over several nodes, one thread of one rank. `halve` and `halve_compressed` begin the
    first half of an array; `finish` waits for the first half of all arrays. `gather` begins the second half of the
    pieces that were not gathered early, `finish_gather` waits for it. After the first half, this rank's segments
    (`HalvedArray.ranges`) hold their results. All ranks create it together."""

    rounds = 1

    def __init__(self, world: World) -> None:
        super().__init__(world)
        self._cross, self._node = _find_communicators(world)
        self._narrow: dict[int, Array] = {}
        self._kept_buffers: dict[int, int] = {}
        """The number of the buffer that holds what the second half of a piece sends, by the number of the piece."""
        self._used_buffers: set[int] = world.cache.setdefault(_USED_BUFFERS, set())
        """The numbers of the buffers that this or another object uses."""
        self._gathers = Exchanges(world)
        self._waiting: deque[tuple[HalvedArray, HalvedPiece]] = deque()
        self._gathering: dict[int, HalvedArray] = {}
        self._gathering_since = 0.0
        self._halved_pieces: dict[int, tuple[HalvedArray, HalvedPiece]] = {}
        """The pieces whose first half has begun, by their numbers."""
        self._reduced: list[int] = []
        """The numbers of pieces whose first half has ended, and whose gather has not begun."""
        self._early: set[int] = set()
        self._is_halving = False

    def halve(self, call: Call, array: Array, factor: float, wire: str = "fp32") -> HalvedArray:
        """Begin to reduce `array`, in place, to the sum times `factor`: the arguments of `begin`."""
        halved, ranges = HalvedArray(call), list[tuple[int, int]]()
        number, position = self._take_numbers(len(split(array))), 0
        self.begin(call, array, factor, wire=wire)
        for values in split(array):
            first, last = find_own_shard(self.world, values.size)
            if self._cross is not None:
                start, stop = find_own_segment(self._cross, last - first)
                ranges.append((position + first + start, position + first + stop))
            piece = HalvedPiece(number, values, self._narrow.pop(number, None))
            self._halved_pieces[number] = halved, piece
            halved.pieces.append(piece)
            number, position = number + 1, position + values.size
        halved.ranges, halved.ungathered = ranges, len(halved.pieces)
        self._is_halving = True
        return halved

    def halve_compressed(
        self, all_reduce: HalvableAllReduce, request: Request, reduced: Callable[[], None]
    ) -> HalvedArray:
        """Begin to reduce the array of `request`, in place, as `all_reduce` would run it. `reduced` is called in this
        thread when the first half has ended, at the latest in `finish`: the residual is final then."""
        number = self._take_numbers(1)
        halves = all_reduce.begin_in_halves(self.world, request, self.place, f" halved {self._take_buffer()}")

        def end() -> None:
            self.note_finite(all(map(bool, halves.finite)))
            reduced()

        piece = HalvedPiece(number, request.array, None, halves.second)
        ranges = None if halves.own is None else [halves.own]
        halved = HalvedArray(halves.call, ranges, [piece], ungathered=1)
        self._halved_pieces[number] = halved, piece
        self.begin_exchange(halves.call, halves.first, halves.sent, request.array, end)
        self._is_halving = True
        return halved

    def _take_numbers(self, pieces: int) -> int:
        """Return the number of the next piece. Messages of another object of this world may still be on their way, also
        those of an optimizer that is gone: the pieces of all objects have different numbers, and so different tags."""
        if len(self._halved_pieces) + pieces > TAGS:  # ranks gather in different orders: equal tags would mix up pieces
            raise ArgumentError(
                f"one backward has more than {TAGS:,} pieces, too many for two halves of their exchange",
                cause="the gradients have many gigabytes, or the buckets are very small",
                next_step="leave overlap at backward, or remove bucket_bytes if the script sets it",
            )
        self._number = self.world.cache.get(_NEXT_NUMBER, 0)
        self.world.cache[_NEXT_NUMBER] = self._number + pieces
        return self._number

    def _take_buffer(self) -> int:
        """Return the number of a free buffer for the next piece."""
        kept = next(number for number in itertools.count() if number not in self._used_buffers)
        self._kept_buffers[self._number] = kept
        self._used_buffers.add(kept)
        return kept

    def finish(self) -> None:
        """Return when all first halves have ended. Raises CollectiveTimeout after the world's deadline."""
        super().finish()
        self._is_halving = False

    def gather(self, arrays: Iterable[HalvedArray]) -> None:
        """Begin to gather the results of `arrays`, in their order, the same on all ranks. Called after `finish`. What
        has begun already continues."""
        self._reduced.clear()
        self._halved_pieces.clear()
        for halved in arrays:
            remaining = [piece for piece in halved.pieces if piece.number not in halved.begun]
            halved.begun.update(piece.number for piece in remaining)
            self._waiting.extend((halved, piece) for piece in remaining)
        self._advance_gathers()

    def advance(self) -> float | None:
        """Move what is under way as far as messages allow. Return the seconds until the next call should come, None if
        no messages are awaited."""
        self._advance()
        while self._under_way and not self._exchanges.is_running(self._under_way[0].number):
            self._finish_oldest(0.0)
            self._gather_early()
        self._advance_gathers()
        if not self._exchanges.are_running and not self._gathering:
            return None
        return choose_pause(self.world) if self._may_gather_early else self._choose_pause()

    def _advance(self) -> None:
        super()._advance()
        if self._is_halving:
            self._advance_gathers()
            self._gather_early()

    def _sleep(self, seconds: float) -> None:
        links, is_polled = self.world.links, self._may_gather_early or not self._gathers.are_on_links
        if links is not None and self._is_halving and is_polled and self._exchanges.are_on_links:
            links.wait(choose_pause(self.world))  # neither what others begin to gather nor a message of MPI ends it
        else:
            super()._sleep(seconds)

    @property
    def _may_gather_early(self) -> bool:
        """True if a first half may be under way, and there are pieces whose gather may begin."""
        return self._is_halving and bool(self._reduced)

    def _gather_early(self) -> None:
        """Begin to gather pieces while the link is idle."""
        while self._may_gather_early and (number := self._choose_early()) is not None and self._is_link_idle():
            self._reduced.remove(number)
            halved, piece = self._halved_pieces[number]
            self._early.add(number)
            halved.begun.add(number)
            self._start_gather(halved, piece)

    def _is_link_idle(self) -> bool:
        """Return True if this rank has nothing to send: no first half is under way, or it waits for slower ranks."""
        links = self.world.links
        return not self._under_way or (links is not None and links.has_sent_all())

    def _choose_early(self) -> int | None:
        """Return the number of the piece to gather early: one that another rank has begun to gather, else the one that
        was reduced last. None if enough gathers are under way."""
        whole = [number for number in self._reduced if number in self._halved_pieces]  # `halve` has begun all pieces
        if isinstance(self._cross, Links):
            tags = set(self._cross.list_unawaited_tags())
            for number in whole:
                if number % TAGS in tags:
                    return number
        most = EARLY_ALONE if self.world.local_size == 1 and self.world.links is not None else EARLY
        return whole[-1] if whole and len(self._early) < most else None

    def _is_woken(self) -> bool:
        return super()._is_woken() and self._gathers.are_on_links

    def finish_gather(self, halved: HalvedArray) -> None:
        """Return when the array is gathered. Raises CollectiveTimeout after the world's deadline."""

        def is_complete() -> bool:
            self.advance()
            return halved.is_gathered

        if not halved.is_gathered:
            pause = choose_pause(self.world, delays_step=True)
            halved.call.wait(is_complete, pause, self._sleep if self.world.links is not None else None)

    def finish_gathers(self) -> None:
        """Return when no gather is under way. Raises CollectiveTimeout after the world's deadline."""
        while self._gathering or self._waiting:
            self.finish_gather(next(iter(self._gathering.values())) if self._gathering else self._waiting[0][0])

    def _advance_gathers(self) -> Links | None:
        """Move the gathers as far as messages allow, and start those that wait. Return the links whose messages tell
        when to continue, None if others do too."""
        self._gathers.advance()
        for number in [number for number in self._gathering if not self._gathers.is_running(number)]:
            self._gathering.pop(number).ungathered -= 1
            if number in self._kept_buffers:
                self._used_buffers.discard(self._kept_buffers.pop(number))
            self._early.discard(number)
        while self._waiting and len(self._gathering) - len(self._early) < UNDER_WAY:
            self._start_gather(*self._waiting.popleft())
        if not self._gathering and self._gathering_since:
            phases.current.add("inter", time.perf_counter() - self._gathering_since)
            self._gathering_since = 0.0
            advance_in_waits(None)
        return self.world.links if self._gathers.are_on_links else None

    def _start_gather(self, halved: HalvedArray, piece: HalvedPiece) -> None:
        if not self._gathering_since:
            self._gathering_since = time.perf_counter()
            advance_in_waits(self._advance_gathers)
        self._gathering[piece.number] = halved
        self._gathers.start(piece.number, self._gather(piece))

    def _end_piece(self, piece: Piece) -> None:
        self._reduced.append(piece.number)  # the second half follows later
        if piece.finished is not None:
            piece.finished()

    def _exchange(self, comm: Any, shard: Array, buffer: Array, scale: float) -> Exchange:
        tag = self._number % TAGS
        if buffer.dtype == shard.dtype:
            return reduce_scatter(comm, shard, buffer, tag, self.note_finite, scale)
        name = f"narrow shard halved {self._take_buffer()}"
        narrow = reserve_workspace(self.world, name, shard.size, buffer.dtype)
        self._narrow[self._number] = narrow
        return self._reduce_narrow(comm, shard, narrow, buffer, tag, scale)

    def _reduce_narrow(self, comm: Any, shard: Array, narrow: Array, buffer: Array, tag: int, scale: float) -> Exchange:
        """The first half of `narrow_all_reduce`. This rank's segment of the shard also holds its result."""
        kernels.sum_(narrow, [shard], scale)
        yield from reduce_scatter(comm, narrow, buffer, tag, self.note_finite)
        first, last = find_own_segment(comm, shard.size)
        kernels.cast_(shard[first:last], narrow[first:last])

    def _gather(self, piece: HalvedPiece) -> Exchange:
        """Gather a piece: each shard between nodes, then all shards inside the node."""
        world, tag = self.world, piece.number % TAGS
        first, last = find_own_shard(world, piece.values.size)
        shard, narrow = piece.values[first:last], piece.narrow
        if self._cross is not None and piece.second is not None:
            yield from piece.second(self._cross)
        elif self._cross is not None:
            sent = shard if narrow is None else narrow
            phases.current.sent(inter=(world.nodes - 1) * sent.nbytes // world.nodes)
            yield from all_gather(self._cross, sent, tag)
            if narrow is not None:
                kernels.cast_(shard, narrow)
        if world.local_size > 1:
            yield self._send_inside(piece.values, shard, tag)

    def _send_inside(self, piece: Array, shard: Array, tag: int) -> list[Any]:
        """Send this rank's shard to all ranks of the node, and receive theirs. Return the requests."""
        world = self.world
        bounds = compute_shard_bounds(piece.size, world.shards)
        others = [(world.local_rank + i) % world.local_size for i in range(1, world.local_size)]
        owners = [other for other in others if other < world.shards]
        requests = [self._node.Irecv(as_bytes(piece[bounds[p] : bounds[p + 1]]), p, tag) for p in owners]
        if world.local_rank < world.shards:
            requests += [self._node.Isend(as_bytes(shard), p, tag) for p in others]
            phases.current.sent(intra=shard.nbytes)
        return requests


def _find_communicators(world: World) -> tuple[Any, Any]:
    """Return the communicators of the second half, between nodes (None for surplus ranks) and inside the node. All
    ranks create them together, on first use; the optimizers of a world share them."""
    if _COMMUNICATORS not in world.cache:
        world.enter()
        cross, pairs = None, [world.node_comm.Idup()]
        if world.links is not None:
            cross = world.links.duplicate()
        elif world.cross_comm is not None:
            pairs.append(world.cross_comm.Idup())
        world.wait([request for _, request in pairs], "the communicators of gathers")
        node, *others = [comm for comm, _ in pairs]
        world.handles += [node, *others]
        world.cache[_COMMUNICATORS] = others[0] if others else cross, node
    communicators: tuple[Any, Any] = world.cache[_COMMUNICATORS]
    return communicators
