"""Measure the link between nodes once at the start, to compare later exchanges with it."""

from __future__ import annotations

import time

import numpy as np

from topkube.world import World

_SHORT, _LONG = 256 << 10, 4 << 20
"""Bytes of the first message and, if the link is fast enough, of the second."""
_SLOW_SECONDS = 0.02
_ROUNDS = 2


def link_rate(world: World) -> float | None:
    """Return the bytes per second that this rank sends to the next node while all ranks of its node send and receive as
    much; None with one node and on surplus ranks. A collective of all ranks: well under a second down to 100 Mbit/s.

    The result is the best of a few rounds, because a round in which another rank is late measures that rank.
    """
    comm = world.cross_comm
    if world.nodes == 1:
        return None
    world.enter()  # on surplus ranks too: all ranks count the same collectives
    if comm is None:
        return None
    from mpi4py import MPI

    data, space = np.zeros(_LONG, np.uint8), np.empty(_LONG, np.uint8)
    after, before = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    slowest, own = np.empty(1), np.empty(1)

    def round_of(size: int) -> float:
        world.wait([comm.Ibarrier()], "the measurement of the link")
        start = time.perf_counter()
        requests = [comm.Irecv(space[:size], before), comm.Isend(data[:size], after)]
        world.wait(requests, "the measurement of the link")
        return time.perf_counter() - start

    size, seconds = _SHORT, min(round_of(_SHORT) for _ in range(_ROUNDS))
    own[0] = seconds
    world.wait([comm.Iallreduce(own, slowest, MPI.MAX)], "the measurement of the link")
    if slowest[0] < _SLOW_SECONDS:
        size, seconds = _LONG, min(round_of(_LONG) for _ in range(_ROUNDS))
    return size / seconds
