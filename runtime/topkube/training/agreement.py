"""Agreement: a handful of numbers added up over all ranks, on a communicator of their own."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from topkube.world import World, current


class Agreement:
    """Sums over all ranks. It has its own communicator and is not counted among the world's collectives, so that it
    can be under way in the communication thread while the script itself calls a collective; made by all ranks
    together."""

    def __init__(self, world: World) -> None:
        self.world = world
        self._comm = world.comm.Dup() if world.size > 1 else None

    def __call__(self, values: Sequence[float]) -> npt.NDArray[np.float64]:
        """Sums of `values` in rank order, as float64: the same bits on every rank. Raises CollectiveTimeout after the
        world's deadline."""
        own = np.array(values, np.float64)
        if self._comm is None:
            return own
        rows = np.empty((self.world.size, own.size))
        self.world.wait([self._comm.Iallgather(own, rows)], "the agreement on a step")
        total = np.zeros(own.size)
        for row in rows:
            total += row
        return total


_agreement: Agreement | None = None


def agreement() -> Agreement:
    """The agreement of the current world, made on first use, by all ranks together. Raises WorldError before
    `init()`."""
    global _agreement
    world = current()
    if _agreement is None or _agreement.world is not world:
        _agreement = Agreement(world)
    return _agreement
