"""The heap of this process: what a training step frees stays for the next step.

When memory at the end of the heap becomes free, glibc returns it to the kernel. The next step needs it again, and the
kernel clears each of its pages first: with a model of 5 million parameters, 2,000 to 6,000 pages per step, 2 to 5% of
the time of a step on a CPU.
"""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
"""M_TRIM_THRESHOLD and M_MMAP_THRESHOLD of glibc's malloc.h."""
_LARGEST_HEAP_BLOCK = 32 << 20
"""Blocks of this size and more have pages of their own, which are always returned: glibc allows no larger limit. It
raises the limit up to there by itself, but no longer after M_TRIM_THRESHOLD was set."""
_LEAST_KEPT_BYTES, _MOST_KEPT_BYTES = 2 * _LARGEST_HEAP_BLOCK, 1 << 30
"""glibc may keep the smaller of these by itself, once a large block was freed."""
_KEPT_SHARE = 16


def count_kept_bytes(ranks: int, cgroups: Path = Path("/sys/fs/cgroup")) -> int:
    """Return how many free bytes the heap of each of `ranks` ranks on this machine may keep: together a sixteenth of
    the memory of the machine, or of what the cgroup (version 2 or 1) grants, but each at least 64 MiB and at most
    1 GiB."""
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    for name in ("memory.max", "memory/memory.limit_in_bytes"):
        try:
            memory = min(memory, int((cgroups / name).read_text()))
        except (OSError, ValueError):  # there is no such cgroup, or no limit ("max")
            continue
    return min(max(memory // (_KEPT_SHARE * ranks), _LEAST_KEPT_BYTES), _MOST_KEPT_BYTES)


def keep_freed_memory(kept_bytes: int) -> bool:
    """Let the heap keep up to `kept_bytes` of free memory at its end. Return False if the C library is not glibc."""
    try:
        set_option = ctypes.CDLL(None).mallopt
    except AttributeError:
        return False
    return bool(set_option(_MMAP_THRESHOLD, _LARGEST_HEAP_BLOCK) and set_option(_TRIM_THRESHOLD, kept_bytes))
