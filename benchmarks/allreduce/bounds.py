"""Lower bounds of an exchange: bytes on a node's link, bytes through memory, and the time that both need.

m nodes, n ranks per node, P = m·n ranks, d float32 elements, b = 4d bytes. Sparse exchanges have the density ρ: of d
elements, k = ⌈ρd⌉ are selected. An entry is a selected value and its index, together `entry_bytes` bytes.

The bytes on a link are those that one node sends. The bytes through memory are those of all ranks, because all nodes of
this benchmark run on one machine. They are divided by the bandwidth that all ranks reach together.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from topkube.algorithms.cost import PAIRWISE_LIMIT

INDEX_BYTES = 2  # an index is an offset within a block of 65,536 elements
VALUE_BYTES = {"fp32": 4, "bf16": 2}


@dataclass(frozen=True)
class Machine:
    """The rates of the machine, measured in the same run. `read` and `update` are bytes per second of all ranks
    together, over arrays larger than the caches."""

    read: float
    """The rate of reading an array."""
    update: float
    """The rate of a += b. An element counts as 12 bytes: two reads and a write of 4 bytes each. The bounds also
    use this rate for copies, reductions and clears. They assume that none of these operations moves bytes faster than
    a += b."""
    link_bytes: tuple[int, ...] = ()
    """The sizes of the measured messages, ascending. Empty if the nodes have no link between them."""
    link_seconds: tuple[float, ...] = ()
    """The seconds of each of these messages."""

    def find_link_seconds(self, sent: float) -> float:
        """Return the seconds of a message of `sent` bytes, at the rate of the smallest measured message that is at
        least as large, or of the largest measured message if all are smaller. A larger message has the same rate or a
        higher rate, so the result is still a lower bound. Messages above `probes.LARGEST` are not measured; the
        benchmark assumes that the rate no longer grows there."""
        if not self.link_bytes or not sent:
            return 0.0
        sizes = [size for size in self.link_bytes if size >= sent] or [self.link_bytes[-1]]
        size = min(sizes)
        return self.link_seconds[self.link_bytes.index(size)] * sent / size


@dataclass(frozen=True)
class Bound:
    """The least that an exchange costs. `sent_bytes` is what a node sends over its link. `seconds` is the time of the
    whole exchange; `memory_seconds` and `link_seconds` are the times of memory alone and of the link alone."""

    sent_bytes: float
    seconds: float
    memory_seconds: float
    link_seconds: float


def count_ring_bytes(d: int, m: int, n: int) -> float:
    """Return the bytes of a dense ring over all ranks: every rank, and so every node's link, sends 2(P-1)/P·b."""
    return 2 * (m * n - 1) / (m * n) * 4 * d if m > 1 else 0.0


def count_hierarchical_bytes(d: int, m: int) -> float:
    """Return the bytes of a dense exchange that reduces inside the node first: 2(m-1)/m·b. Recursive halving that
    begins inside the node sends the same bytes between nodes."""
    return 2 * (m - 1) / m * 4 * d


def count_gathered_bytes(d: int, m: int, n: int, density: float, entry_bytes: int) -> float:
    """Return the bytes of a ring all-gather of k entries per rank: (P-1)·k·entry_bytes."""
    return (m * n - 1) * math.ceil(density * d) * entry_bytes if m > 1 else 0.0


def count_naive_bytes(d: int, m: int, n: int, density: float, entry_bytes: int) -> float:
    """Return the bytes if all ranks send their k entries to all others. Up to PAIRWISE_LIMIT ranks, each of a node's n
    ranks sends to every rank of other nodes: n·(P-n)·k·entry_bytes. More ranks form a ring: (P-1)·k·entry_bytes."""
    if m * n > PAIRWISE_LIMIT:
        return count_gathered_bytes(d, m, n, density, entry_bytes)
    return n * (m * n - n) * math.ceil(density * d) * entry_bytes


def count_hitopk_bytes(d: int, m: int, n: int, density: float, entry_bytes: int) -> float:
    """Return the bytes if a node sends the ⌈ρd/n⌉ largest entries of each of its n shards to the m-1 other nodes:
    (m-1)·n·⌈ρd/n⌉·entry_bytes."""
    return (m - 1) * n * math.ceil(density * d / n) * entry_bytes


def _count_reduce_bytes(d: int, m: int, n: int) -> float:
    """Return the memory bytes of a reduce-scatter inside each node, for all nodes. Arrays are private to their ranks.
    So each rank first copies out the parts for other ranks (a read and a write). Then each shard is read from n places
    and written once."""
    return m * (8 * (n - 1) * d + 4 * n * d + 4 * d) if n > 1 else 0.0


def _count_gather_bytes(d: int, m: int, n: int) -> float:
    """Return the memory bytes of an all-gather inside each node, for all nodes. Every rank reads the shards of the
    other ranks of its node, and writes them to its own array."""
    return m * 8 * (n - 1) * d


def compute_dense_bound(d: int, m: int, n: int, sent: float, machine: Machine) -> Bound:
    """Return the bound of a dense exchange that sends `sent` bytes per node: the slower of memory and link, because
    both can work at the same time."""
    memory_seconds = (_count_reduce_bytes(d, m, n) + _count_gather_bytes(d, m, n)) / machine.update
    link_seconds = machine.find_link_seconds(sent)
    return Bound(sent, max(memory_seconds, link_seconds), memory_seconds, link_seconds)


def compute_sparse_bound(d: int, m: int, n: int, sent: float, machine: Machine, *, hierarchical: bool) -> Bound:
    """Return the bound of a sparse exchange that sends `sent` bytes per node: reduce, select, then send. If the
    exchange is `hierarchical`, the ranks of a node reduce first, and each rank selects from its shard of the sum. If
    not, nothing is reduced first, and each rank selects from its whole gradient.

    The stages follow each other, because the selection needs its whole input. The selection reads this input once.
    Clearing the result (4 bytes per element and rank) does not need the link and may overlap with sending."""
    reduce_seconds = _count_reduce_bytes(d, m, n) / machine.update if hierarchical else 0.0
    select_seconds = 4 * d * (m if hierarchical else m * n) / machine.read
    clear_seconds = 4 * d * m * n / machine.update
    link_seconds = machine.find_link_seconds(sent)
    return Bound(
        sent,
        seconds=reduce_seconds + select_seconds + max(clear_seconds, link_seconds),
        memory_seconds=reduce_seconds + select_seconds + clear_seconds,
        link_seconds=link_seconds,
    )
