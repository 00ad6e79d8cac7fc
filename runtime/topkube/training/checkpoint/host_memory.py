"""The memory that is available to this process."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import NamedTuple

from topkube.launch.host.memory_kills import find_cgroup_paths

_CGROUP_MOUNT = Path("/sys/fs/cgroup")
_OWN_CGROUP_FILE = Path("/proc/self/cgroup")
_MACHINE_MEMORY_FILE = Path("/proc/meminfo")


class _CgroupFiles(NamedTuple):
    """The files of a cgroup that hold its limit and its use in bytes, and the fields of its memory.stat that count
    cached files. The use contains cached files, but the kernel can free them."""

    limit: str
    use: str
    cached_fields: tuple[str, ...]


_CGROUP_FILES = {
    2: _CgroupFiles("memory.max", "memory.current", ("active_file", "inactive_file")),
    1: _CgroupFiles("memory.limit_in_bytes", "memory.usage_in_bytes", ("total_active_file", "total_inactive_file")),
}
"""The files by the version of cgroups."""


def find_available_bytes(
    cgroups: Path = _CGROUP_MOUNT, own: Path = _OWN_CGROUP_FILE, machine: Path = _MACHINE_MEMORY_FILE
) -> float:
    """Return the bytes that are available on the machine, or in this process's cgroup if they are fewer. Return
    infinity if both are unknown. `cgroups` is the mount of the cgroups, `own` the file that names this process's
    cgroups, `machine` the file with the memory of the machine.

    In a container, the files of the cgroup may be at the root of the mount, and not at the path that the kernel names.
    This function reads both places.
    """
    version2, version1 = find_cgroup_paths(own)
    folders = [(2, cgroups / version2), (2, cgroups), (1, cgroups / "memory" / version1), (1, cgroups / "memory")]
    available = [_find_cgroup_bytes(version, folder) for version, folder in folders]
    with contextlib.suppress(OSError, ValueError, KeyError):
        available.append(1024.0 * int(_read_fields(machine)["MemAvailable:"]))
    return min(available)


def _find_cgroup_bytes(version: int, folder: Path) -> float:
    """Return the bytes that the cgroup in `folder` has left; infinity if it has no limit or does not exist."""
    files = _CGROUP_FILES[version]
    with contextlib.suppress(OSError, ValueError, KeyError):  # a limit of "max" is no number
        fields = _read_fields(folder / "memory.stat")
        cached_bytes = sum(int(fields[name]) for name in files.cached_fields)
        limit_bytes, used_bytes = int((folder / files.limit).read_text()), int((folder / files.use).read_text())
        return float(limit_bytes - used_bytes + cached_bytes)
    return float("inf")


def _read_fields(path: Path) -> dict[str, str]:
    """Return the first two words of each line: the name of a field and its value."""
    return {line.split()[0]: line.split()[1] for line in path.read_text().splitlines()}
