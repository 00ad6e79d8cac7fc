"""A run's directory for arrays and sockets, hundreds of megabytes: removed at its end, after a kill by the next run."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

_PREFIX = "topkube-allreduce-"


def _started(pid: int) -> str | None:
    """When a process started, in ticks since boot: with its id it names one process for good. None if there is none."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except OSError:
        return None


@contextlib.contextmanager
def scratch() -> Iterator[Path]:
    """A fresh directory; its name says whose it is."""
    parent = Path(tempfile.gettempdir())
    remove_leftovers(parent)
    own = f"{_PREFIX}{os.getpid()}-{_started(os.getpid())}-"
    with tempfile.TemporaryDirectory(prefix=own, ignore_cleanup_errors=True) as directory:
        yield Path(directory)


def remove_leftovers(parent: Path) -> list[Path]:
    """Removes the directories of our own runs that have ended, and returns them."""
    removed = []
    for path in parent.glob(f"{_PREFIX}*"):
        pid, _, rest = path.name.removeprefix(_PREFIX).partition("-")
        started = rest.partition("-")[0]
        if pid.isdigit() and started.isdigit() and path.stat().st_uid == os.geteuid() and _started(int(pid)) != started:
            shutil.rmtree(path, ignore_errors=True)
            removed.append(path)
    return removed
