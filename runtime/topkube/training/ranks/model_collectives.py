"""Collectives that a model enters in its forward and its backward, in the thread that computes."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from topkube.errors import MismatchError
from topkube.world import WaitSeries, World

_KEY = "collectives of the model"
"""The key of this process's ModelCollectives in the world's cache."""


class ModelCollectives:
    """Sums and broadcasts over all ranks. They have their own communicator, because the communication thread exchanges
    buckets at the same time. All ranks create it together, and enter its collectives in the same order.

    Each collective carries a digest of `what`, its name in messages, and of `details`. If ranks enter different
    collectives, at least one of them raises MismatchError, which ends all ranks.
    """

    def __init__(self, world: World) -> None:
        self._world = world
        world.enter(WaitSeries.MODEL)
        self._comm, request = world.comm.Idup()
        world.wait([request], "the first collective of a model", series=WaitSeries.MODEL)
        world.handles.append(self._comm)

    def sum(self, values: npt.NDArray[np.float64], what: str, details: str = "") -> npt.NDArray[np.float64]:
        """Return the sum over ranks of `values`, shape (n,), float64: the same bits on every rank, as MPI requires of
        an all-reduce. Raises CollectiveTimeout after the world's deadline."""
        own = np.concatenate([[_digest(what + details)], values])
        total = np.empty_like(own)
        self._wait(lambda: self._comm.Iallreduce(own, total), what)
        if total[0] != own[0] * self._world.size:  # whole numbers below 2**53: exact
            raise _make_mismatch_error(what)
        return total[1:]

    def broadcast(self, data: npt.NDArray[np.uint8], root: int, what: str, details: str = "") -> npt.NDArray[np.uint8]:
        """Return `root`'s `data`, shape (n,), uint8. Raises CollectiveTimeout after the world's deadline."""
        own = np.concatenate([np.array([_digest(what + details)]).view(np.uint8), data])
        sent = own.copy() if self._world.rank == root else np.empty_like(own)
        self._wait(lambda: self._comm.Ibcast(sent, root=root), what)
        if (sent[:8] != own[:8]).any():
            raise _make_mismatch_error(what)
        return sent[8:]

    def _wait(self, start: Any, what: str) -> None:
        from mpi4py import MPI

        self._world.enter(WaitSeries.MODEL)
        try:
            self._world.wait([start()], what, series=WaitSeries.MODEL)
        except MPI.Exception as error:  # lengths differ
            raise _make_mismatch_error(what) from error


def open_model_collectives(world: World) -> ModelCollectives:
    """Return the ModelCollectives of `world`. All ranks create it together, on first use."""
    if _KEY not in world.cache:
        world.cache[_KEY] = ModelCollectives(world)
    collectives: ModelCollectives = world.cache[_KEY]
    return collectives


def _digest(text: str) -> float:
    """Return a hash of 32 bits, so that the sum over ranks is exact."""
    return float(xxhash.xxh32_intdigest(text.encode()))


def _make_mismatch_error(what: str) -> MismatchError:
    return MismatchError(
        f"this rank entered {what}, and another rank entered another collective of its model",
        cause="ranks use different layers in the same step, or their models differ",
        next_step="build the same model on every rank, and call the same layers in the same order",
    )
