"""Agreements of all ranks in the queue of the communication thread."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from topkube.training.ranks import communication_thread
from topkube.training.ranks.agreement import Agreement, open_agreement
from topkube.world import World

T = TypeVar("T")


class QueuedAgreement:
    """Agreements of all ranks of `world` in the communication thread, after all earlier work: they have the same place
    among the exchanges of gradients on all ranks. All ranks call a method together, and every method but `submit` waits
    for its result. Values and results are those of `Agreement`."""

    def __init__(self, world: World) -> None:
        self.world, self._agreement = world, open_agreement(world)

    def submit(self, ask: Callable[[Agreement], T]) -> Future[T]:
        """Have the communication thread compute `ask(agreement)`, and do not wait: the future holds the result. A world
        of one rank needs no thread."""
        if self.world.size > 1:
            return communication_thread.submit(lambda: ask(self._agreement))
        return communication_thread.make_done(ask(self._agreement))

    def run(self, ask: Callable[[Agreement], T]) -> T:
        """Return `ask(agreement)`, which the communication thread computes."""
        return communication_thread.run(lambda: ask(self._agreement))

    def sum(self, values: Iterable[float]) -> npt.NDArray[np.float64]:
        """Return the sums of `values` over all ranks, shape (len(values),), float64."""
        numbers = [float(value) for value in values]
        return np.array(numbers) if self.world.size == 1 else self.run(lambda agreement: agreement.sum(numbers))

    def maximum(self, values: Iterable[float]) -> npt.NDArray[np.float64]:
        """Return the largest of all ranks' numbers, element by element: shape (len(values),), float64."""
        numbers = [float(value) for value in values]
        return np.array(numbers) if self.world.size == 1 else self.run(lambda agreement: agreement.maximum(numbers))

    def gather(self, values: Sequence[float]) -> npt.NDArray[np.float64]:
        """Return the `values` of all ranks, shape (ranks, len(values)), float64."""
        return self.run(lambda agreement: agreement.gather(values))

    def broadcast(self, values: Sequence[float], root: int) -> npt.NDArray[np.float64]:
        """Return `root`'s values, shape (len(values),), float64."""
        return self.run(lambda agreement: agreement.broadcast(values, root))
