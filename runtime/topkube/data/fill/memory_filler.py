"""Fills the memory tier in the background, after the disk tier has been filled.

A node reads only its part of the samples in an epoch. Without this filler, a sample is decoded when the node reads it
for the first time. After e epochs on N nodes, a share of (1 - 1/N)^e would still be missing in memory. The filler waits
while this process reads samples, because the reader stores samples too and needs the processor.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Sequence

import numpy as np

from topkube.data.cache.memory.memory_tier import MemoryTier
from topkube.data.fill.disk_filler import DiskFiller
from topkube.data.remote.listing import Longs
from topkube.errors import TopKubeError

_CHUNK_BYTES = 2 << 20
"""The bytes that are decoded at once. Meanwhile, the training loop may have to wait for its processor."""
_LEAST_PAUSE_SECONDS = 0.001
_IDLE_SECONDS = 0.02
"""The filler continues if no sample was read for this time. A loop that only reads has shorter gaps between batches."""


class ReadsInProgress:
    """The threads of this process that are reading samples."""

    def __init__(self) -> None:
        self._threads: set[int] = set()
        self.last_end = 0.0
        """The time at which the last read ended. A short read may set it instead of calling `begin` and `end`."""

    def begin(self) -> None:
        """Count the calling thread as reading, until it calls `end`."""
        self._threads.add(threading.get_ident())

    def end(self) -> None:
        """Count the calling thread as not reading."""
        self._threads.discard(threading.get_ident())
        self.last_end = time.monotonic()

    @property
    def are_over(self) -> bool:
        """True if no thread reads, and the last read ended more than _IDLE_SECONDS ago."""
        return not self._threads and time.monotonic() - self.last_end > _IDLE_SECONDS


class MemoryFiller:
    """A thread that stores the samples of `shards` in the memory tier. `shards` is this rank's share of the dataset.

    starts: the first sample of each shard, (shards + 1,). store: a method that decodes samples and stores them in the
    tier; only a weak reference to its object is held. reads: the reads of this process; the thread waits until they are
    over. The thread sleeps at least half of the time, because training needs the processor.
    """

    def __init__(
        self,
        tier: MemoryTier,
        filler: DiskFiller,
        shards: Sequence[int],
        starts: Longs,
        record_bytes: int,
        store: Callable[[Longs], object],
        reads: ReadsInProgress,
    ) -> None:
        self._reads = reads
        self._tier, self._filler, self._shards, self._starts = tier, filler, shards, starts
        self._store = weakref.WeakMethod(store)
        self._chunk = max(1, _CHUNK_BYTES // max(record_bytes, 1))
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="topkube-memory-fill", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._filler.wait()
            for number in self._shards:
                samples = np.arange(self._starts[number], self._starts[number + 1])
                for at in range(0, samples.size, self._chunk):
                    chunk = samples[at : at + self._chunk]
                    while not self._reads.are_over and not self._stop.wait(_IDLE_SECONDS):
                        pass
                    missing = chunk[~self._tier.has(chunk)]
                    store = self._store()
                    if store is None or self._stop.is_set() or self._tier.is_frozen:
                        return
                    if missing.size:
                        begun = time.monotonic()
                        store(missing)
                        del store  # a reference would keep the dataset alive during the pause
                        self._stop.wait(max(time.monotonic() - begun, _LEAST_PAUSE_SECONDS))
        except TopKubeError:  # the reader of the sample gets this error
            return

    def close(self) -> None:
        """Stop after the current chunk. The disk filler must be closed before."""
        self._stop.set()
        if self._thread is not threading.current_thread():  # the garbage collector may call this in any thread
            self._thread.join(10)
