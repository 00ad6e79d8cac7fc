"""The state that the processes of a node share while they use a dataset: the time of the last verification of each
shard, the shards for which readers wait, the shards that no filler fetches any more, the states of the tiers, and the
number of ranks that fill the cache. It is a small file in memory. The last user removes it."""

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
"""States of a tier. OPEN: it takes shards. FROZEN: it only serves the shards that it has. DROPPED: it is not used."""
STATES = ("open", "frozen", "dropped")
_SEARCH_SECONDS = 1.0
"""The seconds between two searches of a process for fillers that were killed."""
_CELLS = 8
"""The number of shared integers before the times of the shards."""
_DISK_STATE, _PROGRESS, _FILLERS, _MEMORY_STATE = range(4)
"""The positions of the integers that are in use."""


class NodeState:
    """The shared state of a dataset whose cache numbers are below `cache_number_limit` (see
    `Shards.cache_number_limit`). If `directory` cannot be used, only this process and its forks share the state."""

    def __init__(self, directory: Path, name: str, cache_number_limit: int) -> None:
        size = 8 * _CELLS + (8 + 1 + 1) * cache_number_limit
        self._opened = time.monotonic()
        self._path = directory / f"session-{name}"
        self._user_lock: FileLock | None = FileLock(directory / f"session-{name}.users")
        self._owner = os.getpid()
        self._filler_lock = FileLock(directory / f"session-{name}.fillers")
        """Every process that fills the disk tier holds this lock (shared)."""
        self._own_fillers, self._last_search = 0, 0.0
        try:
            make_private_folder(directory)
            if self._user_lock.acquire(wait=False):  # no process uses the file, so an existing file is a leftover
                self._path.unlink(missing_ok=True)
                self._user_lock.release()
            self._user_lock.acquire(shared=True)
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
            self._user_lock = None
            memory = mmap.mmap(-1, size)
        self._cells = np.frombuffer(memory, np.int64, _CELLS)
        self._verified = np.frombuffer(memory, np.float64, cache_number_limit, 8 * _CELLS)
        """The start of the last verification of each shard (monotonic clock of the machine); 0 if there was none."""
        self._requested, self._left = np.frombuffer(
            memory, np.uint8, 2 * cache_number_limit, size - 2 * cache_number_limit
        ).reshape(2, -1)
        """1 for each shard for which a reader waits; 1 for each shard that a filler has fetched or could not fetch.
        Only readers set the first, and only fillers set the second, so no lock is needed."""

    def is_verified(self, cache_number: int) -> bool:
        """Return True if a process on this node has verified the shard since this object was created. Earlier
        verifications do not count, because the bytes may have changed since."""
        return bool(self._verified[cache_number] >= self._opened)

    def set_verified(self, cache_number: int, begun: float) -> None:
        """Store that the checksum of the shard was right. `begun`: time.monotonic() before its bytes were read."""
        self._verified[cache_number] = begun

    def clear_verified(self, cache_number: int) -> None:
        """Store that the shard must be verified again before its next use."""
        self._verified[cache_number] = 0

    @property
    def disk_state(self) -> int:
        """The state of the disk tier: OPEN, FROZEN or DROPPED."""
        return int(self._cells[_DISK_STATE])

    def degrade(self, state: int) -> bool:
        """Change the state of the disk tier to FROZEN or DROPPED. Return True in the only process that must report the
        change; False if the tier already has this state or a worse state."""
        with self._lock_state():
            if self._cells[_DISK_STATE] >= state:
                return False
            self._cells[_DISK_STATE] = state
            return True

    def freeze_memory_tier(self) -> bool:
        """Freeze the memory tier. Return True in the only process that must report the change."""
        with self._lock_state():
            if self._cells[_MEMORY_STATE]:
                return False
            self._cells[_MEMORY_STATE] = FROZEN
            return True

    @property
    def memory_state(self) -> int:
        """The state of the memory tier: OPEN or FROZEN."""
        return int(self._cells[_MEMORY_STATE])

    @property
    def progress(self) -> int:
        """The bytes that the processes of this node have fetched. While a process waits for another process, it checks
        that this number grows."""
        return int(self._cells[_PROGRESS])

    def advance(self, count: int) -> None:
        """Add `count` fetched bytes to `progress`."""
        self._cells[_PROGRESS] += count  # a lost update does no harm

    def request(self, cache_number: int) -> None:
        """Let the fillers fetch this shard before other shards, because a reader waits for it."""
        self._requested[cache_number] = 1

    def list_requested(self) -> list[int]:
        """Return the cache numbers of the shards for which readers wait."""
        numbers: list[int] = np.flatnonzero(self._requested).tolist()
        return numbers

    def leave_to_readers(self, cache_number: int) -> None:
        """Store that a filler has fetched the shard, or could not fetch it. If the shard is not in the cache then, its
        readers fetch it."""
        self._left[cache_number], self._requested[cache_number] = 1, 0

    def is_left_to_readers(self, cache_number: int) -> bool:
        """Return True if no filler is going to fetch the shard."""
        return bool(self._left[cache_number])

    @property
    def filler_count(self) -> int:
        """The number of ranks that fill the disk tier. It includes killed ranks while a living rank fills the tier, and
        becomes 0 at most _SEARCH_SECONDS after the last living rank stops."""
        count = int(self._cells[_FILLERS])
        if count and self._user_lock is not None and time.monotonic() - self._last_search > _SEARCH_SECONDS:
            self._last_search = time.monotonic()
            count = self._forget_dead_fillers()
        return count

    def _forget_dead_fillers(self) -> int:
        """Set the number of fillers to 0 if no living process fills the disk tier. Return the number after that."""
        lock = FileLock(self._filler_lock.path)
        try:
            if lock.acquire(wait=False):
                self._cells[_FILLERS] = 0  # a process that begins to fill waits for this lock before it counts itself
                lock.release()
        except OSError:  # too many open files, or the directory is gone: the next search may succeed
            pass
        return int(self._cells[_FILLERS])

    def change_filler_count(self, change: int) -> None:
        """Add `change` to the number of ranks that fill the disk tier: 1 before this process begins to fill, -1 after
        it stops."""
        if self._user_lock is not None and not self._own_fillers:
            self._filler_lock.acquire(shared=True)
        self._own_fillers += change
        with self._lock_state():
            self._cells[_FILLERS] += change
        if not self._own_fillers:
            self._filler_lock.release()

    def _lock_state(self) -> contextlib.AbstractContextManager[object]:
        if self._user_lock is None:
            return contextlib.nullcontext()
        return FileLock(self._path.with_name(f"{self._path.name}.change"))

    def close(self) -> None:
        """End the use by this process. The last user removes the files."""
        if self._user_lock is None or os.getpid() != self._owner:
            return
        self._user_lock.release()
        _remove_if_unused(self._user_lock)


def remove_unused_states(directory: Path) -> None:
    """Remove the states in `directory` that no process uses: their users were killed."""
    for path in directory.glob("session-*.users"):
        _remove_if_unused(FileLock(path))


def _remove_if_unused(user_lock: FileLock) -> None:
    """Remove the files of a state if no process uses it. `user_lock`: the lock that each user of the state holds."""
    with contextlib.suppress(OSError):
        if user_lock.acquire(wait=False):
            for ending in ("", ".change", ".fillers", ".users"):
                user_lock.path.with_suffix(ending).unlink(missing_ok=True)
            user_lock.release()
