"""The shared-memory segments that a killed attempt leaves in /dev/shm. In a pod /dev/shm is small, and if it is full,
ranks end with SIGBUS."""

from __future__ import annotations

import contextlib
import os
import stat
from pathlib import Path

SHARED_MEMORY = Path("/dev/shm")


def list_segments(directory: Path = SHARED_MEMORY) -> frozenset[str]:
    """Return the names of the present segments."""
    try:
        return frozenset(os.listdir(directory))
    except OSError:
        return frozenset()


def remove_dead_segments(keep: frozenset[str], directory: Path = SHARED_MEMORY) -> list[str]:
    """Remove this user's segments that no living process maps or has open, except `keep`. Return their names."""
    candidates = set[str]()
    for name in list_segments(directory) - keep:
        with contextlib.suppress(OSError):
            status = (directory / name).lstat()
            if stat.S_ISREG(status.st_mode) and status.st_uid == os.geteuid():
                candidates.add(name)
    if candidates:
        candidates -= _list_used_segments(directory)
    for name in candidates:
        with contextlib.suppress(OSError):
            (directory / name).unlink()
    return sorted(candidates)


def _list_used_segments(directory: Path) -> set[str]:
    prefix, used = f"{directory}/", set[str]()
    for process in Path("/proc").iterdir():
        if not process.name.isdigit():
            continue
        with contextlib.suppress(OSError):
            for line in (process / "maps").read_text(errors="replace").splitlines():
                _, separator, name = line.partition(prefix)
                if separator:
                    used.add(name)
        with contextlib.suppress(OSError):
            for descriptor in (process / "fd").iterdir():
                with contextlib.suppress(OSError):
                    target = os.readlink(descriptor)
                    if target.startswith(prefix):
                        used.add(target.removeprefix(prefix))
    return used
