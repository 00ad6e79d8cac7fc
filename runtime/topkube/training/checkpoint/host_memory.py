"""The memory that is available to this process."""

from __future__ import annotations

import contextlib
from pathlib import Path

from topkube.launch.host.memory_kills import find_cgroup_paths

_CGROUPS = Path("/sys/fs/cgroup")
_OWN = Path("/proc/self/cgroup")
_MACHINE = Path("/proc/meminfo")
_FILES = {
    2: ("memory.max", "memory.current", ("active_file", "inactive_file")),
    1: ("memory.limit_in_bytes", "memory.usage_in_bytes", ("total_active_file", "total_inactive_file")),
}
"""For each version of cgroups: the limit, the use, and the cached files in it, which the kernel can free."""


def find_available_bytes(cgroups: Path = _CGROUPS, own: Path = _OWN, machine: Path = _MACHINE) -> float:
    """Return the bytes that are available on the machine, or in this process's cgroup if they are fewer. Return
    infinity if both are unknown.

    In a container, the files of the cgroup may be at the root of the mount, and not at the path that the kernel names.
    This function reads both places.
    """
    version2, version1 = find_cgroup_paths(own)
    places = [(2, cgroups / version2), (2, cgroups), (1, cgroups / "memory" / version1), (1, cgroups / "memory")]
    available = [_find_cgroup_bytes(version, place) for version, place in places]
    with contextlib.suppress(OSError, ValueError, KeyError):
        available.append(1024.0 * int(_read_fields(machine)["MemAvailable:"]))
    return min(available)


def _find_cgroup_bytes(version: int, place: Path) -> float:
    limit, use, cached = _FILES[version]
    with contextlib.suppress(OSError, ValueError, KeyError):  # no limit ("max" is no number), or no such files
        counts = _read_fields(place / "memory.stat")
        files = sum(int(counts[name]) for name in cached)
        return float(int((place / limit).read_text()) - int((place / use).read_text()) + files)
    return float("inf")


def _read_fields(path: Path) -> dict[str, str]:
    return {line.split()[0]: line.split()[1] for line in path.read_text().splitlines()}
