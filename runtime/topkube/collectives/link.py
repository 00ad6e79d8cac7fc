"""Measure the links between nodes and the memory inside them, once at the start. Metrics compare later exchanges with
the rate of the link, and `auto` and `dense` choose by these measurements.

To measure its link, every rank sends messages to its neighbour only: at most 13, whatever the number of ranks. Their
sizes grow while the slowest link carries them in _MOST_SECONDS, so all rounds together take at most 0.6 seconds on
every link from 1 Mbit/s on. The barriers and the maxima between the rounds need a number of messages that grows with
the logarithm of the nodes: with 4,096 nodes and a latency of 1 ms, 0.3 seconds.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass

import numpy as np

from topkube import kernels
from topkube.algorithms import Workload, all_gather_memory, reduce_scatter_memory
from topkube.collectives.call import Call
from topkube.collectives.request import Request
from topkube.world import World

_SIZES = (32 << 10, 256 << 10, 1 << 20, 4 << 20)
"""Bytes that a node sends in one round of each measurement of its link. The last round that was made counts."""
_LEAST = 256
"""The fewest bytes that a rank sends in one round of a measurement of its link."""
_MOST_SECONDS = 0.2
"""A round that is expected to take longer on the slowest link is not made."""
_ROUNDS = 2
_LATENCY_ROUNDS = 5
_MEMORY_ELEMENTS = 1 << 20
"""The float32 values that a node's ranks reduce together to measure its memory."""
_WHAT = "the measurement of the link"


@dataclass(frozen=True)
class MeasuredMachine:
    """The measurements of a rank: `rate`, the bytes per second that it sends to another node while all ranks of its
    node send; `latency`, the seconds of a short message; `memory`, the bytes per second that all ranks of its node
    together read and write during a reduction. A rank that does not exchange with other nodes has None for the first
    two."""

    rate: float | None
    latency: float | None
    memory: float


def measure_link_rate(world: World) -> float | None:
    """Return the bytes per second that this rank sends to the next node while all ranks of its node send and receive as
    much; None with one node and on surplus ranks. A collective of all ranks.

    The result is the best of a few rounds, because a round in which another rank is late measures that rank.
    """
    if world.nodes == 1:
        return None
    world.enter()  # on surplus ranks too: all ranks count the same collectives
    return _measure_rate(world) if world.cross_comm is not None else None


def measure_machines(world: World) -> MeasuredMachine:
    """Measure links and memory. A collective of all ranks of several nodes."""
    world.enter()
    rate = latency = None
    if world.cross_comm is not None:
        rate, latency = _measure_rate(world), _time_rounds(world, 8, _LATENCY_ROUNDS)
    return MeasuredMachine(rate, latency, _measure_memory(world))


def _measure_rate(world: World) -> float:
    from mpi4py import MPI

    own, slowest = np.empty(1), np.zeros(1)
    size, seconds = 0, 0.0
    for node_bytes in _SIZES:
        larger = max(_LEAST, node_bytes // world.shards)
        if size and slowest[0] * larger / size > _MOST_SECONDS:
            break
        size = larger
        own[0] = seconds = _time_rounds(world, size, _ROUNDS)
        world.wait([world.cross_comm.Iallreduce(own, slowest, MPI.MAX)], _WHAT)
    return size / seconds


def _time_rounds(world: World, size: int, rounds: int) -> float:
    """Return the fewest seconds of a round in which this rank sends `size` bytes to the next node and receives as many
    from the node before."""
    comm, links = world.cross_comm, world.cross_links
    data, space = np.zeros(size, np.uint8), np.empty(size, np.uint8)
    after, before = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    fewest = math.inf
    for _ in range(rounds):
        world.wait([comm.Ibarrier()], _WHAT)
        start = time.perf_counter()
        world.wait([links.Irecv(space, before), links.Isend(data, after)], _WHAT)
        fewest = min(fewest, time.perf_counter() - start)
    return fewest


def _measure_memory(world: World) -> float:
    """Return the rate of a reduction inside the node, in the bytes that the cost model counts."""
    ranks = world.local_size
    values = np.zeros(_MEMORY_ELEMENTS // world.largest_node, np.float32)  # of equal length on all nodes
    request, seconds = Request(values, "sum"), math.inf
    for _ in range(_ROUNDS):
        call = Call(world, "the measurement of memory", request)
        start = time.perf_counter()
        if ranks == 1:
            kernels.sum_(values, [values, values], 1.0)
        else:
            call.reduce_scatter(values, 1.0)
            call.all_gather(values)
        seconds = min(seconds, time.perf_counter() - start)
        call.check_between_nodes()
    load = Workload(1, ranks, values.size)
    moved = reduce_scatter_memory(load) + all_gather_memory(load) if ranks > 1 else 3 * values.nbytes
    return moved / max(seconds, 1e-9)
