"""The cost model: what one exchange of a gradient sends, moves through memory and waits for, and its seconds.

The costs are lower bounds; docs/benchmarks.md shows how near the implementation comes to them. A message between nodes
costs its latency only if it waits for another message.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from topkube.algorithms.declaration import Algorithm

PAIRWISE_LIMIT = 16
"""Up to this many partners, every partner sends to all others at the same time. With more partners, an exchange has
several rounds (`list_rounds`), because so many messages at once would overload the link of a receiver."""
SPARSE_INSIDE = 0.25
"""Inside the node, encoded shards are gathered in place of dense ones if they are at most this share of the bytes."""
INDEX_BYTES = 2
"""An index is an offset within a block of 65,536 elements."""
VALUE_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}
_ELEMENT_BYTES = 4


@dataclass(frozen=True)
class Workload:
    """An exchange: `nodes` with `slots` ranks each reduce `elements` float32 values. `density` is the share of them
    that is sent, `wire` the format of sent values, `dense_wire` that of dense values. With a `period`, traffic between
    nodes is the mean of so many steps. `matrix_rank` is the rank of the approximation of matrices."""

    nodes: int
    slots: int
    elements: int
    density: float = 0.01
    wire: str = "bf16"
    dense_wire: str = "fp32"
    period: int = 1
    matrix_rank: int = 4

    @property
    def entry_bytes(self) -> int:
        """Bytes of one sent value with its index."""
        return INDEX_BYTES + VALUE_BYTES[self.wire]

    @property
    def array_bytes(self) -> int:
        return _ELEMENT_BYTES * self.elements

    @property
    def dense_value_bytes(self) -> int:
        """Bytes of one dense value between nodes."""
        return VALUE_BYTES[self.dense_wire]

    def kept(self, shards: int = 1) -> int:
        """Return how many entries are sent of each of `shards` equal parts of the gradient."""
        return math.ceil(self.density * self.elements / shards)


@dataclass(frozen=True)
class Traffic:
    """The work of one node for one exchange. If an exchange happens once in `period` steps, the values are means per
    step.

    `sent`: bytes that the node sends to other nodes. `memory`: bytes that all its ranks together read and write.
    `messages`: messages between nodes that wait for one another.
    """

    sent: float
    memory: float
    messages: float


@dataclass(frozen=True)
class Machines:
    """The cluster. Bandwidths are bytes per second, times are seconds."""

    nodes: int
    slots: int
    link: float
    """Bandwidth of one node's link, in each direction."""
    memory: float
    """Bandwidth of one node's memory, all ranks together, reading and writing."""
    latency: float = 50e-6
    """Time of one short message between nodes."""
    nccl_link: float | None = None
    """Bandwidth of one node's link for NCCL; None if it is not measured, or if there are no GPUs."""
    crowding: float = 1.0
    """Ranks per processor of the most crowded machine."""

    def link_of(self, algorithm: Algorithm) -> float:
        """Return the bandwidth of one node's link for the transport of the algorithm: MPI or NCCL."""
        return self.nccl_link if self.nccl_link is not None and algorithm.needs_gpu else self.link


@dataclass(frozen=True)
class Cost:
    """The cost of one exchange of a whole gradient with one algorithm."""

    algorithm: Algorithm
    sent: float
    """Bytes that a node sends to other nodes."""
    between: float
    """Seconds on the link."""
    inside: float
    """Seconds in the node's memory: sums, selection, copies."""

    @property
    def seconds(self) -> float:
        """Seconds of the whole exchange. If the algorithm overlaps its pieces, the slower of link and memory counts."""
        return max(self.between, self.inside) if self.algorithm.overlaps else self.between + self.inside


def estimate_cost(
    algorithm: Algorithm,
    machines: Machines,
    elements: int,
    density: float = 0.01,
    wire: str = "bf16",
    dense_wire: str = "fp32",
    period: int = 1,
    matrix_rank: int = 4,
) -> Cost:
    """Return the cost of exchanging `elements` float32 values with `algorithm`. `density`, `wire`, `dense_wire`,
    `period` and `matrix_rank` are as in `Workload`."""
    load = Workload(machines.nodes, machines.slots, elements, density, wire, dense_wire, period, matrix_rank)
    traffic = algorithm.traffic(load)
    sent, messages = (traffic.sent, traffic.messages) if machines.nodes > 1 else (0.0, 0)
    between = sent / machines.link_of(algorithm) + messages * machines.latency
    return Cost(algorithm, sent, between, traffic.memory / machines.memory)


def count_times_fewer_bytes(algorithm: Algorithm, nodes: int, slots: int, dense_wire: str = "fp32") -> float:
    """Return how many times fewer bytes a node sends with `algorithm` than in a dense all-reduce of float32; at least
    1."""
    if nodes == 1:
        return 1.0
    workload = Workload(nodes, slots, 1 << 20, dense_wire=dense_wire)
    return max(1.0, all_reduce_sent(workload.array_bytes, nodes) / algorithm.traffic(workload).sent)


# ---- parts that declarations are made of


def reduce_scatter_memory(workload: Workload) -> float:
    """Return the bytes through a node's memory when its ranks add up their gradients: each rank copies out what others
    need, then every shard is read from all ranks and written once."""
    ranks, elements = workload.slots, workload.elements
    copied_out = 2 * (ranks - 1) * elements  # each value is read and written
    summed = (ranks + 1) * elements
    return _ELEMENT_BYTES * (copied_out + summed) if ranks > 1 else 0


def all_gather_memory(workload: Workload) -> float:
    """Return the bytes through a node's memory when every rank reads and writes the shards of all others."""
    return 2 * _ELEMENT_BYTES * (workload.slots - 1) * workload.elements


Rounds = tuple[tuple[int, tuple[tuple[int, int], ...]], ...]


def list_rounds(partners: int) -> Rounds:
    """Return the rounds of an all-gather among `partners`, one up to PAIRWISE_LIMIT of them, in the order in which it
    makes them (Bruck et al., 1997). Before a round, a partner holds `reach` segments: its own and those that follow.
    It receives `count` more from the partner that is `distance` further on, and sends its first `count` to the partner
    that is as far behind it. A round is (reach, ((distance, count), ...)). A reduce-scatter makes them backwards."""
    return _list_rounds(partners, max(2, PAIRWISE_LIMIT))


@functools.lru_cache(maxsize=64)
def _list_rounds(partners: int, limit: int) -> Rounds:
    number, radix = 0, 2
    while limit**number < partners:
        number += 1
    while radix**number < partners:  # rounds of about the same size have the fewest partners
        radix += 1
    rounds, reach = list[tuple[int, tuple[tuple[int, int], ...]]](), 1
    while reach < partners:
        distances = range(reach, min(reach * radix, partners), reach)
        rounds.append((reach, tuple((distance, min(reach, partners - distance)) for distance in distances)))
        reach *= radix
    return tuple(rounds)


def list_partners(rank: int, ranks: int) -> tuple[int, ...]:
    """Return the ranks that `rank` exchanges values with in the rounds of an all-reduce among `ranks`: among few, all
    others. The next and the last rank are always among them."""
    return _list_partners(rank, ranks, list_rounds(ranks))


@functools.lru_cache(maxsize=64)
def _list_partners(rank: int, ranks: int, rounds: Rounds) -> tuple[int, ...]:
    distances = {distance for _, partners in rounds for distance, _ in partners}
    found = {(rank + sign * distance) % ranks for distance in distances for sign in (1, -1)}
    return tuple(sorted(found, key=lambda partner: (partner - rank) % ranks))


def sends_directly(partners: int) -> bool:
    """Return True if exchanges among `partners` have one round, in which all send to all."""
    return partners <= PAIRWISE_LIMIT


def count_wider_bytes(value_bytes: float, elements: float, partners: int) -> float:
    """Return how many bytes more each of `partners` sends in a reduce-scatter of `elements` values of `value_bytes`
    than (p-1)/p of them: partial sums, in all rounds but the first, are float32."""
    rounds = list_rounds(partners)
    partial_sums = (rounds[-1][0] - 1) * elements / partners if rounds else 0.0
    return max(0.0, _ELEMENT_BYTES - value_bytes) * partial_sums


def all_reduce_sent(array_bytes: float, partners: int) -> float:
    """Return the bytes that each of `partners` sends in an all-reduce of `array_bytes`: 2(p-1)/p of them."""
    return 2 * (partners - 1) / partners * array_bytes


def all_reduce_messages(partners: int) -> int:
    """Return how many messages of an all-reduce wait for one another: two for each round."""
    return 2 * max(1, len(list_rounds(partners)))


def two_stage_sent(message_bytes: float, nodes: int) -> float:
    """Return the bytes that each node sends in two stages: each segment of its message to the owner of the segment,
    then its own segment of the sum, which has the same length, to all nodes."""
    return 2 * (nodes - 1) / nodes * message_bytes


def two_stage_messages(partners: int) -> int:
    """Return how many messages of both stages wait for one another: each stage sends to PAIRWISE_LIMIT partners at a
    time."""
    return 2 * -(-(partners - 1) // PAIRWISE_LIMIT)


def all_gather_messages(partners: int) -> int:
    """Return how many messages of an all-gather wait for one another: one for each round."""
    return max(1, len(list_rounds(partners)))
