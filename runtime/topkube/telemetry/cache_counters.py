"""What open datasets count, in a file of the run's directory: whoever starts the ranks reads it, whatever they do.

The ranks' processes add to it in shared memory; no call, no lock. One file per dataset object: a table of float64, one
row per process, in the order of NAMES.
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
"""Requests and misses count samples; *_bytes are bytes read from a tier, from the store, from other nodes; fetches
count shards; seconds are summed over processes; corruptions count quarantined shards, evictions removed datasets,
takeovers shards fetched because their first fetcher stood still."""
ROWS = 257
PATTERN = "dataset-*.counters"


def read_totals(directory: Path) -> dict[str, float]:
    """The sums over all datasets of all ranks that report to `directory`; empty where none was opened."""
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


def reads(totals: Mapping[str, float]) -> tuple[int, int]:
    """Samples that were read, and those of them that the node did not have."""
    hits_in_memory = totals.get("memory_requests", 0.0) - totals.get("memory_misses", 0.0)
    return int(hits_in_memory + totals.get("disk_requests", 0.0)), int(totals.get("disk_misses", 0.0))
