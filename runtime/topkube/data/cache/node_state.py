"""The state that all processes that use a dataset on a node share, in a small file in memory: when each shard was
verified, the state of the tiers, and how many ranks are filling the cache. The last user removes the file."""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import sys
import time
from pathlib import Path

import numpy as np

from topkube.data.base.file_lock import FileLock
from topkube.data.base.permissions import make_private_folder

OPEN, FROZEN, DROPPED = 0, 1, 2
"""States of the disk tier: it takes shards; it only serves the shards it has; it is not used."""
STATES = ("open", "frozen", "dropped")
_LOOK_SECONDS = 1.0
"""How often a process looks for fillers that were killed."""
_CELLS = 8
_STATE, _PROGRESS, _FILLERS, _MEMORY_STATE = range(4)


class NodeState:
    """The shared state of a dataset with `shards` shards. If `directory` cannot be used, only this process and its
    forks share the state."""

    def __init__(self, directory: Path, name: str, shards: int) -> None:
        size = 8 * (_CELLS + shards)
        self._opened = time.monotonic()
        self._path = directory / f"session-{name}"
        self._user: FileLock | None = FileLock(directory / f"session-{name}.users")
        self._owner = os.getpid()
        self._filling = FileLock(directory / f"session-{name}.fillers")
        """Held, shared, by every process that fills the tier."""
        self._own_fillers, self._looked = 0, 0.0
        try:
            make_private_folder(directory)
            if self._user.acquire(wait=False):  # nobody uses it: an existing file is a leftover
                self._path.unlink(missing_ok=True)
                self._user.release()
            self._user.acquire(shared=True)
            file = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
            try:
                os.posix_fallocate(file, 0, size)
                memory = mmap.mmap(file, size)
            finally:
                os.close(file)
        except OSError as error:
            if error.errno == errno.EPERM:
                print(
                    f"topkube: the processes of this node share no state ({error.strerror}); each process verifies and "
                    "fills the cache on its own",
                    file=sys.stderr,
                    flush=True,
                )
            self._user = None
            memory = mmap.mmap(-1, size)
        self._cells = np.frombuffer(memory, np.int64, _CELLS)
        self._verified = np.frombuffer(memory, np.float64, shards, 8 * _CELLS)
        """When the last verification of each shard began (monotonic clock of the machine); 0 for never."""

    def is_verified(self, shard: int) -> bool:
        """Return True if a process on this node has verified the shard since this object was created. The
        current bytes may differ from those of an earlier verification."""
        return bool(self._verified[shard] >= self._opened)

    def set_verified(self, shard: int, begun: float) -> None:
        """Store that the shard's checksum was right; `begun`: time.monotonic() before its bytes were read."""
        self._verified[shard] = begun

    def clear_verified(self, shard: int) -> None:
        """Have the shard verified again before its next use."""
        self._verified[shard] = 0

    @property
    def state(self) -> int:
        return int(self._cells[_STATE])

    def degrade(self, state: int) -> bool:
        """Lower the disk tier's state. Return True for the one process that must report the change."""
        with self._lock_state():
            if self._cells[_STATE] >= state:
                return False
            self._cells[_STATE] = state
            return True

    def freeze_memory_tier(self) -> bool:
        """Freeze the memory tier. Return True for the one process that must report the change."""
        with self._lock_state():
            if self._cells[_MEMORY_STATE]:
                return False
            self._cells[_MEMORY_STATE] = FROZEN
            return True

    @property
    def memory_state(self) -> int:
        return int(self._cells[_MEMORY_STATE])

    @property
    def progress(self) -> int:
        """A count of fetched bytes. A process that waits for another checks that the count grows."""
        return int(self._cells[_PROGRESS])

    def advance(self, count: int) -> None:
        self._cells[_PROGRESS] += count  # a lost update does no harm

    @property
    def fillers(self) -> int:
        """The number of ranks that are filling the tier. Ranks that were killed count until all of them are dead, and
        for at most _LOOK_SECONDS more."""
        count = int(self._cells[_FILLERS])
        if count and self._user is not None and time.monotonic() - self._looked > _LOOK_SECONDS:
            self._looked = time.monotonic()
            count = self._forget_dead_fillers()
        return count

    def _forget_dead_fillers(self) -> int:
        """Set the number of fillers to 0 if no living process fills the tier. Return the number."""
        lock = FileLock(self._filling.path)
        try:
            if lock.acquire(wait=False):
                self._cells[_FILLERS] = 0  # a process that begins to fill waits for this lock before it counts itself
                lock.release()
        except OSError:  # too many open files, or the directory is gone: look again later
            pass
        return int(self._cells[_FILLERS])

    def count_fillers(self, change: int) -> None:
        """Add `change` to the number of ranks that are filling the tier: 1 before this process begins to fill, -1 when
        it ends."""
        if self._user is not None and not self._own_fillers:
            self._filling.acquire(shared=True)
        self._own_fillers += change
        with self._lock_state():
            self._cells[_FILLERS] += change
        if not self._own_fillers:
            self._filling.release()

    def _lock_state(self) -> contextlib.AbstractContextManager[object]:
        if self._user is None:
            return contextlib.nullcontext()
        return FileLock(self._path.with_name(f"{self._path.name}.change"))

    def close(self) -> None:
        """End the use by this process. The last user removes the files."""
        if self._user is None or os.getpid() != self._owner:
            return
        self._user.release()
        with contextlib.suppress(OSError):
            if self._user.acquire(wait=False):
                change = self._path.with_name(f"{self._path.name}.change")
                for path in (self._path, change, self._filling.path, self._user.path):
                    path.unlink(missing_ok=True)
                self._user.release()
