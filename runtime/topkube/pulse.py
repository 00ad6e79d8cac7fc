"""A rank's pulse: how many collectives it has entered, where whoever watches over the ranks can read it.

A file of eight bytes in the run's directory, written in place at every collective: about a microsecond. It tells a run
that goes on from one that hangs, whatever the script reports, and which rank has come less far than the others.
"""

from __future__ import annotations

import contextlib
import os
import struct
from pathlib import Path

_COUNT = struct.Struct("<Q")


class Pulse:
    """A rank's own. Where the directory cannot be written there is none, and the run goes on without it."""

    def __init__(self, directory: Path, rank: int) -> None:
        self._file = -1
        with contextlib.suppress(OSError):
            directory.mkdir(parents=True, exist_ok=True)
            flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC
            self._file = os.open(_path(directory, rank), flags, 0o644)

    def beat(self, collectives: int) -> None:
        """Notes how many there were so far."""
        if self._file >= 0:
            try:
                os.pwrite(self._file, _COUNT.pack(collectives), 0)
            except OSError:  # a full disk: the last count stays
                self._file = -1


def read(directory: Path, rank: int) -> int:
    """How many collectives the rank has entered; 0 where it has not said."""
    with contextlib.suppress(OSError, struct.error):
        return int(_COUNT.unpack(_path(directory, rank).read_bytes())[0])
    return 0


def _path(directory: Path, rank: int) -> Path:
    return directory / f"rank-{rank}.pulse"
