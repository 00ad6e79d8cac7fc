"""Turns: one small agreement per batch, so that uneven batches count by their samples and all ranks end together.

With a mean loss per batch, one process with the union of the batches has the gradient sum(n_r * g_r) / sum(n_r). The
exchange takes the plain mean over P ranks, so each rank's gradients are scaled by n_r * P / sum(n_r) before they are
accumulated.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from topkube.errors import TrainingError
from topkube.telemetry import phases
from topkube.training.agreement import agreement
from topkube.training.generators import generators, set_generators
from topkube.training.schedule import schedule
from topkube.world import World

Sums = npt.NDArray[np.float64]
_END = object()


class Turns:
    """The batches of all ranks, in step. The agreement on a batch travels while forward runs."""

    def __init__(self, world: World) -> None:
        self.agree = agreement()
        self._size = world.size
        self.samples = 0
        self._sums: Future[Sums] | None = None
        self._handed_out: float | None = None
        self._before_replay: dict[str, Any] | None = None

    def announce(self, samples: int, *more: float) -> Future[Sums]:
        """Announces this rank's batch; sums over all ranks come of (samples, *more)."""
        numbers = (float(samples), *more)
        self.samples = samples
        self._sums = schedule().submit(lambda: self.agree(numbers)) if self._size > 1 else _ready(np.array(numbers))
        return self._sums

    def sums(self, values: Iterable[float]) -> Sums:
        """Sums of `values` over all ranks, after everything that was handed in before; waits for them."""
        numbers = [float(value) for value in values]
        if self._size == 1:
            return np.array(numbers)
        return schedule().submit(lambda: self.agree(numbers)).result()

    def scale(self) -> float:
        """The factor for gradients of the announced batch; 1 where none is announced or all batches are equal."""
        if self._sums is None:
            return 1.0
        total = float(self._sums.result()[0])
        return self.samples * self._size / total if total else 1.0

    def end(self) -> None:
        """No batch is announced any more: gradients of all ranks count alike again."""
        self._sums = None

    def forward_ended(self, now: float) -> None:
        """The first gradient of a batch has come: until now it was forward."""
        if self._handed_out is not None:
            phases.current.add("forward", now - self._handed_out)
            self._handed_out = None

    def forget_replay(self) -> None:
        """After a batch of weight zero: the random numbers that it drew were not drawn, so that a run that goes on
        from a checkpoint, and may replay another batch, stays the same bit for bit."""
        if self._before_replay is not None:
            set_generators(self._before_replay)
            self._before_replay = None

    def batches(
        self,
        loader: Iterable[Any],
        more: Callable[[], Sequence[float]] = tuple,
        seen: Callable[[Future[Sums]], None] = lambda _: None,
        opened: Callable[[], None] = lambda: None,
    ) -> Iterator[Any]:
        """The batches of `loader`, each announced with `more()`; `seen` gets every agreement. A rank that has run out
        gets its last batch again, with weight zero, until all have."""
        iterator, last = iter(loader), _END
        opened()
        try:
            while True:
                with phases.current.timed("data"):
                    batch = next(iterator, _END)
                    sums = self.announce(0 if batch is _END else samples_of(batch), *more())
                    seen(sums)
                    if batch is _END and not sums.result()[0]:
                        return
                if batch is _END and last is _END:
                    last = _any_batch(loader)
                if batch is _END:
                    self._before_replay = generators()
                else:
                    last = batch
                self._handed_out = time.perf_counter()
                yield last
                self.forget_replay()
        finally:
            self.end()


def _ready(sums: Sums) -> Future[Sums]:
    future: Future[Sums] = Future()
    future.set_result(sums)
    return future


def samples_of(batch: Any) -> int:
    """Samples in a batch: the first dimension of the first tensor in it, or its length."""
    if isinstance(batch, torch.Tensor | np.ndarray):
        return int(batch.shape[0]) if batch.ndim else 1
    if isinstance(batch, Mapping):
        return samples_of(next(iter(batch.values()))) if batch else 0
    if isinstance(batch, list | tuple) and batch and not isinstance(batch[0], int | float | str | bytes):
        return samples_of(batch[0])
    return len(batch)


def _any_batch(loader: Iterable[Any]) -> Any:
    """A batch for a rank that never had one: its first sample, computed with and counted for nothing."""
    dataset, collate = getattr(loader, "dataset", None), getattr(loader, "collate_fn", None)
    try:
        return collate([dataset[0]])  # type: ignore[misc,index]
    except Exception as error:
        raise TrainingError(
            "this rank got no batch at all, while others train",
            cause="fewer batches than ranks",
            next_step="use a larger dataset or fewer ranks",
        ) from error
