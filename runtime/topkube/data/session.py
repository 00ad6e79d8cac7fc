"""What all processes that use a dataset on a node know together, in a small file in memory: which shards have been
verified, whether the disk tier still takes shards, and whether somebody is filling it. It goes with its last user."""

from __future__ import annotations

import contextlib
import mmap
import os
from pathlib import Path

import numpy as np

from topkube.data.locks import FileLock

OPEN, FROZEN, DROPPED = 0, 1, 2
"""States of the disk tier: takes shards; serves what it has; is not used."""
STATES = ("open", "frozen", "dropped")
_CELLS = 8
_STATE, _PROGRESS, _FILLERS, _MEMORY_STATE = range(4)


class Session:
    """Shared state over `shards` shards. Where `directory` cannot be used it is this process's (and its forks') own."""

    def __init__(self, directory: Path, name: str, shards: int) -> None:
        size = 8 * _CELLS + shards
        self._path = directory / f"session-{name}"
        self._user: FileLock | None = FileLock(directory / f"session-{name}.users")
        self._owner = os.getpid()
        try:
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            if self._user.acquire(wait=False):  # nobody uses it: what is there is a leftover
                self._path.unlink(missing_ok=True)
                self._user.release()
            self._user.acquire(shared=True)
            file = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                os.posix_fallocate(file, 0, size)
                memory = mmap.mmap(file, size)
            finally:
                os.close(file)
        except OSError:
            self._user = None
            memory = mmap.mmap(-1, size)
        self._cells = np.frombuffer(memory, np.int64, _CELLS)
        self.verified = np.frombuffer(memory, np.uint8, shards, 8 * _CELLS)
        """Nonzero for shards whose checksum one of us has seen to be right."""

    @property
    def state(self) -> int:
        return int(self._cells[_STATE])

    def lower(self, state: int) -> bool:
        """Sets the disk tier's state; True for the one process that is to say so."""
        with self._exclusive():
            if self._cells[_STATE] >= state:
                return False
            self._cells[_STATE] = state
            return True

    def freeze_memory(self) -> bool:
        """The same for the memory tier, which only knows frozen."""
        with self._exclusive():
            if self._cells[_MEMORY_STATE]:
                return False
            self._cells[_MEMORY_STATE] = FROZEN
            return True

    @property
    def memory_state(self) -> int:
        return int(self._cells[_MEMORY_STATE])

    @property
    def progress(self) -> int:
        """Grows with every byte that somebody brings; who waits looks at it."""
        return int(self._cells[_PROGRESS])

    def advance(self, count: int) -> None:
        self._cells[_PROGRESS] += count  # a lost update of two processes does no harm

    @property
    def fillers(self) -> int:
        """Ranks that are filling the tier."""
        return int(self._cells[_FILLERS])

    def filling(self, change: int) -> None:
        with self._exclusive():
            self._cells[_FILLERS] += change

    def _exclusive(self) -> contextlib.AbstractContextManager[object]:
        if self._user is None:
            return contextlib.nullcontext()
        return FileLock(self._path.with_name(f"{self._path.name}.change"))

    def close(self) -> None:
        """Ends this process's use. The last user removes the files."""
        if self._user is None or os.getpid() != self._owner:
            return
        self._user.release()
        with contextlib.suppress(OSError):
            if self._user.acquire(wait=False):
                for path in (self._path, self._path.with_name(f"{self._path.name}.change"), self._user.path):
                    path.unlink(missing_ok=True)
                self._user.release()
