"""All-reduces and all-gathers: among few ranks in one round, in which all send to all, and among many in few rounds
(Bruck et al., "Efficient algorithms for all-to-all communications in multiport message-passing systems", 1997).

`algorithms.cost.list_rounds` has the rounds. The array has a segment for each rank. In an all-gather, a rank holds the
segments from its own on, around the circle of ranks; in each round, partners at certain distances send it those that
follow. A reduce-scatter is the same backwards: a rank sends its partial sums of segments to their partners, adds up
what it receives, and holds fewer segments after each round, in the end its own. All ranks send (ranks - 1) segments in
either, as around a ring, whose messages wait for each other (ranks - 1) times.

The first round of a reduce-scatter carries values of the array. Partial sums, in later rounds, are float32: one of 16
bits would stop growing, because a bfloat16 above 256 stays the same if 1 is added to it.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from topkube import kernels
from topkube.algorithms.cost import list_rounds, sends_directly
from topkube.arrays import Array, as_bytes

Exchange = Iterator[Any]
"""Yields what it waits for: a list of MPI requests, of messages of `world.links`, or of marks in the stream of a device
(collectives/device/memory.py); or a reduction of `world.links`."""


def runs_compiled(comm: Any) -> bool:
    """Return True if compiled code carries out sums over `comm` as a whole: between few ranks over `Links`, not over a
    communicator of MPI."""
    return sends_directly(comm.size) and hasattr(comm, "begin_reduction")


def all_reduce(
    comm: Any, x: Array, buffer: Array, tag: int, report_finite: Callable[[bool], None], scale: float = 1.0
) -> Exchange:
    """Replace x by the sum over `comm` times `scale`, computed in float32: among few ranks in their order, among many
    from round to round. All ranks receive the same bits.

    `buffer`, of x's type, has `count_buffer_elements`. `report_finite` is called with True if this rank's segment is
    finite.
    """
    if runs_compiled(comm):
        yield from _reduce_compiled(comm, x, buffer, tag, report_finite, scale, is_gathered=True)
        return
    yield from reduce_scatter(comm, x, buffer, tag, report_finite, scale)
    yield from all_gather(comm, x, tag)


def reduce_scatter(
    comm: Any, x: Array, buffer: Array, tag: int, report_finite: Callable[[bool], None], scale: float = 1.0
) -> Exchange:
    """Reduce this rank's segment of x (`find_own_segment`): the first half of `all_reduce`."""
    if runs_compiled(comm):
        yield from _reduce_compiled(comm, x, buffer, tag, report_finite, scale, is_gathered=False)
        return
    reduce = _reduce_in_one_round if sends_directly(comm.size) else _reduce_in_rounds
    yield from reduce(comm, x, buffer, tag, scale)
    first, last = find_own_segment(comm, x.size)
    report_finite(kernels.is_finite(x[first:last]))


def all_gather(comm: Any, x: Array, tag: int) -> Exchange:
    """Send this rank's segment of x to all: the second half of `all_reduce`."""
    return _gather(comm, x.size, lambda part: as_bytes(x[part]), tag)


def gather_rows(comm: Any, rows: Any, tag: int) -> Exchange:
    """Gather `rows`, (ranks, bytes) of uint8, which may be a tensor on a GPU if MPI takes it: rank r fills row r, every
    rank gets all rows."""
    return _gather(comm, len(rows), lambda part: rows[part].reshape(-1), tag)


def find_own_segment(comm: Any, length: int) -> tuple[int, int]:
    """Return the bounds of the segment that this rank has reduced after a `reduce_scatter` of `length` elements."""
    return length * comm.rank // comm.size, length * (comm.rank + 1) // comm.size


def count_buffer_elements(length: int, ranks: int) -> int:
    """Return how many elements are enough for the buffer of an all-reduce of `length` elements, also around a ring."""
    return -(-length // ranks) * max(ranks - 1, 1)


class Circle:
    """The segments of `length` elements, one for each of `ranks`, around the circle of ranks as rank `me` sees it."""

    def __init__(self, length: int, ranks: int, me: int) -> None:
        self._length, self._ranks, self._me = length, ranks, me

    def cut(self, first: int, count: int) -> Iterator[slice]:
        """Yield the elements of `count` segments from number `first` on, as one slice or two. Segments may be empty."""
        first %= self._ranks
        for start, stop in ((first, min(first + count, self._ranks)), (0, first + count - self._ranks)):
            if start < stop:
                yield slice(self._length * start // self._ranks, self._length * stop // self._ranks)

    def count(self, count: int) -> int:
        """Return how many elements `count` segments have, from this rank's own on."""
        return sum(part.stop - part.start for part in self.cut(self._me, count))


def _reduce_compiled(
    links: Any,
    x: Array,
    buffer: Array,
    tag: int,
    report_finite: Callable[[bool], None],
    scale: float,
    is_gathered: bool,
) -> Exchange:
    """Do what `all_reduce` does, or if `is_gathered` is False `reduce_scatter`: the thread that waits for the messages
    adds them up."""
    reduction = links.begin_reduction(x, buffer, scale, tag, is_gathered)
    yield reduction
    report_finite(reduction.is_finite)


def _reduce_in_one_round(comm: Any, x: Array, buffer: Array, tag: int, scale: float) -> Exchange:
    """Reduce this rank's segment of x, in the order of the ranks."""
    ranks, me, circle = comm.size, comm.rank, Circle(x.size, comm.size, comm.rank)
    own = x[slice(*find_own_segment(comm, x.size))]
    others = [(me + i) % ranks for i in range(1, ranks)]
    arriving = {p: buffer[i * own.size : (i + 1) * own.size] for i, p in enumerate(others)}
    requests = [comm.Irecv(as_bytes(arriving[p]), p, tag) for p in others]
    requests += [comm.Isend(as_bytes(x[part]), p, tag) for p in others for part in circle.cut(p, 1)]
    yield requests
    kernels.sum_(own, [own if p == me else arriving[p] for p in range(ranks)], scale)


def _reduce_in_rounds(comm: Any, x: Array, buffer: Array, tag: int, scale: float) -> Exchange:
    """Reduce this rank's segment of x, from round to round."""
    me, circle = comm.rank, Circle(x.size, comm.size, comm.rank)
    own = x[slice(*find_own_segment(comm, x.size))]
    held: Array | None = None  # the partial sums from the own segment on; at first, x itself
    for reach, partners in reversed(list_rounds(comm.size)):
        if held is not None:
            buffer = np.empty(sum(circle.count(count) for _, count in partners), held.dtype)
        requests, arrived, end = list[Any](), list[Array](), 0
        for distance, count in partners:
            start = end
            for part in circle.cut(me, count):
                incoming = buffer[end : end + part.stop - part.start]
                requests.append(comm.Irecv(as_bytes(incoming), (me - distance) % comm.size, tag))
                end += incoming.size
            arrived.append(buffer[start:end])
        for distance, count in partners:
            position = circle.count(distance)
            for part in circle.cut(me + distance, count):
                length = part.stop - part.start
                outgoing = x[part] if held is None else held[position : position + length]
                requests.append(comm.Isend(as_bytes(outgoing), (me + distance) % comm.size, tag))
                position += length
        yield requests
        is_last = reach == 1
        result = own if is_last else np.empty(circle.count(reach), np.float32)
        # Partners of a round send different numbers of segments, if the ranks are no power of the radix.
        steps = sorted({0, reach, *(count for _, count in partners)})
        for first, last in itertools.pairwise(steps):
            senders = [sums for sums, (_, count) in zip(arrived, partners, strict=True) if count >= last]
            start = circle.count(first)
            for part in circle.cut(me + first, last - first):
                stop = start + part.stop - part.start
                values = x[part] if held is None else held[start:stop]
                inputs = [values, *(sums[start:stop] for sums in senders)]
                kernels.sum_(result[start:stop], inputs, scale if is_last else 1.0)
                start = stop
        held = result


def _gather(comm: Any, length: int, view: Callable[[slice], Any], tag: int) -> Exchange:
    """Send this rank's segment of `length` elements to all, and receive theirs. `view` returns the bytes of some
    elements."""
    me, circle = comm.rank, Circle(length, comm.size, comm.rank)
    for _, partners in list_rounds(comm.size):
        requests = [
            comm.Irecv(view(part), (me + distance) % comm.size, tag)
            for distance, count in partners
            for part in circle.cut(me + distance, count)
        ]
        requests += [
            comm.Isend(view(part), (me - distance) % comm.size, tag)
            for distance, count in partners
            for part in circle.cut(me, count)
        ]
        yield requests
