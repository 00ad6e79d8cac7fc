"""Sparse all-reduces that deliver the k largest entries of the sum of all nodes: the base class, and gTop-k.

At the end, every node has the list of delivered entries. If a node selected an entry that is not delivered, the entry
stays in the residual of this node. So nothing is lost, whichever node adds up the entries.

**gTop-k**: Shi et al., "A distributed synchronous SGD algorithm with global top-k sparsification for low bandwidth
networks", 2019, section III. Pairs of nodes add up their largest k entries and keep the largest k of the sum, then
pairs of pairs, and so on. The paper adds up towards one node, which broadcasts the result. Here both nodes of a pair
send and add, so every node computes its own path to the root, and nothing has to be broadcast: half as many messages
wait for one another.

If an entry is delivered, but a part of its sum was left out on the way, the paper loses that part. Here the first node
of the pair (or pair of pairs ...) that left it out adds it to its own residual. The same node keeps the errors of
rounding a sum before it is sent.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import numpy as np

from topkube import kernels
from topkube.arrays import Array
from topkube.collectives.all_reduce import NodeAllReduce, finish_exchange
from topkube.collectives.call import Call
from topkube.collectives.rounds import Exchange
from topkube.collectives.shard import Shard
from topkube.collectives.sparse import count_selected, select_largest
from topkube.telemetry import phases


class GlobalTop(ABC):
    """The part of a node in the selection of the k largest entries of the sum of all nodes.

    `total`, float32, holds what the node could send; the node selects k entries of it. `exchange` replaces `indices`,
    (k,) uint32 ascending, and `values`, (k,) float32, by the delivered entries: the same bits on all nodes. It adds to
    `sent_bytes`.
    """

    def __init__(self, total: Array, k: int, wire: str, selection: str = "topk") -> None:
        self.indices, self.values = select_largest(total, k, selection)
        self.sent_bytes = 0
        self._length, self._k, self._wire = len(total), k, wire
        self._own = self.indices
        self._left_out: list[tuple[Array, Array]] = []
        """(indices, values): what this node left out of sums, or of the rounded values that it sent."""

    @abstractmethod
    def exchange(self, comm: Any) -> Exchange:
        """Exchange the entries with the other nodes of `comm`. All nodes have the same k and length."""

    def find_delivered(self) -> Array:
        """Return the indices that this node selected and that are delivered: int64."""
        indices: Array = self._own[self._are_delivered(self._own)].astype(np.int64)
        return indices

    def return_rest(self, residual: Array) -> None:
        """Add what this node left out of delivered entries to `residual`. The entries of `find_delivered` must be
        zero in it, and all others as they were in `total`."""
        for indices, values in self._left_out:
            is_delivered = self._are_delivered(indices)
            residual[indices[is_delivered]] += values[is_delivered]

    def _are_delivered(self, indices: Array) -> Array:
        places = np.minimum(np.searchsorted(self.indices, indices), len(self.indices) - 1)
        are_equal: Array = self.indices[places] == indices
        return are_equal

    def _send(self, comm: Any, row: Array, to: int) -> Any:
        """Return the MPI request of a message."""
        self.sent_bytes += row.nbytes
        return comm.Isend(row, to)

    def _leave_out(self, indices: Array, exact: Array, sent: Array) -> None:
        """Note the error of rounding `exact` to `sent`."""
        with np.errstate(invalid="ignore"):  # infinity: all ranks skip the step
            self._left_out.append((indices, exact - sent))


class GlobalTopAllReduce(NodeAllReduce):
    """After a dense sum inside each node, the largest entries of the sum of all nodes. Each rank has a residual of its
    shard."""

    kind: type[GlobalTop]
    only_accumulates = True

    def exchange(self, call: Call, shard: Shard) -> None:
        world, request = shard.world, shard.request
        call.check_between_nodes()
        k = min(count_selected(request.length, request.density, world.shards), len(shard.values))
        if not k:
            return
        with phases.current.timed("select"):
            total = shard.accumulate()
            top = self.kind(total, k, request.wire, request.selection)
        finish_exchange(call, top.exchange(world.cross_comm), 0)
        phases.current.sent(inter=top.sent_bytes)
        with phases.current.timed("select"):
            if request.residual is not None:
                request.residual.clear(top.find_delivered())
                top.return_rest(total)
            shard.values[:] = 0
            shard.values[top.indices] = top.values.astype(shard.values.dtype)
        shard.check(shard.values)


class TopTree(GlobalTop):
    """The path of a node through the tree. `indices` and `values` are the sum of the node's subtree so far."""

    def exchange(self, comm: Any) -> Exchange:
        """If the number of nodes is not a power of two, the surplus nodes first send their entries to a node of the
        tree, which sends them the result."""
        nodes, me = comm.size, comm.rank
        paired = 1 << (nodes.bit_length() - 1)
        arrived = np.empty(kernels.encoded_size(self._length, self._k, self._wire), np.uint8)
        if me >= paired:
            yield [self._send(comm, self._round(is_keeper=True), me - paired)]
            yield [comm.Irecv(arrived, me - paired)]
            self.indices, self.values = kernels.decode(arrived, length=self._length)
            return
        if me + paired < nodes:
            yield [comm.Irecv(arrived, me + paired)]
            self._add((self.indices, self.values), kernels.decode(arrived, length=self._length), is_keeper=True)
        step = 1
        while step < paired:
            row = self._round(is_keeper=me % step == 0)
            yield [comm.Irecv(arrived, me ^ step), self._send(comm, row, me ^ step)]
            step *= 2
            others = kernels.decode(arrived, length=self._length)
            self._add((self.indices, self.values), others, is_keeper=me % step == 0)
        if paired < nodes:
            row = self._round(is_keeper=me == 0)
            if me + paired < nodes:
                yield [self._send(comm, row, me + paired)]

    def _round(self, is_keeper: bool) -> Array:
        """Round the entries to the format of the wire. Return the message."""
        row: Array = kernels.encode(self.indices, self.values, self._length, wire=self._wire)
        exact, (_, self.values) = self.values, kernels.decode(row, length=self._length)
        if is_keeper:
            self._leave_out(self.indices, exact, self.values)
        return row

    def _add(self, first: tuple[Array, Array], second: tuple[Array, Array], is_keeper: bool) -> None:
        """Keep the largest k entries of the sum of two sparse vectors. The order of the vectors changes no bit."""
        indices, values = _add_sparse(first, second)
        places, kept = kernels.topk(values, self._k)
        if is_keeper:
            is_left_out = np.ones(len(indices), bool)
            is_left_out[places] = False
            self._left_out.append((indices[is_left_out], values[is_left_out]))
        self.indices, self.values = indices[places], kept


class GTopK(GlobalTopAllReduce):
    """gTop-k through a tree of nodes."""

    kind = TopTree


def _add_sparse(first: tuple[Array, Array], second: tuple[Array, Array]) -> tuple[Array, Array]:
    """Return the sum of two sparse vectors with ascending indices: (indices, ascending; values)."""
    indices = np.concatenate([first[0], second[0]])
    order = np.argsort(indices, kind="stable")
    indices, values = indices[order], np.concatenate([first[1], second[1]])[order]
    is_new = np.empty(len(indices), bool)
    is_new[0] = True
    np.not_equal(indices[1:], indices[:-1], out=is_new[1:])
    sums = values[is_new]
    with np.errstate(invalid="ignore", over="ignore"):  # NaN and infinity: all ranks skip the step
        sums[np.cumsum(is_new)[~is_new] - 1] += values[~is_new]
    return indices[is_new], sums
