"""Dense all-reduce of float64: for parameters in double precision, which no kernel of the fast path takes."""

from __future__ import annotations

import numpy as np

from topkube.arrays import Array
from topkube.telemetry import phases
from topkube.world import World


def average_doubles(world: World, x: Array) -> bool:
    """Replace `x`, 1-D float64, by its mean over all ranks. Returns True if the result is finite.

    Each rank receives its segment from all ranks, adds in rank order (the same bits on every rank) and sends the mean
    back: 2(P-1)/P of the bytes, as in a ring. Raises CollectiveTimeout after the world's deadline.
    """
    world.enter()
    if world.size > 1:
        segment = -(-x.size // world.size)
        padded = np.zeros((world.size, segment))
        padded.reshape(-1)[: x.size] = x
        parts = np.empty_like(padded)
        with phases.current.timed("inter"):
            world.wait([world.comm.Ialltoall(padded, parts)], "an all-reduce of float64")
            total = np.zeros(segment)
            for part in parts:
                total += part
            total /= world.size
            world.wait([world.comm.Iallgather(total, padded)], "an all-reduce of float64")
        x[:] = padded.reshape(-1)[: x.size]
        phases.current.sent(inter=2 * (world.size - 1) * segment * 8, dense=2 * (world.size - 1) * segment * 8)
    return bool(np.isfinite(x).all())
