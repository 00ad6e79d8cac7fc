"""What the cache counts, in one table that a rank shares with its data loader's workers.

Every process has a row of its own in anonymous shared memory, so that counting is an addition. `totals()` is what
telemetry reads; the names are the metrics' own.
"""

from __future__ import annotations

import mmap
import os

import numpy as np

NAMES = (
    "memory_requests",
    "memory_misses",
    "disk_requests",
    "disk_misses",
    "memory_bytes",
    "disk_bytes",
    "remote_bytes",
    "peer_bytes",
    "fetches",
    "fetch_seconds",
    "waits_seconds",
    "evictions",
    "corruptions",
    "takeovers",
)
"""Requests and misses count samples; *_bytes are bytes read from a tier, from the store, from other nodes; fetches
count shards; seconds are summed over processes; corruptions count quarantined shards, evictions removed datasets,
takeovers shards fetched because their first fetcher stood still."""
_ROWS = 257
_COLUMNS = {name: column for column, name in enumerate(NAMES)}


class Counters:
    """One table per dataset object and its forks."""

    def __init__(self) -> None:
        self._table = np.frombuffer(mmap.mmap(-1, _ROWS * len(NAMES) * 8), np.float64).reshape(_ROWS, len(NAMES))
        self._main = os.getpid()
        self._row: tuple[int, int] = (self._main, 0)

    def add(self, name: str, amount: float = 1.0) -> None:
        self._table[self._own_row(), _COLUMNS[name]] += amount

    def _own_row(self) -> int:
        process = os.getpid()
        if self._row[0] != process:
            self._row = (process, 1 + process % (_ROWS - 1))
        return self._row[1]

    def totals(self) -> dict[str, float]:
        """The sums over this process and its forks."""
        return dict(zip(NAMES, self._table.sum(axis=0).tolist(), strict=True))
