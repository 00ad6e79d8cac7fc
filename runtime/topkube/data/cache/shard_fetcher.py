"""Fetches the bytes of shards from the remote. Other threads can read a shard while it arrives."""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from topkube.data.base.shared_counters import CacheCounters
from topkube.data.cache.disk.shard_file import ArrivingShard, ReceivedChecksums, ShardWriter
from topkube.data.cache.node_state import NodeState
from topkube.data.formats.shards import DataShard, Shards
from topkube.data.remote.object_store import ObjectStore

ShardSource = Callable[[DataShard, int], ReceivedChecksums]
"""A function that writes the bytes of a shard to a descriptor and returns their checksums. The bytes come from the
remote or from another node."""
_ASSEMBLED_BYTES = 16 << 20
"""A group of files of at most this size is assembled in memory before it is written."""


class ShardFetcher:
    """Fetches the shards of a dataset from its store, and counts fetches, seconds and bytes. Threads may share it."""

    def __init__(self, store: ObjectStore, shards: Shards, node_state: NodeState, counters: CacheCounters) -> None:
        self._store, self._shards, self._node_state, self._counters = store, shards, node_state, counters
        self.is_exchanged = False
        """True if shards are sent to other nodes while they arrive."""
        self._arriving: dict[int, ArrivingShard] = {}

    def fetch(self, shard: DataShard, file: int, source: ShardSource | None) -> ReceivedChecksums:
        """Write the bytes of the shard to the descriptor, from `source` or else from the remote, and count the fetch.
        Return the checksums of the bytes."""
        start = time.monotonic()
        received = (source or self.fetch_from_store)(shard, file)
        self._counters.add("fetches")
        self._counters.add("fetch_seconds", time.monotonic() - start)
        return received

    def fetch_from_store(self, shard: DataShard, file: int) -> ReceivedChecksums:
        """Fetch the bytes of the shard from the remote, and write them to the descriptor. Return their checksums."""

        def progress(count: int) -> None:
            self._node_state.advance(count)
            self._counters.add("remote_bytes", count)

        objects = self._shards.list_objects(shard)
        with ShardWriter(file) as writer:
            if len(objects) == 1:
                with self._announce_arrival(shard, file, writer) as arriving:
                    self._store.fetch(objects[0], writer.write, progress=progress)
                    received = ReceivedChecksums(objects[0].checksum, writer.compute_digest(shard.size))
                    if arriving is not None:
                        arriving.digest = received.digest
                    return received
            offsets = [0, *itertools.accumulate(remote_object.size for remote_object in objects)][:-1]
            if shard.size > _ASSEMBLED_BYTES:
                self._store.fetch_many(objects, offsets, writer.write, progress)
            else:  # files arrive in any order; one large write is faster than a write per file, also for later readers
                whole = np.empty(shard.size, np.uint8).data

                def assemble(offset: int, data: Any) -> None:
                    whole[offset : offset + len(data)] = data

                self._store.fetch_many(objects, offsets, assemble, progress)
                writer.write(0, whole)
            return ReceivedChecksums(digest=writer.compute_digest(shard.size))

    @contextlib.contextmanager
    def _announce_arrival(self, shard: DataShard, file: int, writer: ShardWriter) -> Iterator[ArrivingShard | None]:
        """Within this context, other threads can read the shard while it arrives (`find_arriving`)."""
        arriving = None
        if self.is_exchanged:
            with contextlib.suppress(OSError):  # too many open files: other nodes wait for the whole shard
                arriving = self._arriving[shard.cache_number] = ArrivingShard(file, writer, shard.size)
        try:
            yield arriving
        finally:
            if arriving is not None:
                arriving.is_over = True
                if self._arriving.get(shard.cache_number) is arriving:
                    del self._arriving[shard.cache_number]

    def find_arriving(self, number: int) -> ArrivingShard | None:
        """Return the shard if this process is fetching it from the remote; else None."""
        return self._arriving.get(number)
