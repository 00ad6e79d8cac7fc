"""A save of a checkpoint, in threads beside training: rank 0 makes its folder, each rank writes its files, then rank 0
publishes it."""

from __future__ import annotations

import functools
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeVar

from topkube.errors import CheckpointError, StorageError
from topkube.training.checkpoint.format import state_file
from topkube.training.checkpoint.format.state_file import FileDigest, Tally, write_state

T = TypeVar("T")


def run_in_thread(work: Callable[[], T]) -> Future[T]:
    """Start `work` in a daemon thread. The future holds its result, or the error that it raised. A process that the
    script forks meanwhile does not have the thread and does not need it."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, name="topkube-checkpoint", daemon=True).start()
    return future


@dataclass
class Save:
    """A save of `step` into `folder`, in three stages: rank 0 makes the folder, every rank writes its files, and rank 0
    publishes them. No stage runs in the thread that trains, because storage may hang at any call. `work` is this rank's
    part of the current stage. `written` holds this rank's files when they are on disk."""

    step: int
    folder: Path
    work: Future[Any]
    tally: Tally
    states: dict[str, Any]
    """File name -> encoded state, of the files that this rank has not written."""
    written: dict[str, FileDigest] = field(default_factory=dict)
    stage: Literal["opening", "writing", "publishing"] = "opening"

    @classmethod
    def begin(
        cls, step: int, folder: Path, states: dict[str, Any], open_folder: Callable[[Tally], None] | None
    ) -> Save:
        """Start the first stage: `open_folder` on rank 0, nothing on other ranks."""
        tally = Tally()
        return cls(step, folder, _start(open_folder and functools.partial(open_folder, tally)), tally, states)

    def write(self, prepare: Callable[[], None]) -> None:
        """Start the second stage: `prepare`, then write all states."""

        def write() -> None:
            prepare()
            while self.states:
                name = next(iter(self.states))
                self.written[name] = write_state(self.folder / name, self.states.pop(name), self.tally)

        self.stage, self.work = "writing", run_in_thread(write)

    def publish(self, work: Callable[[], None] | None) -> None:
        """Start the third stage: `work` on rank 0, nothing on other ranks."""
        self.stage, self.work = "publishing", _start(work)


def _start(work: Callable[[], None] | None) -> Future[None]:
    """Start `work` in a thread. Without work, the future is done."""
    if work is not None:
        return run_in_thread(work)
    done: Future[None] = Future()
    done.set_result(None)
    return done


def await_files(folder: Path, files: dict[str, FileDigest]) -> None:
    """Wait until rank 0 sees all `files` as they were written: the file of another node may appear late. Lists
    the whole folder at once, and checks again only the files that were missing. Raises CheckpointError if the time
    passes (state_file.SEEN_WITHIN_SECONDS for all files together), StorageError if the folder was removed."""
    unseen = {name: written.bytes for name, written in files.items()}
    end, pause = time.monotonic() + state_file.SEEN_WITHIN_SECONDS, 0.01
    while True:
        try:
            with os.scandir(folder) as entries:
                for entry in entries:
                    if entry.name in unseen and entry.stat().st_size == unseen[entry.name]:
                        del unseen[entry.name]
        except OSError as error:
            if not state_file.is_missing(error):
                raise
            if not folder.exists():
                raise _make_removed_error(folder) from error
        if not unseen:
            return
        if time.monotonic() >= end:
            raise CheckpointError(
                f"rank 0 does not see {folder / min(unseen)} as it was written ({len(unseen)} of {len(files)} files)",
                cause="the directory is not the same on all nodes",
                next_step="use storage that all nodes share (a ReadWriteMany volume)",
            )
        time.sleep(pause)
        pause = min(2 * pause, 0.5)


def _make_removed_error(folder: Path) -> StorageError:
    return StorageError(
        f"the temporary folder {folder} was removed while the checkpoint was written",
        cause="a clean-up job, a person, or a later run of this job that took over",
        next_step="exclude names that begin with .step- from clean-ups of the directory",
    )
