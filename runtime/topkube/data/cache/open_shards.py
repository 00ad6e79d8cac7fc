"""The shards that a process keeps open for reading: a few cached shards, and shards in its memory.

If the process has too many open files, all idle shards are closed. The file of a shard that a reader still uses stays
open.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections import OrderedDict
from collections.abc import Callable

from topkube.data.base.open_files import limit_open_files
from topkube.data.formats.shards import DataShard

_OPEN_FILES = 400
"""The most cached shards that stay open, if the limit of open files allows them."""
_MEMORY_BYTES = 1 << 30
"""The most bytes of shards in the memory of this process: a shuffle window of 16 shards of 64 MB should fit."""


class ShardFile:
    """A whole shard that is open for reading. It is closed when the last reference is gone."""

    def __init__(self, shard: DataShard, file: int, *, is_cached: bool) -> None:
        self.shard, self.file, self.is_cached = shard, file, is_cached

    def __del__(self) -> None:
        with contextlib.suppress(OSError):
            os.close(self.file)


class OpenShards:
    """Open shards by cache number; the least recently used shard is closed first. Threads may share it; it keeps
    working after a fork."""

    def __init__(self) -> None:
        self._cached: OrderedDict[int, ShardFile] = OrderedDict()
        self._in_memory: OrderedDict[int, ShardFile] = OrderedDict()
        self._most_cached = limit_open_files(_OPEN_FILES, 4)
        self.closers: list[Callable[[], None]] = []
        """Functions that close shards which other objects keep open. They are called if too many files are open."""
        self._lock = threading.Lock()
        self._process = os.getpid()

    def find(self, cache_number: int) -> ShardFile | None:
        """Return the open shard; None if it is not open."""
        with self._get_lock():
            for files in (self._cached, self._in_memory):
                if cache_number in files:
                    files.move_to_end(cache_number)
                    return files[cache_number]
        return None

    def keep(self, cache_number: int, opened: ShardFile) -> ShardFile:
        """Keep the shard open for later. Return the shard, or the file that another thread has kept meanwhile."""
        with self._get_lock():
            kept = self._cached if opened.is_cached else self._in_memory
            if cache_number in kept:
                return kept[cache_number]
            kept[cache_number] = opened
            while len(self._cached) > self._most_cached:
                self._cached.popitem(last=False)
            while len(self._in_memory) > 1 and self._count_bytes_in_memory() > _MEMORY_BYTES:
                self._in_memory.popitem(last=False)
        return opened

    def _count_bytes_in_memory(self) -> int:
        return sum(file.shard.size for file in self._in_memory.values())

    def forget(self, cache_number: int) -> None:
        """Remove the file of this shard, so that the shard is opened again before its next use."""
        with self._get_lock():
            self._cached.pop(cache_number, None)
            self._in_memory.pop(cache_number, None)

    def close_idle(self) -> None:
        """Close the cached shards that are kept open for later, here and in `closers`."""
        with self._get_lock():
            self._cached.clear()
        for close in list(self.closers):
            close()

    def clear(self) -> None:
        """Close all shards that no reader uses."""
        self._cached.clear()
        self._in_memory.clear()

    def _get_lock(self) -> threading.Lock:
        if self._process != os.getpid():  # after a fork the lock may be held by a thread of the parent
            self._process, self._lock = os.getpid(), threading.Lock()
        return self._lock
