"""Ok-Topk: a sparse all-reduce that delivers the k largest entries of the sum of all nodes, and sends at most a fixed
multiple of k entries per node, however many nodes there are.

Li and Hoefler, "Near-optimal sparse allreduce for distributed deep learning", 2022, section 3. Every node owns a region
of the array. Nodes send each other the selected entries of their regions; each owner adds them up in the order of the
nodes; a threshold for the sums selects the largest k; owners send these to all nodes.

The paper measures the bounds of the regions and both thresholds every 32 or 64 iterations and uses them in between, so
the number of delivered entries varies. Here all of them are measured in every exchange, with a few hundred numbers:

- A node selects exactly its k largest entries.
- The bounds are the means over all nodes of the quantiles of their selected indices, so owners receive about equally
  many entries.
- Two histograms of the magnitudes of all sums, with 128 bins each, find a threshold with a resolution of 2^-6. All sums
  above it are delivered. Of the sums at the threshold, those with the lowest indices are, so that k are delivered.
- If an owner would send more than 1.5 times its share, entries go around a ring of all nodes in place of direct
  messages: then no node sends more than k.

The delivered entries do not depend on the bounds. Nothing is lost: see global_top.py. The owner of an entry keeps the
error of rounding its sum.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import Any

import numpy as np

from topkube import kernels
from topkube.algorithms.cost import PAIRWISE_LIMIT
from topkube.arrays import Array
from topkube.collectives.exchange import exchange_rows
from topkube.collectives.global_top import GlobalTop, GlobalTopAllReduce
from topkube.collectives.rounds import Exchange
from topkube.errors import WireError

_QUANTILES = 64
"""Most quantiles of the selected indices that nodes exchange; the bounds of more regions lie evenly between them."""
_BINS = 128
_KEY_SHIFT = 17
"""A magnitude's key is the upper 14 of its 31 bits: 8 of the exponent and 6 of the mantissa. Each histogram resolves 7
bits."""
_UNEVEN = 1.5
_COUNT_BYTES = 8

Measurement = Generator[list[Any], None, Array]
"""Yields the MPI requests it waits for, and returns an array that is the same on all nodes."""


class SplitTop(GlobalTop):
    """The part of a node in Ok-Topk: the entries that it selects, and the sums of the region that it owns."""

    def exchange(self, comm: Any) -> Exchange:
        if comm.size == 1:
            return
        bounds = yield from self._measure_bounds(comm)
        indices, sums = yield from self._add_up(comm, bounds)
        chosen, counts = yield from self._choose(comm, sums)
        yield from self._gather(comm, bounds, counts, indices[chosen], sums[chosen])

    def _measure_bounds(self, comm: Any) -> Measurement:
        """Return the bounds of all regions: node i owns the elements [bounds[i], bounds[i + 1])."""
        nodes = comm.size
        parts = min(nodes, _QUANTILES)
        own = self._own[self._k * np.arange(1, parts, dtype=np.int64) // parts].astype(np.int64)
        total = yield from self._sum(comm, own)
        quantiles = np.concatenate([[0], total // nodes, [self._length]])
        quantile, remainder = np.divmod(np.arange(nodes + 1, dtype=np.int64) * parts, nodes)
        next_quantiles = quantiles[np.minimum(quantile + 1, parts)]
        bounds: Array = quantiles[quantile] + (next_quantiles - quantiles[quantile]) * remainder // nodes
        return bounds

    def _add_up(self, comm: Any, bounds: Array) -> Generator[list[Any], None, tuple[Array, Array]]:
        """Send every owner the selected entries of its region. Return (indices, sums) of the own region: uint32
        ascending from the region's start, and float32."""
        nodes, me = comm.size, comm.rank
        cuts = np.searchsorted(self._own, bounds)
        length = int(bounds[me + 1] - bounds[me])
        capacity = _COUNT_BYTES + kernels.encoded_size(length, min(self._k, length), self._wire)
        parts: dict[int, tuple[Array, Array]] = {}
        for first in range(1, nodes, PAIRWISE_LIMIT):
            distances = range(first, min(first + PAIRWISE_LIMIT, nodes))
            arrived = {(me - d) % nodes: np.empty(capacity, np.uint8) for d in distances}
            requests = [comm.Irecv(row, node) for node, row in arrived.items()]
            rows = [((me + d) % nodes, self._pack((me + d) % nodes, bounds, cuts)) for d in distances]
            yield requests + [self._send(comm, row, node) for node, row in rows]
            parts.update((node, self._unpack(row, length)) for node, row in arrived.items())
        parts[me] = self._unpack(self._pack(me, bounds, cuts), length)
        total, is_sent = np.zeros(length, np.float32), np.zeros(length, bool)
        for node in range(nodes):
            indices, values = parts[node]
            kernels.scatter_add_(total, indices, values)
            is_sent[indices] = True
        places = np.flatnonzero(is_sent)
        return places.astype(np.uint32), total[places]

    def _pack(self, owner: int, bounds: Array, cuts: Array) -> Array:
        """Return the message for the owner of a region: the number of entries, and the encoded entries. What rounding
        leaves stays with this node."""
        part, start = slice(cuts[owner], cuts[owner + 1]), bounds[owner]
        length = int(bounds[owner + 1] - start)
        own, exact = self._own[part], self.values[part]
        row = kernels.encode((own - start).astype(np.uint32), exact, length, wire=self._wire)
        self._leave_out(own, exact, kernels.decode(row, length=length)[1])
        return np.concatenate([np.array([len(own)], np.uint64).view(np.uint8), row])

    def _unpack(self, row: Array, length: int) -> tuple[Array, Array]:
        count = int(row[:_COUNT_BYTES].view(np.uint64)[0])
        size = kernels.encoded_size(length, count, self._wire) if count <= self._k else 0
        if not 0 < size <= len(row) - _COUNT_BYTES:
            raise WireError(
                f"a message with {count} entries arrived, but a node selects at most {self._k} in a region of {length}",
                cause="the message was damaged, or the nodes run different versions of TopKube",
                next_step="run the same version of TopKube on all nodes",
            )
        entries: tuple[Array, Array] = kernels.decode(row[_COUNT_BYTES : _COUNT_BYTES + size], length=length)
        return entries

    def _choose(self, comm: Any, sums: Array) -> Generator[list[Any], None, tuple[Array, Array]]:
        """Return the places of the sums that this owner delivers, and how many entries each owner delivers."""
        keys = ((sums.view(np.uint32) & 0x7FFFFFFF) >> _KEY_SHIFT).astype(np.int64)
        highs, lows = np.divmod(keys, _BINS)
        high, needed = yield from self._find_bin(comm, highs, self._k)
        low, needed = yield from self._find_bin(comm, lows[highs == high], needed)
        threshold = high * _BINS + low
        places = np.flatnonzero(keys == threshold)
        own = np.array([np.count_nonzero(keys > threshold), len(places)], np.uint32)
        everyone = np.empty((comm.size, 2), np.uint32)
        yield [comm.Iallgather(own, everyone)]
        self.sent_bytes += (comm.size - 1) * own.nbytes
        above, equal = everyone.astype(np.int64).T
        delivered = np.clip(needed - (np.cumsum(equal) - equal), 0, equal)
        chosen = np.concatenate([np.flatnonzero(keys > threshold), places[: delivered[comm.rank]]])
        return np.sort(chosen), above + delivered

    def _find_bin(self, comm: Any, own: Array, needed: int) -> Generator[list[Any], None, tuple[int, int]]:
        """Return the bin that is reached when `needed` entries of all nodes are chosen from the highest bin on, and how
        many of these entries are in this bin. `own` has the bins of this node's entries."""
        histogram = yield from self._sum(comm, np.bincount(own, minlength=_BINS).astype(np.uint32))
        counts = histogram[::-1].astype(np.int64)
        up_to = np.cumsum(counts)
        position = int(np.argmax(up_to >= needed))
        return _BINS - 1 - position, int(needed - (up_to[position] - counts[position]))

    def _gather(self, comm: Any, bounds: Array, counts: Array, indices: Array, sums: Array) -> Exchange:
        """Send `indices` (from the own region's start) and `sums` to all nodes. `counts` has the number of entries of
        each node."""
        nodes, me = comm.size, comm.rank
        lengths = np.diff(bounds)
        sizes = [kernels.encoded_size(int(n), int(k), self._wire) for n, k in zip(lengths, counts, strict=True)]
        rows = [np.empty(size, np.uint8) for size in sizes]
        rows[me] = kernels.encode(indices, sums, int(lengths[me]), wire=self._wire)
        self._leave_out(
            (indices + bounds[me]).astype(np.uint32), sums, kernels.decode(rows[me], length=int(lengths[me]))[1]
        )
        if counts.max() * nodes <= _UNEVEN * self._k:
            self.sent_bytes += (nodes - 1) * sizes[me]
            yield from exchange_rows(comm, [rows[me]] * nodes, rows, 0)
        else:
            self.sent_bytes += sum(sizes) - sizes[(me + 1) % nodes]
            yield from _send_around(comm, rows)
        parts = [kernels.decode(row, length=int(length)) for row, length in zip(rows, lengths, strict=True)]
        self.indices = np.concatenate(
            [part + np.uint32(start) for (part, _), start in zip(parts, bounds[:-1], strict=True)]
        )
        self.values = np.concatenate([values for _, values in parts])

    def _sum(self, comm: Any, own: Array) -> Measurement:
        """Return the sum of a few integers over all nodes."""
        total = np.empty_like(own)
        yield [comm.Iallreduce(own, total)]
        self.sent_bytes += own.nbytes * (comm.size - 1).bit_length()
        return total


class OkTopK(GlobalTopAllReduce):
    """Ok-Topk: every node adds up one region."""

    kind = SplitTop


def _send_around(comm: Any, rows: Sequence[Array]) -> Exchange:
    """Gather rows of any lengths around a ring: rank r has row r, every rank gets all rows."""
    ranks, me = comm.size, comm.rank
    right, left = (me + 1) % ranks, (me - 1) % ranks
    for step in range(ranks - 1):
        sent, received = rows[(me - step) % ranks], rows[(me - step - 1) % ranks]
        yield [comm.Irecv(received, left), comm.Isend(sent, right)]
