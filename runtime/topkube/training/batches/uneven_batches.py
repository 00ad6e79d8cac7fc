"""Uneven batches: a small agreement per batch, so that batches count by their samples and all ranks end together.

With a mean loss per batch, one process with the union of the batches has the gradient sum(n_r * g_r) / sum(n_r). The
exchange takes the plain mean over P ranks, so each rank's gradients are scaled by n_r * P / sum(n_r) before they are
accumulated.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from topkube.errors import TrainingError
from topkube.telemetry import phases
from topkube.training.batches.device_batches import begin_batches, move_to_device
from topkube.training.batches.generators import read_generators, set_generators
from topkube.training.batches.replays import KeptStatistics
from topkube.training.batches.samples import SampleCounter, Samples
from topkube.training.ranks.agreement import Agreement
from topkube.training.ranks.queued_agreement import QueuedAgreement
from topkube.world import World

Sums = npt.NDArray[np.float64]
_END = object()


@dataclass(eq=False)
class _Announced:
    """A batch that the ranks have announced: this rank's samples, those that its loader drew, and the agreement of all
    ranks, whose result sets the samples that all loaders drew and the number of ranks that have a batch.
    `before_replay` has the states of the random generators if this rank has no more batches and uses its last one
    again."""

    samples: int = 0
    own_drawn: int = 0
    sums: Future[Sums] | None = None
    drawn: int = 0
    ranks_with_batch: int = 0
    was_stepped: bool = False
    before_replay: dict[str, Any] | None = None


class UnevenBatches:
    """The batches of all ranks of `world`, which have unequal numbers of samples, and of which some ranks have more
    than others. All ranks announce each batch; their agreement on it runs at the same time as forward. `agreement` is
    for other numbers on which the ranks agree in order with their batches."""

    def __init__(self, world: World) -> None:
        self.world, self.agreement = world, QueuedAgreement(world)
        self._size = world.size
        self._last = _Announced()
        """The batch that was announced last, also after the end of its pass."""
        self._in_force: _Announced | None = None
        """The announced batch by which gradients count; None before and after a pass."""
        self.steps_asked = 0
        """The steps that the script has asked for, made or skipped: known without waiting for a device."""
        self._passes = 0
        """The number of passes that `iterate` has begun and not ended: one inside another."""
        self._handed_out: float | None = None
        """The time at which `iterate` yielded a batch whose forward has not ended."""
        self._updating_before = 0.0
        """The seconds of updates until that time."""
        self._statistics = KeptStatistics()

    def announce(
        self, samples: int, *more: float, drawn: int | None = None, has_batch: bool | None = None
    ) -> Future[Sums]:
        """Announce this rank's batch, which counts by `samples`. Its loader drew `drawn` samples for it (by default
        `samples`), and `has_batch` is False if the rank has no more batches (by default, if `samples` is 0). The result
        of the future is the sums over all ranks of (samples, *more)."""
        global _announced
        has_batch = samples > 0 if has_batch is None else has_batch
        drawn = samples if drawn is None else drawn
        numbers = (float(samples), float(drawn), float(has_batch), *more)

        announced = self._last = self._in_force = _Announced(samples, drawn)

        def add_up(agreement: Agreement) -> Sums:
            sums = agreement.sum(numbers)
            announced.drawn, announced.ranks_with_batch = int(sums[1]), int(sums[2])
            return np.delete(sums, (1, 2))

        _announced = weakref.ref(self)
        self._statistics.release()
        if has_batch:
            self._statistics.forget_models()
        announced.sums = self.agreement.submit(add_up)
        return announced.sums

    def batch(self, samples: int) -> int:
        """Announce this rank's batch, with 0 samples if it has no more batches. Return the samples of all ranks."""
        total = int(self.announce(samples).result()[0])
        if total and not samples:
            self._statistics.keep()
        return total

    @property
    def samples(self) -> int:
        """The samples of this rank's batch that was announced last."""
        return self._last.samples

    @property
    def drawn(self) -> int:
        """The samples that the loaders of all ranks drew for the batch that was announced last."""
        if self._last.sums is not None:
            self._last.sums.result()
        return self._last.drawn

    @property
    def own_drawn(self) -> int:
        """The samples that this rank's loader drew for the batch that was announced last."""
        return self._last.own_drawn

    @property
    def was_stepped(self) -> bool:
        """True if the optimizer has made or skipped a step with the batch that was announced last."""
        return self._last.was_stepped

    def note_step(self) -> None:
        """Note that the optimizer has made or skipped a step."""
        self._last.was_stepped = True
        self.steps_asked += 1

    @property
    def _sums(self) -> Future[Sums] | None:
        return self._in_force.sums if self._in_force is not None else None

    @property
    def is_replay(self) -> bool:
        """True if this rank's batch has weight zero, while batches of other ranks count."""
        return not self.samples and self._sums is not None and bool(self._sums.result()[0])

    def find_scale(self) -> float:
        """Return the factor for gradients of the announced batch; 1 if no batch is announced or all batches are
        equal."""
        if self._sums is None:  # another optimizer of these ranks may have announced the batch
            other = _announced() if _announced is not None else None
            if other is None or other is self or other.world is not self.world or other._sums is None:
                return 1.0
            return other.find_scale()
        total = float(self._sums.result()[0])
        return self.samples * self._size / total if total else 1.0

    def end(self) -> None:
        """Forget the announced batch: gradients of all ranks count equally again."""
        self._in_force = None
        self._statistics.release()
        self._statistics.forget_models()

    def note_forward_end(self, now: float) -> None:
        """Note that the first gradient of a batch has arrived: the time until now was forward."""
        self._statistics.restore()
        if self._handed_out is not None:
            phases.current.add_span("forward", self._handed_out, now, self._updating_before)
            self._handed_out = None

    def forget_replay(self) -> None:
        """Undo the effects of a batch of weight zero on random generators and running statistics. A run that resumes
        from a checkpoint may replay another batch, and must stay the same bit for bit."""
        self._statistics.restore()
        if self._last.before_replay is not None:
            set_generators(self._last.before_replay)
            self._last.before_replay = None

    def iterate(
        self,
        loader: Iterable[Any],
        list_numbers: Callable[[], Sequence[float]] = tuple,
        on_announced: Callable[[Future[Sums]], None] = lambda _: None,
        on_opened: Callable[[], None] = lambda: None,
        samples: Samples = None,
        device: torch.device | None = None,
    ) -> Iterator[Any]:
        """Yield the batches of `loader`, on `device` if it is a GPU (`device_batches.py`). Each is announced with the
        numbers of `list_numbers()`, and `on_announced` is called with every agreement; `on_opened` is called when the
        loader's iterator exists. A rank that has no more batches gets its last batch again, with weight zero, until all
        ranks have finished. `samples` is the number of samples in a batch (`samples.py`). After a loop inside another
        one, such as a validation, the batch of the outer loop is in force again."""
        outer = self._in_force if self._passes else None
        iterator: Iterator[Any] = begin_batches(loader, SampleCounter(loader, samples), device)
        last: Any = _END
        on_opened()
        self._passes += 1
        try:
            while True:
                with phases.current.timed("data"):
                    counted = next(iterator, None)
                    batch = _END if counted is None else counted.batch
                    count, drawn = (0, 0) if counted is None else (counted.samples, counted.drawn)
                    sums = self.announce(count, *list_numbers(), drawn=drawn, has_batch=counted is not None)
                    on_announced(sums)
                    if batch is _END:
                        sums.result()
                        if not self._last.ranks_with_batch:
                            return
                if batch is _END and last is _END:
                    last = move_to_device(_make_any_batch(loader), device)
                if batch is _END:
                    self._last.before_replay = read_generators()
                    self._statistics.keep()
                else:
                    last = batch
                self._handed_out, self._updating_before = time.perf_counter(), phases.current.total("update")
                yield last
                self.forget_replay()
        finally:
            self._passes -= 1
            self.end()
            if outer is not None:
                self._last = self._in_force = outer


_announced: weakref.ref[UnevenBatches] | None = None
"""The batches that were announced last in this process."""


def find_batch_scale() -> float:
    """Return the factor by which the gradients of this rank's batch count (`UnevenBatches.find_scale`), for any
    optimizer to which the batch was announced; 1 if no batch is announced."""
    batches = _announced() if _announced is not None else None
    return batches.find_scale() if batches is not None else 1.0


def is_replay_batch() -> bool:
    """Return True if this rank's batch has weight zero, while batches of other ranks count."""
    batches = _announced() if _announced is not None else None
    return batches is not None and batches.is_replay


def _make_any_batch(loader: Iterable[Any]) -> Any:
    """Return a batch with weight zero for a rank that never had a batch: the first sample twice, because batch
    normalization refuses a batch of one sample."""
    dataset, collate = getattr(loader, "dataset", None), getattr(loader, "collate_fn", None)
    try:
        return collate([dataset[0], dataset[0]])  # type: ignore[misc,index]
    except Exception as error:
        raise TrainingError(
            "this rank got no batch, while other ranks train",
            cause="there are fewer batches than ranks",
            next_step="use a larger dataset or fewer ranks",
        ) from error
