"""The number of processes that the kernel killed for memory, from the counters of this process's cgroup (version 2 or
1)."""

from __future__ import annotations

import contextlib
from pathlib import Path

_CGROUPS = Path("/sys/fs/cgroup")
_OWN = Path("/proc/self/cgroup")
_MACHINE = Path("/proc/vmstat")


def count_memory_kills(cgroups: Path = _CGROUPS, own: Path = _OWN, machine: Path = _MACHINE) -> int:
    """Return the number of kills for memory in this process's cgroup and the cgroups below it, or on the whole machine
    if the cgroup does not count them.

    In a container the files of the cgroup may be at the root of the mount, whatever path the kernel names: both are
    read.
    """
    version2, version1 = find_cgroup_paths(own)
    places = [cgroups / version2 / "memory.events", cgroups / "memory.events"]
    places += [cgroups / "memory" / version1 / "memory.oom_control", cgroups / "memory" / "memory.oom_control"]
    for place in [*places, machine]:
        with contextlib.suppress(OSError, ValueError):
            counts = dict(line.split()[:2] for line in place.read_text().splitlines())
            if "oom_kill" in counts:
                return int(counts["oom_kill"])
    return 0


def find_cgroup_paths(own: Path = _OWN) -> tuple[str, str]:
    """Return this process's path in the unified hierarchy, and in version 1's memory hierarchy."""
    version2 = version1 = ""
    with contextlib.suppress(OSError):
        for line in own.read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers == "":
                version2 = path.lstrip("/")
            elif "memory" in controllers.split(","):
                version1 = path.lstrip("/")
    return version2, version1
