"""The counters of the cache, in a table that a rank shares with the workers of its data loader.

Every process has its own row in shared memory, so counting needs no lock. Telemetry reads `sum_rows()`. The names are
those of the metrics.
"""

from __future__ import annotations

import mmap
import os
import uuid
from pathlib import Path

import numpy as np

from topkube.telemetry.cache_counters import NAMES, PATTERN, ROWS

_COLUMNS = {name: column for column, name in enumerate(NAMES)}
_REQUESTS, _BYTES = _COLUMNS["memory_requests"], _COLUMNS["memory_bytes"]


class CacheCounters:
    """The table of one dataset object and its forks. If `directory` is given and can be written, the table is a file in
    it, which other processes can read."""

    def __init__(self, directory: Path | None = None) -> None:
        memory = _map_memory(directory)
        self._table = np.frombuffer(memory, np.float64).reshape(ROWS, len(NAMES))
        self._cells = memoryview(memory).cast("d")  # single cells of a memoryview are faster than those of an array
        self._main = os.getpid()
        self._row: tuple[int, int] = (self._main, 0)

    def add(self, name: str, amount: float = 1.0) -> None:
        """Add `amount` to the counter `name` of this process."""
        self._cells[self._find_row() * len(NAMES) + _COLUMNS[name]] += amount

    def add_memory_hits(self, samples: int, size: int) -> None:
        """Count the samples and bytes of a batch that came from the memory tier."""
        first = self._find_row() * len(NAMES)
        self._cells[first + _REQUESTS] += samples
        self._cells[first + _BYTES] += size

    def _find_row(self) -> int:
        """Return the row of this process: row 0 for the process that created the table, another row for a fork."""
        process = os.getpid()
        if self._row[0] != process:
            self._row = (process, 1 + process % (ROWS - 1))
        return self._row[1]

    def sum_rows(self) -> dict[str, float]:
        """Return the sum of each counter over this process and its forks."""
        return dict(zip(NAMES, self._table.sum(axis=0).tolist(), strict=True))


def _map_memory(directory: Path | None) -> mmap.mmap:
    size = ROWS * len(NAMES) * 8
    if directory is not None:
        try:
            path = directory / PATTERN.replace("*", uuid.uuid4().hex)
            file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
            try:
                os.posix_fallocate(file, 0, size)
                return mmap.mmap(file, size)
            finally:
                os.close(file)
        except OSError:  # training continues without these metrics
            pass
    return mmap.mmap(-1, size)
