"""Exchanges between nodes: each is a generator that posts messages, yields while they travel and continues when they
are complete.

Several pieces of an array can therefore be under way at once, driven by one thread that also works inside the node
(`Exchanges`). Sums have a fixed order: by rank in `pairwise`, along the ring in `ring`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from topkube import _kernels, kernels
from topkube.algorithms.cost import PAIRWISE_LIMIT, list_rounds, sends_directly
from topkube.arrays import Array, as_bytes
from topkube.collectives.call import Call, compute_shard_bounds
from topkube.collectives.greetings import LinkGreetings, count_greeted_bytes
from topkube.collectives.rounds import all_gather_in_rounds, reduce_scatter_in_rounds
from topkube.links import are_links_messages
from topkube.telemetry import phases, trace
from topkube.waiting import advance_messages, sleep_until_woken
from topkube.world import World

MORE_BYTES = 16 << 10
"""So many bytes more may pass the link to save a round of messages: 0.13 ms at 1 Gbit/s."""
Exchange = Iterator[Any]
"""Yields what it waits for: a list of MPI requests, of messages of `world.links`, or of marks in the stream of a device
(collectives/device/memory.py); or a reduction of `world.links`."""


@dataclass(frozen=True)
class Place:
    """The place of an exchange among those that are under way at the same time: the tag of its messages, and the number
    of its buffers."""

    tag: int
    buffer: int


class Exchanges:
    """Exchanges that are under way on this rank of `world`. `advance` moves all of them as far as their messages
    allow."""

    def __init__(self, world: World) -> None:
        self._running: dict[int, tuple[Exchange, Any]] = {}
        self._failure: BaseException | None = None
        self._links = world.links

    def start(self, number: int, exchange: Exchange) -> None:
        """Start an exchange under a number of its own."""
        if self._failure is not None:
            raise self._failure
        self._continue(number, exchange if trace.active is None else trace.active.record_exchange(exchange))
        self.advance()

    def advance(self) -> None:
        """Move all exchanges as far as their messages allow. If one of them fails, this call and all later calls raise
        its error: the results of the others may be wrong too."""
        if self._failure is not None:
            raise self._failure
        while self._running:
            if self._links is not None:
                self._links.advance()
            if not self.are_on_links:
                # A test of one exchange moves the messages of all. Only the last of these calls moves nothing.
                advance_messages(self._is_oldest_complete)
            if not self._continue_complete():
                return
        if self._links is not None and self._links.lanes > 1:
            self._links.advance()  # drops the arrays of messages that threads of the links have completed meanwhile

    def _is_oldest_complete(self) -> bool:
        """Return True if the messages of the exchange that started first, of those that are not on links, are
        complete."""
        awaited = (awaited for _, awaited in self._running.values() if not isinstance(awaited, _kernels.TcpMessages))
        return _are_complete(next(awaited))

    def _continue_complete(self) -> bool:
        """Continue each exchange whose messages are complete. Return True if there was one."""
        has_continued = False
        for number, (exchange, awaited) in list(self._running.items()):
            if _are_complete(awaited):
                has_continued = True
                self._continue(number, exchange)
        return has_continued

    def _continue(self, number: int, exchange: Exchange) -> None:
        """Continue an exchange until it awaits something that is not complete, or ends."""
        while True:
            try:
                awaited = next(exchange, None)
            except BaseException as error:
                self._failure = error
                raise
            if awaited is None:
                self._running.pop(number, None)
                return
            if self._links is not None and are_links_messages(awaited):
                awaited = self._links.gather(awaited)
            self._running[number] = (exchange, awaited)
            if not _are_complete(awaited):
                return

    @property
    def are_on_links(self) -> bool:
        """True if all exchanges wait for messages of `world.links`, so that `sleep` knows when to continue."""
        return self._links is not None and all(
            isinstance(awaited, _kernels.TcpMessages) for _, awaited in self._running.values()
        )

    def sleep(self, seconds: float) -> None:
        """Sleep for `seconds`; if all exchanges wait for messages of `world.links`, until some of them are complete."""
        sleep_until_woken(seconds, self._links if self.are_on_links else None)

    @property
    def are_running(self) -> bool:
        """True if an exchange is under way."""
        return bool(self._running)

    def is_running(self, number: int) -> bool:
        """Return True if exchange `number` is under way."""
        return number in self._running

    def finish(self, number: int, call: Call, pause_seconds: float | None = None) -> None:
        """Return when exchange `number`, which belongs to `call`, is complete. `pause_seconds` is that of
        `Call.wait`."""

        def is_complete() -> bool:
            self.advance()
            return number not in self._running

        with phases.current.timed("inter"):
            call.wait(is_complete, pause_seconds, self.sleep if self._links is not None else None)


def _are_complete(awaited: Any) -> bool:
    """Return True if messages are complete, or if a device has passed marks. Does not wait."""
    if isinstance(awaited, _kernels.TcpMessages):
        return awaited.are_complete
    from mpi4py.MPI import Request

    if awaited and not isinstance(awaited[0], Request):
        return all(mark.query() for mark in awaited)
    return bool(Request.Testall(awaited))


def has_reductions(comm: Any) -> bool:
    """Return True if compiled code carries out all-reduces over `comm` as a whole: over `Links`, not over a
    communicator of MPI."""
    return hasattr(comm, "begin_reduction")


def pairwise_all_reduce(
    comm: Any,
    x: Array,
    buffer: Array,
    tag: int,
    report_finite: Callable[[bool], None],
    scale: float = 1.0,
) -> Exchange:
    """Replace x by the sum over `comm` times `scale`: each rank reduces one segment, in rank order and float32, and
    sends it to all.

    `buffer` (x's type) receives (ranks - 1) segments. `report_finite` is called with True if this rank's segment is
    finite.
    """
    if has_reductions(comm):
        yield from _reduce_on_links(comm, x, buffer, tag, report_finite, scale, is_gathered=True)
        return
    yield from pairwise_reduce_scatter(comm, x, buffer, tag, report_finite, scale)
    yield from pairwise_all_gather(comm, x, tag)


def _reduce_on_links(
    links: Any,
    x: Array,
    buffer: Array,
    tag: int,
    report_finite: Callable[[bool], None],
    scale: float,
    is_gathered: bool,
) -> Exchange:
    """Do what `pairwise_all_reduce` does, or if `is_gathered` is False `pairwise_reduce_scatter`, in compiled code: the
    thread that waits for the messages adds them up."""
    reduction = links.begin_reduction(x, buffer, scale, tag, is_gathered)
    yield reduction
    report_finite(reduction.is_finite)


def pairwise_reduce_scatter(
    comm: Any,
    x: Array,
    buffer: Array,
    tag: int,
    report_finite: Callable[[bool], None],
    scale: float = 1.0,
) -> Exchange:
    """Reduce this rank's segment of x (`find_own_segment`): the first half of `pairwise_all_reduce`."""
    if has_reductions(comm):
        yield from _reduce_on_links(comm, x, buffer, tag, report_finite, scale, is_gathered=False)
        return
    ranks, me = comm.size, comm.rank
    bounds = compute_shard_bounds(x.size, ranks)
    segments = [x[bounds[i] : bounds[i + 1]] for i in range(ranks)]
    own = segments[me]
    others = [(me + i) % ranks for i in range(1, ranks)]
    arriving = {p: buffer[i * own.size : (i + 1) * own.size] for i, p in enumerate(others)}
    requests = [comm.Irecv(as_bytes(arriving[p]), p, tag) for p in others]
    requests += [comm.Isend(as_bytes(segments[p]), p, tag) for p in others]
    yield requests
    kernels.sum_(own, [own if p == me else arriving[p] for p in range(ranks)], scale)
    report_finite(kernels.is_finite(own))


def pairwise_all_gather(comm: Any, x: Array, tag: int) -> Exchange:
    """Send this rank's segment of x to all: the second half of `pairwise_all_reduce`."""
    ranks, me = comm.size, comm.rank
    bounds = compute_shard_bounds(x.size, ranks)
    segments = [x[bounds[i] : bounds[i + 1]] for i in range(ranks)]
    others = [(me + i) % ranks for i in range(1, ranks)]
    requests = [comm.Irecv(as_bytes(segments[p]), p, tag) for p in others]
    requests += [comm.Isend(as_bytes(segments[me]), p, tag) for p in others]
    yield requests


def all_reduce(
    comm: Any,
    x: Array,
    buffer: Array,
    tag: int,
    report_finite: Callable[[bool], None],
    scale: float = 1.0,
) -> Exchange:
    """Replace x by the sum over `comm` times `scale`, as `pairwise_all_reduce` describes; among many ranks in several
    rounds (rounds.py), whose sums have another order. All ranks receive the same bits."""
    if sends_directly(comm.size):
        yield from pairwise_all_reduce(comm, x, buffer, tag, report_finite, scale)
        return
    yield from reduce_scatter_in_rounds(comm, x, buffer, tag, report_finite, scale)
    yield from all_gather_in_rounds(comm, x, tag)


def reduce_scatter(
    comm: Any,
    x: Array,
    buffer: Array,
    tag: int,
    report_finite: Callable[[bool], None],
    scale: float = 1.0,
) -> Exchange:
    """Reduce this rank's segment of x (`find_own_segment`): the first half of `all_reduce`."""
    reduce = pairwise_reduce_scatter if sends_directly(comm.size) else reduce_scatter_in_rounds
    return reduce(comm, x, buffer, tag, report_finite, scale)


def all_gather(comm: Any, x: Array, tag: int) -> Exchange:
    """Send this rank's segment of x to all: the second half of `all_reduce`."""
    return (pairwise_all_gather if sends_directly(comm.size) else all_gather_in_rounds)(comm, x, tag)


def greeted_all_reduce(
    call: Call, x: Array, tag: int, report_finite: Callable[[bool], None], scale: float = 1.0
) -> Generator[Any, None, None]:
    """Replace x by its sum over the ranks of `cross_comm` times `scale`, as `pairwise_all_reduce` does, with the same
    bits. The greetings of `call` carry the values: segments, or all of x if that is hardly more, because the sums then
    need no messages."""
    greetings, call.greets_with_values = call.greetings, False
    assert greetings is not None
    ranks, me = call.world.cross_comm.size, call.world.cross_comm.rank
    is_in_one_round = _takes_one_round(x.nbytes, ranks)
    if isinstance(greetings, LinkGreetings):
        reduction = greetings.reduce(x, tag, scale, is_in_one_round)
        try:
            yield reduction
        finally:
            if not reduction.are_complete:  # an error ended the wait
                greetings.abandon()
        call.compare_greetings()
        report_finite(reduction.is_finite)
        return
    if is_in_one_round:
        parts = [x] * ranks
    else:
        bounds = compute_shard_bounds(x.size, ranks)
        parts = [x[bounds[i] : bounds[i + 1]] for i in range(ranks)]
    greetings.send_values(parts)
    yield from call.await_greetings()
    report_finite(greetings.add_up(parts[me], scale))
    if not is_in_one_round:
        yield from pairwise_all_gather(call.world.cross_comm, x, tag)


def finish_greeted(call: Call, x: Array, scale: float) -> bool:
    """Do what `greeted_all_reduce` does, and return when it is done: True if this rank's part is finite. No other
    exchange may be under way."""
    finite: list[bool] = []
    exchange = greeted_all_reduce(call, x, 0, finite.append, scale)
    with contextlib.closing(exchange):
        for awaited in exchange if trace.active is None else trace.active.record_exchange(exchange):
            call.wait_for(awaited)
    return finite[0]


def count_bytes_with_greetings(x: Array, ranks: int) -> int:
    """Return how many bytes a rank sends in `greeted_all_reduce`, without the hashes."""
    one_round = (ranks - 1) * x.nbytes
    return one_round if _takes_one_round(x.nbytes, ranks) else 2 * one_round // ranks


def _takes_one_round(nbytes: int, ranks: int) -> bool:
    """Return True if the ranks send all of an array of `nbytes` to each other, and not segments and then sums."""
    more_bytes = (ranks - 1) * nbytes * (ranks - 2) // ranks
    return more_bytes <= MORE_BYTES and nbytes <= count_greeted_bytes(ranks)


def narrow_all_reduce(
    comm: Any,
    x: Array,
    narrow: Array,
    buffer: Array,
    tag: int,
    report_finite: Callable[[bool], None],
    scale: float = 1.0,
) -> Exchange:
    """Replace x (float32) by the sum over `comm` times `scale`, sent in the 16-bit type of `narrow` and `buffer`.

    `narrow` has x's length, `buffer` is as in `pairwise_all_reduce`. Each rank's x times `scale` is rounded once, the
    sum of the rounded values is computed in float32 and rounded once: all ranks receive the same bits.
    """
    kernels.sum_(narrow, [x], scale)
    yield from all_reduce(comm, narrow, buffer, tag, report_finite)
    kernels.cast_(x, narrow)


def ring_all_reduce(
    comm: Any,
    x: Array,
    buffer: Array,
    tag: int,
    report_finite: Callable[[bool], None],
    scale: float = 1.0,
) -> Exchange:
    """Replace x by the sum over `comm` times `scale`, in two rounds of a ring (Patarasuk & Yuan, "Bandwidth optimal
    all-reduce algorithms for clusters of workstations", 2009). `buffer` holds one segment. Partial sums travel in the
    type that `choose_partial_sum_type` returns."""
    yield from ring_reduce_scatter(comm, x, buffer, tag, report_finite, scale)
    yield from ring_all_gather(comm, x, tag)


def ring_reduce_scatter(
    comm: Any,
    x: Array,
    buffer: Array,
    tag: int,
    report_finite: Callable[[bool], None],
    scale: float = 1.0,
) -> Exchange:
    """Reduce this rank's segment of x (`find_own_segment`): the first round of `ring_all_reduce`."""
    ranks, me = comm.size, comm.rank
    segments = _list_ring_segments(x, ranks)
    right, left = (me + 1) % ranks, (me - 1) % ranks
    if choose_partial_sum_type(ranks, x.dtype) != x.dtype:
        yield from _wide_ring_reduce_scatter(comm, segments, tag, scale)
        report_finite(kernels.is_finite(segments[me + 1]))
        return
    for step in range(ranks - 1):
        outgoing, own = segments[me - step], segments[me - step - 1]
        arriving = buffer[: own.size]
        yield [comm.Irecv(as_bytes(arriving), left, tag), comm.Isend(as_bytes(outgoing), right, tag)]
        kernels.sum_(own, [arriving, own], scale if step == ranks - 2 else 1.0)
    report_finite(kernels.is_finite(segments[me + 1]))


def _wide_ring_reduce_scatter(comm: Any, segments: Sequence[Array], tag: int, scale: float) -> Exchange:
    """The first round of a ring for 16-bit segments, with partial sums of float32. The result is rounded once."""
    ranks, me = comm.size, comm.rank
    right, left = (me + 1) % ranks, (me - 1) % ranks
    longest = max(segment.size for segment in segments)
    outgoing, arriving, own = (np.empty(longest, np.float32) for _ in range(3))
    kernels.cast_(outgoing[: segments[me].size], segments[me])
    for step in range(ranks - 1):
        sent, segment = segments[me - step].size, segments[me - step - 1]
        arrived, values = arriving[: segment.size], own[: segment.size]
        yield [comm.Irecv(as_bytes(arrived), left, tag), comm.Isend(as_bytes(outgoing[:sent]), right, tag)]
        kernels.cast_(values, segment)
        if step == ranks - 2:
            kernels.sum_(segment, [arrived, values], scale)
        else:
            kernels.sum_(outgoing[: segment.size], [arrived, values])


def choose_partial_sum_type(ranks: int, dtype: np.dtype[Any]) -> np.dtype[Any]:
    """Return the type in which partial sums travel around a ring. Every rank rounds them once. With many ranks, a
    partial sum of 16 bits would stop growing: a bfloat16 above 256 stays the same if 1 is added to it."""
    return np.dtype(np.float32) if ranks > PAIRWISE_LIMIT and dtype.itemsize == 2 else dtype


def count_ring_bytes(x: Array, ranks: int) -> int:
    """Return how many bytes a rank sends in `ring_all_reduce`."""
    return (ranks - 1) * x.size * (choose_partial_sum_type(ranks, x.dtype).itemsize + x.itemsize) // ranks


def ring_all_gather(comm: Any, x: Array, tag: int) -> Exchange:
    """Send this rank's segment of x around the ring: the second round of `ring_all_reduce`."""
    ranks, me = comm.size, comm.rank
    segments = _list_ring_segments(x, ranks)
    right, left = (me + 1) % ranks, (me - 1) % ranks
    for step in range(ranks - 1):
        outgoing, incoming = segments[me + 1 - step], segments[me - step]
        yield [comm.Irecv(as_bytes(incoming), left, tag), comm.Isend(as_bytes(outgoing), right, tag)]


def _list_ring_segments(x: Array, ranks: int) -> list[Array]:
    """Return the segments of x, twice in a row: numbers from -2 * ranks to 2 * ranks - 1 name a segment."""
    bounds = compute_shard_bounds(x.size, ranks)
    return [x[bounds[i % ranks] : bounds[i % ranks + 1]] for i in range(2 * ranks)]


def find_own_segment(comm: Any, length: int) -> tuple[int, int]:
    """Return the bounds of the segment that this rank has reduced after a `reduce_scatter` of `length` elements."""
    return length * comm.rank // comm.size, length * (comm.rank + 1) // comm.size


def count_buffer_elements(length: int, ranks: int) -> int:
    """Return how many elements are enough for the buffer of a pairwise or ring all-reduce of `length` elements."""
    return -(-length // ranks) * max(ranks - 1, 1)


def exchange_rows(comm: Any, sent: Sequence[Array], received: Sequence[Array], tag: int) -> Exchange:
    """Send `sent[p]` to rank p and receive `received[p]` (uint8) from it, for all other ranks. Each rank has at most
    PAIRWISE_LIMIT partners at a time. An array of `sent` may occur more than once."""
    ranks, me = comm.size, comm.rank
    for first in range(1, ranks, PAIRWISE_LIMIT):
        distances = range(first, min(first + PAIRWISE_LIMIT, ranks))
        requests = [comm.Irecv(received[(me - d) % ranks], (me - d) % ranks, tag) for d in distances]
        yield requests + [comm.Isend(sent[(me + d) % ranks], (me + d) % ranks, tag) for d in distances]


def gather_rows(comm: Any, rows: Array, tag: int) -> Exchange:
    """Gather `rows`, (ranks, bytes) of uint8, which may be a tensor on a GPU if MPI takes it: rank r fills row r, every
    rank gets all rows."""
    me = comm.rank
    for _, partners in list_rounds(comm.size):
        requests = [
            comm.Irecv(part, (me + distance) % comm.size, tag)
            for distance, count in partners
            for part in _cut_rows(rows, me + distance, count)
        ]
        requests += [
            comm.Isend(part, (me - distance) % comm.size, tag)
            for distance, count in partners
            for part in _cut_rows(rows, me, count)
        ]
        yield requests


def _cut_rows(rows: Any, first: int, count: int) -> Iterator[Any]:
    """Yield `count` rows from number `first` on, around the circle of ranks, in one part or two."""
    first %= len(rows)
    for start, stop in ((first, min(first + count, len(rows))), (0, first + count - len(rows))):
        if start < stop:
            yield rows[start:stop].reshape(-1)


def gather_rows_around(comm: Any, rows: Array, tag: int) -> Exchange:
    """Do what `gather_rows` does. With many ranks, each sends to the next one only: if a node has several ranks that
    follow each other, each row enters the node once."""
    if sends_directly(comm.size):
        yield from gather_rows(comm, rows, tag)
        return
    ranks, me = comm.size, comm.rank
    right, left = (me + 1) % ranks, (me - 1) % ranks
    for step in range(ranks - 1):
        sent, received = rows[(me - step) % ranks], rows[(me - step - 1) % ranks]
        yield [comm.Irecv(received, left, tag), comm.Isend(sent, right, tag)]
