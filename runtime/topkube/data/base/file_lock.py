"""Advisory locks on files. The kernel releases them when their process dies. No process number is stored, because
two containers that share a volume may both be process 1."""

from __future__ import annotations

import fcntl
import os
import weakref
from pathlib import Path
from types import TracebackType


class FileLock:
    """An flock on the file `path`, which is created if it does not exist. The lock has one exclusive holder or several
    shared holders. Two objects of the same process are two holders."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file: int | None = None

    @property
    def is_held(self) -> bool:
        """True between `acquire` and `release` of this object."""
        return self._file is not None

    def acquire(self, *, shared: bool = False, wait: bool = True) -> bool:
        """Take the lock. Return False if `wait` is false and another holder has it. Raises OSError if the file cannot
        be created. If the file was removed or replaced meanwhile, the new file is locked."""
        assert self._file is None
        operation = (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | (0 if wait else fcntl.LOCK_NB)
        while True:
            # the umask or the folder's default access list sets the mode
            file = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)
            try:
                fcntl.flock(file, operation)
                at_path, locked = os.stat(self.path), os.fstat(file)
            except (BlockingIOError, FileNotFoundError) as error:
                os.close(file)
                if isinstance(error, BlockingIOError):
                    return False
                continue
            except BaseException:
                os.close(file)
                raise
            if (at_path.st_dev, at_path.st_ino) == (locked.st_dev, locked.st_ino):
                self._file = file
                _held_locks.add(self)
                return True
            os.close(file)

    def release(self) -> None:
        """Release the lock if it is held."""
        file, self._file = self._file, None  # first: a fork must not close a number that is reused
        if file is not None:
            fcntl.flock(file, fcntl.LOCK_UN)  # closing is not enough: a fork may have a copy of the descriptor
            os.close(file)
            _held_locks.discard(self)

    def forget(self) -> None:
        """Close the copy of the descriptor that this fork inherited. The parent keeps the lock."""
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


_held_locks: weakref.WeakSet[FileLock] = weakref.WeakSet()


def _forget_held_locks() -> None:
    for lock in list(_held_locks):
        lock.forget()
    _held_locks.clear()


os.register_at_fork(after_in_child=_forget_held_locks)
