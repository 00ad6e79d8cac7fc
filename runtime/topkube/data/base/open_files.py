"""The limit of open files of a process (`ulimit -n`, often 1024), which the cache shares with other code."""

from __future__ import annotations

import errno
import resource

from topkube.errors import StoreError

_LEAST_FILES = 8


class FilesPressure(Exception):
    """The process or the machine cannot open another file. The volume of the cache works."""


def is_files_pressure(error: OSError) -> bool:
    """Return True if a file could not be opened because too many files are open."""
    return error.errno in (errno.EMFILE, errno.ENFILE)


def limit_open_files(most: int, parts: int) -> int:
    """Return the number of files that a part of the cache may keep open: the limit divided by `parts`, at most
    `most`."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return max(_LEAST_FILES, min(most, most if soft == resource.RLIM_INFINITY else soft // parts))


def build_too_many_files_error() -> StoreError:
    """Return the error for a process that cannot open another file."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = min(hard, 65536) if hard > 0 else 65536
    return StoreError(
        "a shard cannot be opened: this process has too many open files",
        cause=f"the limit is {soft} (`ulimit -n`), and other code has opened most of these files",
        next_step=f"raise the limit (`ulimit -n {most}`), or open fewer files in other code",
    )
