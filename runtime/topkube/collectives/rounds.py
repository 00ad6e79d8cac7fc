"""All-reduces and all-gathers among many ranks, in few rounds (Bruck et al., "Efficient algorithms for all-to-all
communications in multiport message-passing systems", 1997).

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
from topkube.algorithms.cost import list_rounds
from topkube.arrays import Array, as_bytes

PARTIAL_SUM_BYTES = 4


class Circle:
    """The segments of an array of `length` elements, one for each of `ranks`, seen from rank `me`: segments around the
    circle of ranks, from a first one on."""

    def __init__(self, length: int, ranks: int, me: int) -> None:
        self.length, self.ranks, self.me = length, ranks, me

    def cut(self, first: int, count: int) -> Iterator[slice]:
        """Yield the elements of `count` segments from number `first` on: one or two slices that are not empty."""
        first %= self.ranks
        for start, stop in ((first, min(first + count, self.ranks)), (0, first + count - self.ranks)):
            elements = slice(self.length * start // self.ranks, self.length * stop // self.ranks)
            if start < stop and elements.start < elements.stop:
                yield elements

    def count(self, count: int, first: int | None = None) -> int:
        """Return how many elements `count` segments have, from number `first` on, by default this rank's own."""
        return sum(part.stop - part.start for part in self.cut(self.me if first is None else first, count))


def reduce_scatter_in_rounds(
    comm: Any,
    x: Array,
    buffer: Array,
    tag: int,
    report_finite: Callable[[bool], None],
    scale: float = 1.0,
) -> Iterator[Any]:
    """Reduce this rank's segment of x: the exchange (exchange.py) does what `exchange.reduce_scatter` describes."""
    me, circle = comm.rank, Circle(x.size, comm.size, comm.rank)
    own = x[next(circle.cut(me, 1), slice(0, 0))]
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
    report_finite(kernels.is_finite(own))


def all_gather_in_rounds(comm: Any, x: Array, tag: int) -> Iterator[Any]:
    """Send this rank's segment of x to all, and receive theirs."""
    me, circle = comm.rank, Circle(x.size, comm.size, comm.rank)
    for _, partners in list_rounds(comm.size):
        requests = [
            comm.Irecv(as_bytes(x[part]), (me + distance) % comm.size, tag)
            for distance, count in partners
            for part in circle.cut(me + distance, count)
        ]
        requests += [
            comm.Isend(as_bytes(x[part]), (me - distance) % comm.size, tag)
            for distance, count in partners
            for part in circle.cut(me, count)
        ]
        yield requests
