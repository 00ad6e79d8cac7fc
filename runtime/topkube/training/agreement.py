"""Agreement: a handful of numbers added up over all ranks, on a communicator of their own."""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from topkube.errors import CollectiveTimeout
from topkube.world import World, current


class Agreement:
    """Sums over all ranks of one world. It has its own communicator, so that it can be under way while the script
    itself calls a collective; made by all ranks together."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._comm = world.comm.Dup() if world.size > 1 else None

    def __call__(self, values: Sequence[float]) -> npt.NDArray[np.float64]:
        """Sums of `values`, as float64, the same bits on every rank. Raises CollectiveTimeout after the world's
        deadline."""
        sums = np.array(values, np.float64)
        if self._comm is None:
            return sums
        from mpi4py import MPI

        request = self._comm.Iallreduce(MPI.IN_PLACE, sums)
        deadline, pause = time.monotonic() + self._world.deadline_seconds, 0.0
        while not request.Test():
            if time.monotonic() > deadline:
                raise CollectiveTimeout(
                    f"ranks did not agree on the step within {self._world.deadline_seconds:g} s",
                    cause="a rank hangs, has ended, or leaves out a backward() that the others run",
                    next_step="find the rank without progress; all ranks must run equally many backward passes",
                )
            time.sleep(pause)
            pause = min(pause + 1e-6, 1e-3)
        return sums


_agreement: Agreement | None = None


def agreement() -> Agreement:
    """The agreement of the current world, made on first use, by all ranks together. Raises WorldError before
    `init()`."""
    global _agreement
    world = current()
    if _agreement is None or _agreement._world is not world:
        _agreement = Agreement(world)
    return _agreement
