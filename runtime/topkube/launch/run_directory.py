"""The directory of a run on this machine: its reports, logs and checkpoints. One run at a time uses it."""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO

from topkube.errors import LaunchError
from topkube.job import TrainingJob

MPIEXEC_LOG = "mpiexec.log"
_MARK = ".topkube-run"
"""The file that shows that a directory is a run's, and that a run locks while it lasts."""
_REPORTS = (
    "rank-*.json",
    "rank-*.log",
    "rank-*.part",
    "metrics-*.bin",
    ".*.part",
    "progress.jsonl",
    MPIEXEC_LOG,
    "summary.json",
    "plot.png",
)
"""What a new run removes of an earlier one."""


@contextlib.contextmanager
def open_fresh_directory(chosen: Path | None, job: TrainingJob, now: time.struct_time) -> Iterator[Path]:
    """Yield the run's directory: `chosen`, or runs/NAME-TIME. Create it if needed. Reports of an earlier run in it are
    removed; its checkpoints stay. Until the context ends, no other run may use it.

    Raises LaunchError if the directory cannot be written, if another run uses it, or if it is not empty and not the
    directory of an earlier run.
    """
    directory = chosen or Path("runs") / f"{job.name}-{time.strftime('%Y%m%d-%H%M%S', now)}"
    with contextlib.ExitStack() as stack:
        try:
            if chosen is None:
                directory = _create_new_directory(directory)
            elif _holds_other_files(chosen):
                raise LaunchError(
                    f"{directory} is not empty, and it is not the directory of an earlier run",
                    exit_code=2,
                    cause="the directory holds your own files, which the run could overwrite",
                    next_step="pass another directory with --run-directory",
                )
            directory.mkdir(parents=True, exist_ok=True)
            _lock(stack.enter_context((directory / _MARK).open("a")), directory)
            for pattern in _REPORTS:
                for old in directory.glob(pattern):
                    old.unlink()
            (directory / "job.yaml").write_text(job.to_yaml(), encoding="utf-8")
        except OSError as error:
            raise LaunchError(
                f"the run directory {directory} cannot be written: {error.strerror}",
                exit_code=2,
                next_step="pass another directory with --run-directory",
            ) from None
        yield directory


def _create_new_directory(path: Path) -> Path:
    """Create a directory at `path`, or with a number at the end if there is one. Return its path."""
    for number in itertools.count(1):
        numbered = path if number == 1 else path.with_name(f"{path.name}-{number}")
        with contextlib.suppress(FileExistsError):
            numbered.mkdir(parents=True)
            return numbered
    raise AssertionError("there is always another number")


def _holds_other_files(directory: Path) -> bool:
    marks = (directory / _MARK, directory / MPIEXEC_LOG)
    return directory.is_dir() and any(directory.iterdir()) and not any(mark.exists() for mark in marks)


def _lock(file: TextIO, directory: Path) -> None:
    """Lock the open mark of a run's directory until it is closed. Raises LaunchError if another run has locked it."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise LaunchError(
            f"another run uses {directory}",
            exit_code=2,
            cause="a `topkube run` with the same --run-directory has not ended",
            next_step="wait for it, or pass another directory with --run-directory",
        ) from None
    except OSError:
        return  # a file system without locks
