"""The temporary folders of launchers and workers, and the removal of folders that killed processes have left.

A folder belongs to the process that holds the lock on a file in it. The lock ends with the process, however it ends.
Unlike process ids, locks are visible in all containers that share a volume. Only folders of this user that no other
user may enter are removed: in a shared /tmp, anybody may create a folder of any name.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import stat
import tempfile
import time
from pathlib import Path
from types import TracebackType

from topkube.errors import LaunchError

_LOCK_FILE = ".lock"
_LEAST_AGE_SECONDS = 60.0
"""A younger folder may not have its lock yet."""
_MOST_REMOVED = 1000
"""The most folders that a start removes."""


class TemporaryFolder:
    """A folder PREFIX… in the system's temporary directory, as a context manager that returns its path. It is removed
    at the end. On entry, folders that dead processes have left are removed too. Raises LaunchError if the folder cannot
    be created."""

    def __init__(self, prefix: str) -> None:
        self._prefix = prefix
        self._lock: int | None = None
        self._path: Path | None = None

    def __enter__(self) -> Path:
        try:
            self._path = Path(tempfile.mkdtemp(prefix=self._prefix))
            self._lock = os.open(self._path / _LOCK_FILE, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise LaunchError(
                f"the temporary folder cannot be created: {error}",
                cause="a read-only root file system without a volume for /tmp, or a full disk",
                next_step="mount an emptyDir at /tmp, or set TMPDIR to a writable folder",
            ) from None
        with contextlib.suppress(OSError):  # a file system without locks: nothing is removed there
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        remove_dead_folders(self._path.parent, self._prefix)
        return self._path

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._path is not None
        assert self._lock is not None
        shutil.rmtree(self._path, ignore_errors=True)
        os.close(self._lock)


def remove_dead_folders(parent: Path, prefix: str, least_age_seconds: float = _LEAST_AGE_SECONDS) -> list[str]:
    """Remove the folders PREFIX… in `parent` that dead processes of this user have left. Return their names. Never
    raises an error and follows no link."""
    removed: list[str] = []
    with contextlib.suppress(OSError):
        mode = os.stat(parent).st_mode
        if mode & 0o022 and not mode & stat.S_ISVTX:  # another user may replace a folder
            return removed
        for name in os.listdir(parent):
            if name.startswith(prefix) and len(removed) < _MOST_REMOVED:
                with contextlib.suppress(OSError):
                    if _is_dead(parent / name, least_age_seconds):
                        shutil.rmtree(parent / name, ignore_errors=True)
                        removed.append(name)
    return removed


def _is_dead(path: Path, least_age_seconds: float) -> bool:
    """Return True if `path` is a folder of this user whose process has ended. Raises OSError if the folder cannot be
    examined."""
    folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        status = os.fstat(folder)
        if status.st_uid != os.geteuid() or stat.S_IMODE(status.st_mode) & 0o077:
            return False
        if time.time() - status.st_mtime < least_age_seconds:
            return False
        try:
            lock = os.open(_LOCK_FILE, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=folder)
        except FileNotFoundError:
            return True
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        finally:
            os.close(lock)
        return True
    finally:
        os.close(folder)
