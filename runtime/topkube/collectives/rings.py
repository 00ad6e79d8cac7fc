"""All-reduces and all-gathers around a ring: each rank sends to the next one and receives from the last one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from topkube import kernels
from topkube.algorithms.cost import PAIRWISE_LIMIT, sends_directly
from topkube.arrays import Array, as_bytes
from topkube.collectives.call import compute_shard_bounds
from topkube.collectives.rounds import Exchange, gather_rows


def ring_all_reduce(
    comm: Any, x: Array, buffer: Array, tag: int, report_finite: Callable[[bool], None], scale: float = 1.0
) -> Exchange:
    """Replace x by the sum over `comm` times `scale`, in two rounds of a ring (Patarasuk & Yuan, "Bandwidth optimal
    all-reduce algorithms for clusters of workstations", 2009). `buffer` holds one segment. Partial sums travel in the
    type that `choose_partial_sum_type` returns. `report_finite` is called with True if the segment that this rank has
    completed is finite."""
    segments, me = _list_ring_segments(x, comm.size), comm.rank
    if choose_partial_sum_type(comm.size, x.dtype) == x.dtype:
        yield from _reduce_scatter(comm, segments, buffer, tag, scale)
    else:
        yield from _wide_reduce_scatter(comm, segments, tag, scale)
    report_finite(kernels.is_finite(segments[me + 1]))
    right, left = (me + 1) % comm.size, (me - 1) % comm.size
    for step in range(comm.size - 1):
        outgoing, incoming = segments[me + 1 - step], segments[me - step]
        yield [comm.Irecv(as_bytes(incoming), left, tag), comm.Isend(as_bytes(outgoing), right, tag)]


def _reduce_scatter(comm: Any, segments: Sequence[Array], buffer: Array, tag: int, scale: float) -> Exchange:
    """The first round of a ring, with partial sums in the type of the segments."""
    ranks, me = comm.size, comm.rank
    right, left = (me + 1) % ranks, (me - 1) % ranks
    for step in range(ranks - 1):
        outgoing, own = segments[me - step], segments[me - step - 1]
        arriving = buffer[: own.size]
        yield [comm.Irecv(as_bytes(arriving), left, tag), comm.Isend(as_bytes(outgoing), right, tag)]
        kernels.sum_(own, [arriving, own], scale if step == ranks - 2 else 1.0)


def _wide_reduce_scatter(comm: Any, segments: Sequence[Array], tag: int, scale: float) -> Exchange:
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


def _list_ring_segments(x: Array, ranks: int) -> list[Array]:
    """Return the segments of x, twice in a row: numbers from -2 * ranks to 2 * ranks - 1 name a segment."""
    bounds = compute_shard_bounds(x.size, ranks)
    return [x[bounds[i % ranks] : bounds[i % ranks + 1]] for i in range(2 * ranks)]


def gather_rows_around(comm: Any, rows: Array, tag: int) -> Exchange:
    """Do what `rounds.gather_rows` does. With many ranks, each sends to the next one only: if a node has several ranks
    that follow each other, each row enters the node once."""
    if sends_directly(comm.size):
        yield from gather_rows(comm, rows, tag)
        return
    ranks, me = comm.size, comm.rank
    right, left = (me + 1) % ranks, (me - 1) % ranks
    for step in range(ranks - 1):
        sent, received = rows[(me - step) % ranks], rows[(me - step - 1) % ranks]
        yield [comm.Irecv(received, left, tag), comm.Isend(sent, right, tag)]
