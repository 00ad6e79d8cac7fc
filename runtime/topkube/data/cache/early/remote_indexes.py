"""The sample indexes of tar shards that the remote stores beside the manifest.

`topkube cache manifest --index` writes the indexes of all shards to one file. The manifest has the place and the
checksum of each shard's part of this file.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable
from typing import TYPE_CHECKING

import xxhash

from topkube.data.formats.checked_index import CheckedIndex, unpack_checked_index
from topkube.data.remote.listing import IndexPart
from topkube.data.remote.retry import Absent, Changed
from topkube.errors import DatasetError, StoreError

if TYPE_CHECKING:
    from topkube.data.cache.shard_cache import ShardCache

_KEPT_BYTES = 64 << 20
"""The most bytes of indexes that a process keeps. The index has about 100 bytes per sample."""


class RemoteIndexes:
    """The indexes of the shards of `cache`. Threads may share it."""

    def __init__(self, cache: ShardCache) -> None:
        self._cache = cache
        self._indexes: dict[int, CheckedIndex] = {}
        self._sizes: dict[int, int] = {}
        """The bytes of each index that is kept."""
        self._refused: set[int] = set()
        """Shards that have no index, or whose index the store did not send."""
        self._lock = threading.Lock()
        self._process = os.getpid()

    def load(self, numbers: Iterable[int]) -> dict[int, CheckedIndex]:
        """Return the indexes of these shards. Indexes that this process does not have are read together. A shard is
        left out if it has no index, or if the store does not send its index. Raises DatasetError if the index file does
        not belong to the manifest."""
        requested = set(numbers)
        if self._process != os.getpid():  # after a fork the lock may be held by a thread of the parent
            self._process, self._lock = os.getpid(), threading.Lock()
        with self._lock:
            if parts := self._choose_parts(requested):
                self._read(parts)
            return {number: self._indexes[number] for number in requested if number in self._indexes}

    def _read(self, parts: dict[int, IndexPart]) -> None:
        """Read these parts of the index file, check them and keep them."""
        cache = self._cache
        try:
            packed = cache.store.read_index_parts(list(parts.values()), cache.shards.listing.index_bytes)
        except (Absent, Changed) as error:
            raise self._build_error(next(iter(parts)), error.what) from None
        except StoreError:  # the fetch of the whole shards will succeed or report the error
            self._refused.update(parts)
            return
        for (number, part), data in zip(parts.items(), packed, strict=True):
            cache.counters.add("remote_bytes", len(data))
            self._indexes[number], self._sizes[number] = self._unpack(number, part, data), len(data)

    def _choose_parts(self, requested: set[int]) -> dict[int, IndexPart]:
        """Return the parts of the index file that must be read for these shards. Remove the oldest indexes to make
        room."""
        shards, parts = self._cache.shards, dict[int, IndexPart]()
        total = sum(self._sizes[number] for number in requested & self._sizes.keys())
        for number in sorted(requested - self._sizes.keys() - self._refused):
            part = shards.listing.find_index(shards[number].start)
            if part is None or shards.find_compression(number):
                self._refused.add(number)
            elif total + part.size <= _KEPT_BYTES:
                parts[number] = part
                total += part.size
        total += sum(self._sizes[number] for number in self._sizes.keys() - requested)
        for number in [number for number in self._indexes if number not in requested]:
            if total <= _KEPT_BYTES:
                break
            del self._indexes[number]
            total -= self._sizes.pop(number)
        return parts

    def _unpack(self, number: int, part: IndexPart, data: bytes) -> CheckedIndex:
        """Return the index of a shard from its part of the index file. Raises DatasetError if the part is wrong."""
        shard = self._cache.shards[number]
        if (checksum := xxhash.xxh3_128_hexdigest(data)) != part.checksum:
            raise self._build_error(number, f"it has the checksum {checksum}, the manifest has {part.checksum}")
        try:
            index = unpack_checked_index(data, shard.size)
        except ValueError as error:
            raise self._build_error(number, str(error)) from None
        samples = int(self._cache.shards.count_samples()[number])
        if samples >= 0 and len(index.index) != samples:
            raise self._build_error(number, f"it has {len(index.index)} samples, the manifest has {samples}")
        return index

    def _build_error(self, number: int, what: str) -> DatasetError:
        shards = self._cache.shards
        return DatasetError(
            f"the index of {shards.listing.paths[shards[number].start]} in {self._cache.store.index_uri} cannot be "
            f"used: {what}",
            cause="the index file and the manifest were not written together, or only the manifest was uploaded",
            next_step="write both again (`topkube cache manifest --index`) and store them beside the data, or open the "
            "dataset without early_samples",
        )
