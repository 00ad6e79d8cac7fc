"""Advisory locks on files. The kernel frees them when their process dies, whatever it dies of; no process number is
written or believed, because two containers that share a volume may both be process 1."""

from __future__ import annotations

import fcntl
import os
import weakref
from pathlib import Path
from types import TracebackType


class FileLock:
    """An flock on `path`, which is created. One holder, or several shared ones; also between threads."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file: int | None = None

    @property
    def held(self) -> bool:
        return self._file is not None

    def acquire(self, *, shared: bool = False, wait: bool = True) -> bool:
        """Takes the lock; False where `wait` is false and another holds it. Raises OSError where the file cannot be
        made. A file that was removed or replaced meanwhile does not count."""
        assert self._file is None
        how = (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | (0 if wait else fcntl.LOCK_NB)
        while True:
            file = os.open(
                self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666
            )  # the umask, or the folder's own list
            try:
                fcntl.flock(file, how)
                now, mine = os.stat(self.path), os.fstat(file)
            except (BlockingIOError, FileNotFoundError) as error:
                os.close(file)
                if isinstance(error, BlockingIOError):
                    return False
                continue
            except BaseException:
                os.close(file)
                raise
            if (now.st_dev, now.st_ino) == (mine.st_dev, mine.st_ino):
                self._file = file
                _held.add(self)
                return True
            os.close(file)

    def release(self) -> None:
        file, self._file = self._file, None
        if file is not None:  # from here on not known to forks: they would close what has its number next
            fcntl.flock(file, fcntl.LOCK_UN)  # a fork may hold a copy of the descriptor
            os.close(file)
            _held.discard(self)

    def forget(self) -> None:
        """Gives up a copy that a fork inherited; the parent keeps the lock."""
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def __enter__(self) -> FileLock:
        self.acquire()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()


_held: weakref.WeakSet[FileLock] = weakref.WeakSet()


def _after_fork() -> None:
    for lock in list(_held):
        lock.forget()
    _held.clear()


os.register_at_fork(after_in_child=_after_fork)
