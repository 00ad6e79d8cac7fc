"""Stages that all ranks run together: a failure on one rank raises an error on all ranks, so that no rank waits for
another."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt

from topkube.errors import CheckpointError, StorageError
from topkube.training.checkpoint.format.state_file import Damaged, Tally, is_missing
from topkube.training.ranks import communication_thread
from topkube.training.ranks.agreement import name_ranks, open_agreement
from topkube.world import World

_CHECK_SECONDS = 0.25
"""The longest pause between two agreements of ranks that wait for the storage."""
_SUCCEEDED, _DAMAGED, _STORAGE, _OTHER = range(4)
"""The outcome of a stage on a rank."""


class CheckpointSkipped(Exception):
    """All ranks skip a checkpoint, because files are damaged. `reason` is empty if only other ranks saw the damage."""

    def __init__(self, reason: str) -> None:
        self.reason = reason
        super().__init__(reason)


class Stages:
    """Stages of all ranks. All ranks call every method together."""

    def __init__(self, world: World) -> None:
        self._world = world

    def gather(self, values: Sequence[float]) -> npt.NDArray[np.float64]:
        """Return the `values` of all ranks, shape (ranks, len(values)), float64. The communication thread gathers them
        in order with the exchanges of gradients, so that the order is the same on all ranks."""
        if self._world.size == 1:
            return np.array([values], np.float64)
        agreement = open_agreement()
        return communication_thread.run(lambda: agreement.gather(values))

    def wait(self, work: Future[Any], tally: Tally) -> bool:
        """Wait until `work`, in which this rank writes or reads the bytes of `tally`, is done on all ranks. Return True
        then, and False on all ranks if rank 0 sees no rank move a byte for the deadline of collectives. The ranks agree
        at intervals, so that a rank with slow storage does not count as missing."""
        pause, last_progress, last_total, is_given_up = 1e-3, time.monotonic(), -1.0, False
        while True:
            wait([work], pause)
            rows = self.gather([work.done(), tally.bytes, is_given_up])
            if rows[:, 0].all():
                return True
            if rows[0, 2]:
                return False
            if (total := float(rows[:, 1].sum())) != last_total:
                last_progress, last_total = time.monotonic(), total
            is_given_up = time.monotonic() - last_progress > self._world.deadline_seconds
            pause = min(2 * pause, _CHECK_SECONDS)

    def run(self, stage: Callable[[], None], what: str) -> None:
        """Run a stage on every rank. Raises as `report` does."""
        problem: BaseException | None = None
        try:
            stage()
        except Exception as error:
            problem = error
        self.report(problem, what)

    def report(
        self, problem: BaseException | None, what: str, numbers: Sequence[float] = ()
    ) -> npt.NDArray[np.float64]:
        """Return the `numbers` of all ranks, shape (ranks, len(numbers)), if `problem` is None on every rank.
        Otherwise raises on all ranks: CheckpointSkipped if every failure is a damaged file, StorageError if every
        failure is a damaged file or the storage's, else CheckpointError."""
        rows = self.gather([_classify(problem), *numbers])
        failed = [int(rank) for rank in np.flatnonzero(rows[:, 0] != _SUCCEEDED)]
        if failed:
            self._fail(problem, what, {int(kind) for kind in rows[:, 0]} - {_SUCCEEDED}, failed)
        return rows[:, 1:]

    def _fail(self, problem: BaseException | None, what: str, kinds: set[int], failed: list[int]) -> NoReturn:
        if isinstance(problem, CheckpointError) and (_OTHER not in kinds or not isinstance(problem, StorageError)):
            raise problem
        if kinds == {_DAMAGED}:
            raise CheckpointSkipped(str(problem) if problem is not None else "")
        error = CheckpointError if _OTHER in kinds else StorageError
        if problem is not None:
            cause, next_step = _find_advice(problem)
            raise error(f"{what}: {problem}", cause=cause, next_step=next_step) from problem
        failure = error(
            f"{what}: {name_ranks(failed)} failed",
            cause="no space, no permission, or a directory that not all nodes share",
            next_step=f"read the output of {name_ranks(failed)}",
        )
        failure.is_of_others = True
        raise failure


def _classify(problem: BaseException | None) -> int:
    if problem is None:
        return _SUCCEEDED
    if isinstance(problem, Damaged):
        return _DAMAGED
    return _STORAGE if isinstance(problem, OSError | StorageError) else _OTHER


def _find_advice(problem: BaseException) -> tuple[str, str]:
    """Return the likely cause of `problem`, and the next step."""
    if isinstance(problem, PermissionError):
        return "this user may not write there, or the volume is mounted read-only", "check the directory's permissions"
    if isinstance(problem, NotADirectoryError):
        return "a part of the directory's path is a file", "choose another checkpoint directory"
    if is_missing(problem):
        return (
            "a clean-up job, a person, or a later run of this job removed the temporary folder while it was written",
            "exclude names that begin with .step- from clean-ups of the directory",
        )
    if isinstance(problem, OSError):
        return "no space, or a read-only or failing disk", "check the file system of the directory"
    return "state that cannot be saved, or a file that was changed meanwhile", "check the state that the message names"
