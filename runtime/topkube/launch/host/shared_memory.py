"""The shared-memory segments that killed ranks leave in /dev/shm. In a pod /dev/shm is small, and if it is full, ranks
end with SIGBUS. Other programs of the same user may keep files there that nobody has open, so only segments with names
of the libraries that ranks use are removed."""

from __future__ import annotations

import contextlib
import os
import re
import stat
from pathlib import Path

SHARED_MEMORY = Path("/dev/shm")
_NAMES = re.compile(
    r"""
    mpich_sh(m|ar)_\w+                             # MPICH
    | (vader|sm)_segment\..+ | osc_(sm|rdma)\..+   # Open MPI: messages inside a node, windows
    | nccl-\w+                                     # NCCL
    | torch_\d+_\d+_\d+                            # tensors of torch's data loaders
    """,
    re.VERBOSE,
)


def list_segments(directory: Path = SHARED_MEMORY) -> frozenset[str]:
    """Return the names of the present segments."""
    try:
        return frozenset(os.listdir(directory))
    except OSError:
        return frozenset()


def remove_dead_segments(keep: frozenset[str], directory: Path = SHARED_MEMORY) -> list[str]:
    """Remove this user's segments of MPI, NCCL and torch that no living process maps or has open, except `keep`, which
    existed before the ranks. Return their names. Segments of other runs, which may begin meanwhile, are in use."""
    candidates = set[str]()
    for name in filter(_NAMES.fullmatch, list_segments(directory) - keep):
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
        # A program opens a segment, maps it and closes the file: who reads in this order misses no new segment.
        with contextlib.suppress(OSError):
            for descriptor in (process / "fd").iterdir():
                with contextlib.suppress(OSError):
                    target = os.readlink(descriptor)
                    if target.startswith(prefix):
                        used.add(target.removeprefix(prefix))
        with contextlib.suppress(OSError):
            for line in (process / "maps").read_text(errors="replace").splitlines():
                _, separator, name = line.partition(prefix)
                if separator:
                    used.add(name)
    return used
