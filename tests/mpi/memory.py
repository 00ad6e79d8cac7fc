"""The memory of a rank."""

from __future__ import annotations

from pathlib import Path

at_start = 0.0
"""MiB that this process held for itself when it became a rank; what it shares with others that were forked from the
same process does not count."""


def measure_own_memory() -> float:
    """Return the MiB that this process alone holds, and its part of memory that ranks share."""
    kilobytes = dict(line.split()[:2] for line in Path("/proc/self/smaps_rollup").read_text().splitlines()[1:])
    return sum(int(kilobytes.get(name, 0)) for name in ("Private_Clean:", "Private_Dirty:", "Pss_Shmem:")) / 1024
