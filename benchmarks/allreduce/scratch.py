"""The directory of a run for arrays and sockets (hundreds of megabytes).

The run removes its directory at the end. If the run was killed, the next run removes the directory.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

_PREFIX = "topkube-allreduce-"


def _find_start(pid: int) -> str | None:
    """Return when a process started, in ticks since boot; None if it does not exist. The id and the start time together
    identify a process, because ids are used again."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except OSError:
        return None


@contextlib.contextmanager
def create_scratch() -> Iterator[Path]:
    """Create a directory whose name identifies this process."""
    parent = Path(tempfile.gettempdir())
    remove_leftovers(parent)
    own = f"{_PREFIX}{os.getpid()}-{_find_start(os.getpid())}-"
    with tempfile.TemporaryDirectory(prefix=own, ignore_cleanup_errors=True) as directory:
        yield Path(directory)


def remove_leftovers(parent: Path) -> list[Path]:
    """Remove the directories of runs that have ended, and return them."""
    removed = []
    for path in parent.glob(f"{_PREFIX}*"):
        pid, _, rest = path.name.removeprefix(_PREFIX).partition("-")
        started = rest.partition("-")[0]
        is_named_by_run = pid.isdigit() and started.isdigit()
        if is_named_by_run and path.stat().st_uid == os.geteuid() and _find_start(int(pid)) != started:
            shutil.rmtree(path, ignore_errors=True)
            removed.append(path)
    return removed
