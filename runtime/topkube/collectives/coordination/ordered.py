"""Sums in rank order: every rank gets the same bits, whatever the timing of messages.

MPI's own all-reduce may add in any order. Here every rank gets all values and adds them up itself. If there are too
many values, each rank adds its own to a partial result and sends it to the next rank, from rank 0 on, and the last rank
sends the result to all. Memory, connections and messages never grow with the square of the ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from topkube.world import WaitSeries, World

GATHERED = 1 << 18
"""Up to this many values of all ranks together, every rank gets all of them."""
_PIECE = 1 << 20
"""Values that travel along the ranks in one message."""
_TAG = 11

Values = npt.NDArray[Any]


def fold(
    world: World, comm: Any, own: Values, series: WaitSeries, what: str, combine: Callable[..., Any] = np.add
) -> Values:
    """Return `own` (1-D, the same length and dtype on all ranks) of all ranks, combined from rank 0 on. All ranks of
    `comm`, which are those of `world`, call it. Raises CollectiveTimeout after the world's deadline."""
    if world.size == 1:
        return own.copy()
    if own.size * world.size <= GATHERED:
        rows = np.empty((world.size, own.size), own.dtype)
        world.wait([comm.Iallgather(own, rows)], what, series=series)
        total: Values = rows[0].copy()
        for row in rows[1:]:
            combine(total, row, out=total)
        return total
    total = own.copy()
    for start in range(0, own.size, _PIECE):
        piece = total[start : start + _PIECE]
        if world.rank > 0:
            partial = np.empty_like(piece)
            world.wait([comm.Irecv(partial, world.rank - 1, _TAG)], what, series=series)
            combine(partial, piece, out=piece)
        if world.rank < world.size - 1:
            world.wait([comm.Isend(piece, world.rank + 1, _TAG)], what, series=series)
    for start in range(0, own.size, _PIECE):
        world.wait([comm.Ibcast(total[start : start + _PIECE], root=world.size - 1)], what, series=series)
    return total
