"""What an all-reduce costs at least: bytes between nodes, bytes through a node's memory, and the time both need.

m nodes with n ranks each, d float32 elements, density ρ. The formulas are those of docs/collectives.md; how near the
implementation comes to them is measured in docs/benchmarks.md. Latency counts once per message that waits for another.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

INDEX_BYTES = 2  # offsets within blocks of 65,536 elements
VALUE_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}
SMALL = 1 << 16
"""Below this many elements latency counts, not bytes."""
ALGORITHMS = ("flat", "hierarchical", "torus2d", "naive", "hitopk")


def resolved(algorithm: str, nodes: int, length: int, density: float) -> str:
    """The algorithm behind a name, for arrays of `length` elements.

    "dense" is `hierarchical`: it sends the least between nodes on any topology, and on one node it is the
    shared-memory all-reduce. "auto" is `hitopk` where there are several nodes, the array is not small, and the
    entries (8 bytes each, from every other node) are less than half of what the dense exchange sends (4 bytes an
    element); else "dense".
    """
    if algorithm == "dense":
        return "hierarchical"
    if algorithm != "auto":
        return algorithm
    sparse = (nodes - 1) * density * 8
    dense = 2 * (nodes - 1) / nodes * 4
    return "hitopk" if nodes > 1 and length >= SMALL and sparse < dense / 2 else "hierarchical"


@dataclass(frozen=True)
class Machines:
    """What is known of the cluster. Bytes per second, seconds."""

    nodes: int
    slots: int
    link: float
    """Of one node, in each direction."""
    memory: float
    """Of one node, all its ranks together: reading and writing."""
    latency: float = 50e-6
    """Of one message between nodes."""


@dataclass(frozen=True)
class Cost:
    """Of one exchange of a whole gradient."""

    algorithm: str
    sent: float
    """Bytes that a node sends to others."""
    between: float
    """Seconds on the link."""
    inside: float
    """Seconds in the node's memory: sums, selection, copies."""

    @property
    def seconds(self) -> float:
        """Dense pieces follow each other through memory and link; a sparse exchange can only be sent when it is
        selected."""
        return self.between + self.inside if self.algorithm in ("hitopk", "naive") else max(self.between, self.inside)


def cost(algorithm: str, machines: Machines, elements: int, density: float = 0.01, wire: str = "bf16") -> Cost:
    """Of `algorithm`: flat, hierarchical, torus2d, naive or hitopk."""
    m, n, d = machines.nodes, machines.slots, elements
    entry = INDEX_BYTES + VALUE_BYTES[wire]
    sent: float
    reduced = 8 * (n - 1) * d + 4 * n * d + 4 * d if n > 1 else 0
    shared = 8 * (n - 1) * d
    steps = 2 * (m - 1)
    if algorithm == "hitopk":
        sent = (m - 1) * n * math.ceil(density * d / n) * entry
        inside, steps = reduced + 4 * d + 4 * d * n, m - 1
    elif algorithm == "naive":
        sent = n * (m * n - n) * math.ceil(density * d) * entry
        inside, steps = 4 * d * n + 4 * d * n, m * n - 1
    elif algorithm == "flat":
        sent = 2 * (m * n - 1) / (m * n) * 4 * d
        inside, steps = reduced + shared, 2 * (m * n - 1)
    else:
        sent = 2 * (m - 1) / m * 4 * d
        inside = reduced + shared
    if m == 1:
        sent, steps = 0, 0
    return Cost(algorithm, sent, sent / machines.link + steps * machines.latency, inside / machines.memory)
