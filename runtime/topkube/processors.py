"""The processors of this machine, and how the ranks that run on it share them."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path


def count_cores(cgroups: Path = Path("/sys/fs/cgroup")) -> int:
    """Return how many processors this process may use: those of its affinity, limited by its cgroup (version 2 or
    1)."""
    return limit_to_cgroup(len(os.sched_getaffinity(0)), cgroups)


def limit_to_cgroup(usable: int, cgroups: Path = Path("/sys/fs/cgroup")) -> int:
    """Return how many of `usable` processors the cgroup (version 2 or 1) grants, at least 1."""
    limits = [line.split() for line in _read_lines(cgroups / "cpu.max")]
    limits += [[*_read_lines(cgroups / "cpu/cpu.cfs_quota_us"), *_read_lines(cgroups / "cpu/cpu.cfs_period_us")]]
    for quota, period in (limit for limit in limits if len(limit) == 2):
        if quota.isdigit() and int(period):  # neither "max" nor -1
            return max(1, min(usable, round(int(quota) / int(period))))
    return usable


def count_threads_per_rank(processors: int, ranks: int) -> int:
    """Return how many threads each of `ranks` ranks may run on `processors` processors that all of them share, whatever
    node they belong to: at least 1."""
    return max(1, processors // ranks)


def count_own_threads(own: frozenset[int], affinities: Sequence[frozenset[int]], granted: int) -> int:
    """Return how many threads a rank with the affinity `own` may run, on a machine whose ranks have the `affinities`
    (including `own`) and `granted` processors in total.

    Ranks that are bound to separate processors do not share them; ranks that may use all processors share all.
    """
    sharing = sum(not own.isdisjoint(other) for other in affinities)
    usable = len(frozenset().union(*affinities))
    if granted < usable:  # the cgroup grants fewer processors: each rank gets the same part
        return min(len(own), count_threads_per_rank(granted, len(affinities)))
    return count_threads_per_rank(len(own), sharing) if sharing else 1


def find_processors_near_pci(address: str, devices: Path = Path("/sys/bus/pci/devices")) -> frozenset[int]:
    """Return the processors of the NUMA node that the PCI device `address` ("0000:3b:00.0") is attached to; an empty
    set if the kernel does not report them."""
    processors: set[int] = set()
    for part in ",".join(_read_lines(devices / address / "local_cpulist")).split(","):
        first, _, last = part.strip().partition("-")
        if first.isdigit() and (last or first).isdigit():
            processors.update(range(int(first), int(last or first) + 1))
    return frozenset(processors)


def bind_near_pci(address: str, devices: Path = Path("/sys/bus/pci/devices")) -> None:
    """Bind this thread, and the threads that it starts later, to the processors near a PCI device. Does nothing if none
    of these processors is in the thread's affinity: then the program that started the rank has bound it elsewhere."""
    near = find_processors_near_pci(address, devices) & os.sched_getaffinity(0)
    if near:
        os.sched_setaffinity(0, near)


def _read_lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []
