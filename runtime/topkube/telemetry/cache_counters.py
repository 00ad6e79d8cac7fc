"""The counters of open datasets, in files of the run's directory. The process that starts the ranks reads them.

The processes of the ranks count in shared memory without a lock. There is one file per dataset object: a table of
float64 with one row per process and one column per entry of NAMES.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping
from pathlib import Path

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
"""Requests and misses count samples. *_bytes are bytes read from a tier, from the store, or from other nodes. Fetches
count shards. Seconds are sums over processes. Corruptions count quarantined shards, evictions count removed datasets,
and takeovers count shards that were fetched because the process that had begun made no progress."""
ROWS = 257
PATTERN = "dataset-*.counters"


def read_totals(directory: Path) -> dict[str, float]:
    """Return the sums over all datasets of all ranks that report to `directory`; empty if no dataset was opened."""
    total: dict[str, float] = {}
    for path in directory.glob(PATTERN):
        table = array("d")
        try:
            table.frombytes(path.read_bytes())
        except (OSError, ValueError):
            continue
        if len(table) == ROWS * len(NAMES):
            for column, name in enumerate(NAMES):
                total[name] = total.get(name, 0.0) + sum(table[column :: len(NAMES)])
    return total


def count_reads(totals: Mapping[str, float]) -> tuple[int, int]:
    """Return the number of samples that were read, and the number of those that were not in the node's cache."""
    hits_in_memory = totals.get("memory_requests", 0.0) - totals.get("memory_misses", 0.0)
    return int(hits_in_memory + totals.get("disk_requests", 0.0)), int(totals.get("disk_misses", 0.0))
