"""A rank's heartbeat: the number of collectives that it has entered, in a file that other processes can read.

The file in the run's directory has eight bytes and is written in place at every collective, in about a microsecond. It
shows whether a run makes progress, whatever the script reports, and which rank is behind the others. For a library that
does not use TopKube's collectives, rank 0 counts other signs of life.
"""

from __future__ import annotations

import contextlib
import functools
import os
import struct
import threading
from pathlib import Path

_COUNT = struct.Struct("<Q")


class Heartbeat:
    """The heartbeat of this rank. It counts the collectives of all worlds that the rank belongs to. If the directory
    cannot be written, there is no file, and the run continues without it."""

    def __init__(self, directory: Path, rank: int) -> None:
        self._collectives = 0
        self._lock = threading.Lock()
        self._file = -1
        with contextlib.suppress(OSError):
            directory.mkdir(parents=True, exist_ok=True)
            flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC
            self._file = os.open(_find_path(directory, rank), flags, 0o644)

    def beat(self) -> None:
        """Count a collective. Any thread may call this."""
        with self._lock:
            self._collectives += 1
            if self._file >= 0:
                try:
                    os.pwrite(self._file, _COUNT.pack(self._collectives), 0)
                except OSError:  # a full disk: the last count stays
                    self._file = -1


@functools.cache
def open_heartbeat(directory: Path, rank: int) -> Heartbeat:
    """Return the heartbeat of this process: the same object at each call, so that its count only grows."""
    return Heartbeat(directory, rank)


def read(directory: Path, rank: int) -> int:
    """Return the number of collectives that the rank has entered; 0 if there is no file."""
    with contextlib.suppress(OSError, struct.error):
        return int(_COUNT.unpack(_find_path(directory, rank).read_bytes())[0])
    return 0


def read_time(directory: Path, rank: int) -> float | None:
    """Return the Unix time of the rank's last heartbeat; None if there was none."""
    with contextlib.suppress(OSError):
        status = _find_path(directory, rank).stat()
        return status.st_mtime if status.st_size else None
    return None


def _find_path(directory: Path, rank: int) -> Path:
    return directory / f"rank-{rank}.pulse"
