"""Samples that are read before their shard is in the cache: each is one object of the remote, and is checked.

A sample is read early only if its bytes can be checked: the manifest has its checksum, or the store sends it only in
the listed version (If-Match, If-Unmodified-Since) and every response has that version. When the shard is whole, the
bytes are compared with those of the shard. A difference raises Changed.
"""

from __future__ import annotations

import os
import threading
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from topkube.data.cache.shard_cache import ShardCache
from topkube.data.remote.listing import Longs
from topkube.data.remote.retry import Changed
from topkube.errors import StoreError


class EarlySamples:
    """Reads samples of shards that the fillers of this node have not fetched yet. The format of the dataset must be
    files, because the listing is then the index of its samples."""

    def __init__(self, cache: ShardCache) -> None:
        self._cache = cache
        self._unverified: dict[int, dict[int, int]] = {}
        """For each shard, the samples that were read early, by their position in the shard, and the xxh3-64 of their
        bytes."""
        self._checkable: dict[int, bool] = {}
        self._lock = threading.Lock()
        self._process = os.getpid()

    def can_read(self, number: int) -> bool:
        """Return True if the shard is missing, fillers are at work, and each of its samples can be checked."""
        cache = self._cache
        if not cache.node_state.fillers or cache.has_samples(number):
            return False
        if number not in self._checkable:
            objects = cache.shards.objects(cache.shards[number])
            self._checkable[number] = all(cache.store.can_check(remote_object) for remote_object in objects)
        return self._checkable[number]

    def read(self, numbers: Longs, positions: Longs, offsets: Longs, out: npt.NDArray[np.uint8]) -> bool:
        """Write the samples at these positions of these shards to `out`, at these offsets. Return False if the remote
        did not send all of them, checked; then the bytes must not be used."""
        cache = self._cache
        objects = [
            cache.shards.listing[cache.shards[number].start + position]
            for number, position in zip(numbers.tolist(), positions.tolist(), strict=True)
        ]

        def write(offset: int, data: Any) -> None:
            out[offset : offset + len(data)] = np.frombuffer(data, np.uint8)

        try:
            cache.store.fetch_many(
                objects, offsets.tolist(), write, lambda count: cache.counters.add("remote_bytes", count)
            )
        except Changed:
            raise
        except StoreError:  # the fetch of the shard succeeds or reports this error
            return False
        with self._guard():
            for number, position, offset, remote_object in zip(
                numbers.tolist(), positions.tolist(), offsets.tolist(), objects, strict=True
            ):
                digest = xxhash.xxh3_64_intdigest(out[offset : offset + remote_object.size].data)
                self._unverified.setdefault(number, {})[position] = digest
        return True

    @property
    def is_waiting(self) -> bool:
        """True if samples were read early whose shards were not compared with them yet."""
        return bool(self._unverified)

    def verify(self) -> None:
        """Compare the samples that were read early with the shards that have become whole since. Raises Changed. After
        an error of the store or the disk they are compared again later."""
        for number in list(self._unverified):
            if self._cache.has_samples(number):
                with self._guard():
                    digests = self._unverified.pop(number, {})
                try:
                    self._compare(number, digests)
                except Changed:
                    raise
                except BaseException:
                    with self._guard():
                        self._unverified[number] = {**digests, **self._unverified.get(number, {})}
                    raise

    def _compare(self, number: int, digests: dict[int, int]) -> None:
        cache = self._cache
        opened, index = cache.open_samples(number), cache.index(number)
        for position, digest in digests.items():
            data = os.pread(opened.file, int(index.sizes[position]), int(index.offsets[position]))
            if xxhash.xxh3_64_intdigest(data) != digest:
                raise early_error(cache.shards.listing.paths[cache.shards[number].start + position])

    def _guard(self) -> threading.Lock:
        if self._process != os.getpid():  # after a fork the lock may be held by a thread of the parent
            self._process, self._lock = os.getpid(), threading.Lock()
        return self._lock


def early_error(path: str) -> Changed:
    """Return the error for bytes of this object that were read early and differ from its shard."""
    return Changed(
        f"{path} was read before its shard was fetched, and had other bytes than it has now",
        cause="the source sent two contents with one version, or memory or a disk changed bytes",
        next_step="resume from a checkpoint of an earlier job; write a manifest with checksums (`topkube cache "
        "manifest --checksums`)",
    )
