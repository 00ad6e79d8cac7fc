"""Lower bounds of an exchange: bytes on a node's link, bytes through memory, and the time that both need.

m nodes, n ranks per node, P = m·n, d float32 elements, b = 4d bytes. All nodes of this benchmark run on one machine.
So the bytes that all ranks move through memory are added, and divided by the bandwidth that all ranks reach together.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

INDEX_BYTES = 2  # offsets within blocks of 65,536 elements
VALUE_BYTES = {"fp32": 4, "bf16": 2}


@dataclass(frozen=True)
class Machine:
    """Rates measured in the same run: bytes per second; `find_wire_seconds` maps the bytes of a message to seconds."""

    read: float
    update: float
    """a += b over arrays larger than the caches, all ranks at once: 12 bytes per element."""
    link_bytes: tuple[int, ...] = ()
    link_seconds: tuple[float, ...] = ()

    def find_wire_seconds(self, sent: float) -> float:
        """Return the seconds of the next larger measured message; beyond the largest message, in proportion to it."""
        if not self.link_bytes or not sent:
            return 0.0
        sizes = [size for size in self.link_bytes if size >= sent] or [self.link_bytes[-1]]
        size = min(sizes)
        return self.link_seconds[self.link_bytes.index(size)] * sent / size


@dataclass(frozen=True)
class Bound:
    """The least that an exchange costs: the bytes that a node sends over its link, and seconds."""

    sent_bytes: float
    seconds: float
    memory_seconds: float
    wire_seconds: float


def count_ring_bytes(d: int, m: int, n: int) -> float:
    """Return the bytes of a dense ring over all ranks: every rank, and so every node's link, sends 2(P-1)/P·b."""
    return 2 * (m * n - 1) / (m * n) * 4 * d if m > 1 else 0.0


def count_hierarchical_bytes(d: int, m: int) -> float:
    """Return the bytes of a dense exchange that is reduced inside the node first (or halved recursively):
    2(m-1)/m·b."""
    return 2 * (m - 1) / m * 4 * d


def count_gathered_bytes(d: int, m: int, n: int, density: float, entry_bytes: int) -> float:
    """Return the bytes of a ring all-gather of k entries per rank: (P-1)·k·entry."""
    return (m * n - 1) * math.ceil(density * d) * entry_bytes if m > 1 else 0.0


def count_naive_bytes(d: int, m: int, n: int, density: float, entry_bytes: int) -> float:
    """Return the bytes if each of a node's n ranks sends its k entries to every rank of other nodes:
    n·(P-n)·k·entry."""
    return n * (m * n - n) * math.ceil(density * d) * entry_bytes


def count_hitopk_bytes(d: int, m: int, n: int, density: float, entry_bytes: int) -> float:
    """Return the bytes of n shards of k/n entries that are sent to m-1 other nodes: (m-1)·ρd·entry."""
    return (m - 1) * n * math.ceil(density * d / n) * entry_bytes


def _count_reduce_bytes(d: int, m: int, n: int) -> float:
    """Return the memory bytes of a reduce-scatter in the node. Arrays are private to their ranks: the parts for other
    ranks are copied out (read and written) once; then each shard is read from n places and written once."""
    return m * (8 * (n - 1) * d + 4 * n * d + 4 * d) if n > 1 else 0.0


def _count_gather_bytes(d: int, m: int, n: int) -> float:
    """Return the memory bytes of an all-gather in the node: every rank reads and writes the shards of the others."""
    return m * 8 * (n - 1) * d


def bound_dense(d: int, m: int, n: int, sent: float, machine: Machine) -> Bound:
    """Return the bound of a dense exchange: the slower of memory and link, because both can work at the same time."""
    memory = (_count_reduce_bytes(d, m, n) + _count_gather_bytes(d, m, n)) / machine.update
    wire = machine.find_wire_seconds(sent)
    return Bound(sent, max(memory, wire), memory, wire)


def bound_sparse(d: int, m: int, n: int, sent: float, machine: Machine, *, hierarchical: bool) -> Bound:
    """Return the bound of a sparse exchange: reduce, select, then send. Selection needs the whole shard, so these
    stages follow each other. Selection is one read of its input. Clearing the result (4 bytes per element and rank)
    does not need the link and may overlap with it."""
    reduced = _count_reduce_bytes(d, m, n) / machine.update if hierarchical else 0.0
    selected = 4 * d * (m if hierarchical else m * n) / machine.read
    cleared = 4 * d * m * n / machine.update
    wire = machine.find_wire_seconds(sent)
    return Bound(sent, reduced + selected + max(cleared, wire), reduced + selected + cleared, wire)
