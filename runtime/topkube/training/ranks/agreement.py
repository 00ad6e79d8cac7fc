"""Agreements of all ranks on a few numbers, on a separate communicator."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from topkube.collectives.coordination.ordered import fold
from topkube.control import name_ranks as name_ranks
from topkube.world import WaitSeries, World, current

_WHAT = "the agreement on a step"


class Agreement:
    """Small collectives over all ranks of `world`. They have their own communicator and counter, so that they can run
    in the communication thread while the script itself calls a collective. All ranks create it together."""

    def __init__(self, world: World) -> None:
        self.world = world
        self._comm = None
        if world.size > 1:
            comm, request = world.comm.Idup()
            self._wait(request, "the start of training")
            self._comm = comm
            world.handles.append(comm)

    def sum(self, values: Sequence[float]) -> npt.NDArray[np.float64]:
        """Return the sums of `values` in rank order, as float64: the same bits on every rank. Raises CollectiveTimeout
        after the world's deadline."""
        own = np.array(values, np.float64)
        if self._comm is None:
            return own
        self.world.enter(WaitSeries.AGREEMENT)
        return fold(self.world, self._comm, own, WaitSeries.AGREEMENT, _WHAT)

    def gather(self, values: Sequence[float]) -> npt.NDArray[np.float64]:
        """Return the `values` of all ranks, shape (ranks, len(values)), float64. Every rank passes the same number of
        values. Raises CollectiveTimeout after the world's deadline."""
        own = np.array(values, np.float64)
        if self._comm is None:
            return own.reshape(1, -1)
        rows = np.empty((self.world.size, own.size))
        self._wait(self._comm.Iallgather(own, rows))
        return rows

    def maximum(self, values: Sequence[float]) -> npt.NDArray[np.float64]:
        """Return the largest of all ranks' numbers, element by element. It is exact, and each rank sends and receives a
        number of messages that grows with the logarithm of the number of ranks. Raises CollectiveTimeout after the
        world's deadline."""
        own = np.array(values, np.float64)
        if self._comm is None:
            return own
        from mpi4py import MPI

        largest = np.empty_like(own)
        self._wait(self._comm.Iallreduce(own, largest, op=MPI.MAX))
        return largest

    def broadcast(self, values: Sequence[float], root: int) -> npt.NDArray[np.float64]:
        """Return `root`'s values. Every rank passes the same number of values. Raises CollectiveTimeout after the
        world's deadline."""
        own = np.array(values, np.float64)
        if self._comm is not None:
            self._wait(self._comm.Ibcast(own, root=root))
        return own

    def _wait(self, request: Any, what: str = _WHAT) -> None:
        self.world.enter(WaitSeries.AGREEMENT)
        self.world.wait([request], what, series=WaitSeries.AGREEMENT)


def digest(value: object) -> float:
    """Return a hash of `value`'s representation that float64 holds exactly: 53 bits, equal on all ranks for equal
    representations."""
    return float(xxhash.xxh3_64_intdigest(repr(value).encode()) >> 11)


def find_differing_ranks(column: npt.NDArray[np.float64]) -> list[int]:
    """Return the ranks whose value in `column`, shape (ranks,), is not that of most ranks. If two values are equally
    frequent, the value of rank 0 counts as the most frequent."""
    values, first, counts = np.unique(column, return_index=True, return_counts=True)
    most_frequent = values[np.lexsort((first, -counts))[0]]
    return [int(rank) for rank in np.flatnonzero(column != most_frequent)]


def open_agreement(world: World | None = None) -> Agreement:
    """Return the agreement of `world` (by default the current world). All ranks create it together, on first use.
    Raises WorldError before `init()`."""
    world = world or current()
    existing: Agreement | None = world.cache.get("agreement")
    if existing is None:
        existing = world.cache["agreement"] = Agreement(world)
    return existing
