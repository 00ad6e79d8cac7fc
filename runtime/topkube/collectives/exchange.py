"""Exchanges between nodes: each is a generator that posts messages, yields while they travel and continues when they
are complete. rounds.py and rings.py have those of sums and gathers.

Several pieces of an array can therefore be under way at once, driven by one thread that also works inside the node
(`Exchanges`). Sums have a fixed order: by rank among few ranks, otherwise along the rounds or the ring.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Any

from topkube import _kernels, kernels
from topkube.algorithms.cost import PAIRWISE_LIMIT
from topkube.arrays import Array
from topkube.collectives.call import Call, compute_shard_bounds
from topkube.collectives.greetings import LinkGreetings, count_greeted_bytes
from topkube.collectives.rounds import Exchange, all_gather, all_reduce
from topkube.links import are_links_messages
from topkube.telemetry import phases, trace
from topkube.waiting import advance_messages, sleep_until_woken
from topkube.world import World

MORE_BYTES = 16 << 10
"""So many bytes more may pass the link to save a round of messages: 0.13 ms at 1 Gbit/s."""


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


def greeted_all_reduce(
    call: Call, x: Array, tag: int, report_finite: Callable[[bool], None], scale: float = 1.0
) -> Generator[Any, None, None]:
    """Replace x by its sum over the ranks of `cross_comm` times `scale`, as `rounds.all_reduce` does, with the same
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
        yield from all_gather(call.world.cross_comm, x, tag)


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

    `narrow` has x's length, `buffer` is as in `rounds.all_reduce`. Each rank's x times `scale` is rounded once, the
    sum of the rounded values is computed in float32 and rounded once: all ranks receive the same bits.
    """
    kernels.sum_(narrow, [x], scale)
    yield from all_reduce(comm, narrow, buffer, tag, report_finite)
    kernels.cast_(x, narrow)


def exchange_rows(comm: Any, sent: Sequence[Array], received: Sequence[Array], tag: int) -> Exchange:
    """Send `sent[p]` to rank p and receive `received[p]` (uint8) from it, for all other ranks. Each rank has at most
    PAIRWISE_LIMIT partners at a time. An array of `sent` may occur more than once."""
    ranks, me = comm.size, comm.rank
    for first in range(1, ranks, PAIRWISE_LIMIT):
        distances = range(first, min(first + PAIRWISE_LIMIT, ranks))
        requests = [comm.Irecv(received[(me - d) % ranks], (me - d) % ranks, tag) for d in distances]
        yield requests + [comm.Isend(sent[(me + d) % ranks], (me + d) % ranks, tag) for d in distances]
