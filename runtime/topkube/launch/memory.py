"""How often the kernel killed a process for memory, by the counters of this process's cgroup (version 2 or 1)."""

from __future__ import annotations

import contextlib
from pathlib import Path

_CGROUPS = Path("/sys/fs/cgroup")
_OWN = Path("/proc/self/cgroup")
_MACHINE = Path("/proc/vmstat")


def memory_kills(cgroups: Path = _CGROUPS, own: Path = _OWN, machine: Path = _MACHINE) -> int:
    """Kills for memory so far in this process's cgroup and those below it; of the whole machine where the cgroup does
    not count.

    In a container the cgroup's files lie at the mount's root, whatever path the kernel names: both are looked at.
    """
    version2, version1 = _paths(own)
    places = [cgroups / version2 / "memory.events", cgroups / "memory.events"]
    places += [cgroups / "memory" / version1 / "memory.oom_control", cgroups / "memory" / "memory.oom_control"]
    for place in [*places, machine]:
        with contextlib.suppress(OSError, ValueError):
            counts = dict(line.split()[:2] for line in place.read_text().splitlines())
            if "oom_kill" in counts:
                return int(counts["oom_kill"])
    return 0


def _paths(own: Path) -> tuple[str, str]:
    """This process's path in the unified hierarchy, and in version 1's memory hierarchy."""
    version2 = version1 = ""
    with contextlib.suppress(OSError):
        for line in own.read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers == "":
                version2 = path.lstrip("/")
            elif "memory" in controllers.split(","):
                version1 = path.lstrip("/")
    return version2, version1
