"""Samples that are read before their shard is in the cache: each is an object of the remote, or a range of a tar shard.

A sample is read early only if its bytes can be checked. A file is checked by its checksum in the manifest; without a
checksum, the store must send only the listed version (If-Match, If-Unmodified-Since), and every response must have that
version. A sample of a tar shard is checked by its checksum in the index file of the manifest (remote_indexes.py). When
the shard is in the cache, the bytes are compared with the bytes of the shard. A difference raises Changed.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import xxhash

from topkube.data.cache.early.remote_indexes import RemoteIndexes
from topkube.data.formats.checked_index import CheckedIndex
from topkube.data.formats.sample_index import SampleIndex
from topkube.data.remote.listing import Longs
from topkube.data.remote.object_store import ByteRange
from topkube.data.remote.retry import Changed
from topkube.errors import StoreError

if TYPE_CHECKING:
    from topkube.data.cache.shard_cache import ShardCache

_EARLY_DIVISOR = 4
"""A process reads at most the size of a tar shard, divided by this number, early. Then it waits for the shard."""
_MAX_FILE_INDEXES = 64
"""The most indexes of shards of files that are kept."""


class EarlySamples:
    """Reads samples of shards that the fillers of this node have not fetched yet. The format of the dataset must be
    files or tar. For files, the listing is the index of the samples."""

    def __init__(self, cache: ShardCache) -> None:
        self._cache = cache
        self._unverified: dict[int, dict[int, int]] = {}
        """For each shard, the samples that were read early and have not been compared with the shard: their positions
        in the shard, and the xxh3-64 of their bytes."""
        self._index_digests: dict[int, str] = {}
        """The digests of the remote indexes with which samples were read early, by shard."""
        self._early_bytes: dict[int, int] = {}
        """The number of bytes of each shard that were read early."""
        self._file_indexes: dict[int, CheckedIndex | None] = {}
        """The indexes of shards of files; None for a shard that cannot be checked."""
        self._remote_indexes = RemoteIndexes(cache) if cache.shards.format == "tar" else None
        self._lock = threading.Lock()
        self._process = os.getpid()

    def load_indexes(self, positions: Mapping[int, Longs]) -> dict[int, CheckedIndex]:
        """Return the indexes of the shards whose samples can be read early: the shards are not in the cache, fillers
        are at work, and the samples can be checked. `positions`: the positions of the samples in each shard, by shard.
        Raises DatasetError if the index file does not belong to the manifest."""
        cache = self._cache
        missing = [number for number in positions if cache.node_state.filler_count and not cache.has_samples(number)]
        indexes: dict[int, CheckedIndex | None]
        if self._remote_indexes is None:
            indexes = {number: self._load_file_index(number) for number in missing}
        else:
            candidates = [number for number in missing if self._is_within_early_limit(number, 0)]
            indexes = {
                number: checked
                for number, checked in self._remote_indexes.load(candidates).items()
                if self._is_within_early_limit(number, int(checked.index.sizes[positions[number]].sum()))
            }
        return {number: checked for number, checked in indexes.items() if checked is not None}

    def _load_file_index(self, number: int) -> CheckedIndex | None:
        """Return the index of a shard of files without checksums of samples; None if a file cannot be checked."""
        if number not in self._file_indexes:
            objects = self._cache.shards.list_objects(self._cache.shards[number])
            can_check = all(self._cache.store.can_check(remote_object) for remote_object in objects)
            index = CheckedIndex(self._cache.load_index(number), np.empty((0, 2), np.uint64)) if can_check else None
            self._file_indexes[number] = index
            while len(self._file_indexes) > _MAX_FILE_INDEXES:
                self._file_indexes.pop(next(iter(self._file_indexes)), None)
            return index
        return self._file_indexes[number]

    def _is_within_early_limit(self, number: int, more: int) -> bool:
        """Return True if the early bytes of a tar shard, plus `more` bytes, are within the limit."""
        return self._early_bytes.get(number, 0) + more <= int(self._cache.shards.sizes[number]) // _EARLY_DIVISOR

    def read(
        self,
        indexes: Mapping[int, CheckedIndex],
        numbers: Longs,
        positions: Longs,
        offsets: Longs,
        out: npt.NDArray[np.uint8],
    ) -> bool:
        """Request samples, check them, and write them to `out`.

        Sample i is at positions[i] of shard numbers[i], and is written at offsets[i]. `indexes`: what `load_indexes`
        has returned for these shards. Return False if the remote did not send all samples; then the bytes must not be
        used. Raises Changed.
        """
        cache = self._cache
        samples = list(zip(numbers.tolist(), positions.tolist(), offsets.tolist(), strict=True))
        ranges = [self._find_range(indexes[number].index, number, position) for number, position, _ in samples]

        def write(offset: int, data: Any) -> None:
            out[offset : offset + len(data)] = np.frombuffer(data, np.uint8)

        try:
            cache.store.fetch_ranges(
                ranges, offsets.tolist(), write, lambda count: cache.counters.add("remote_bytes", count)
            )
        except Changed:
            raise
        except StoreError:  # the fetch of the whole shard will succeed or report the error
            return False
        data = [
            out[offset : offset + stop - start].data
            for (_, _, offset), (_, start, stop) in zip(samples, ranges, strict=True)
        ]
        if self._remote_indexes is not None:
            for (number, position, _), sample in zip(samples, data, strict=True):
                self._check_sample(indexes[number], number, position, sample)
        with self._get_lock():
            for (number, position, _), sample in zip(samples, data, strict=True):
                self._unverified.setdefault(number, {})[position] = xxhash.xxh3_64_intdigest(sample)
                self._early_bytes[number] = self._early_bytes.get(number, 0) + len(sample)
            if self._remote_indexes is not None:
                for number in indexes.keys() - self._index_digests.keys():
                    self._index_digests[number] = _compute_index_digest(indexes[number].index)
        return True

    def _find_range(self, index: SampleIndex, number: int, position: int) -> ByteRange:
        """Return the bytes of the sample, as a range of its object."""
        shards = self._cache.shards
        first = shards[number].start
        if self._remote_indexes is None:
            remote_object = shards.listing[first + position]
            return ByteRange(remote_object, 0, remote_object.size)
        start = int(index.offsets[position])
        return ByteRange(shards.listing[first], start, start + int(index.sizes[position]))

    def _check_sample(self, checked: CheckedIndex, number: int, position: int, sample: memoryview) -> None:
        """Compare a sample of a tar shard with its checksum in the index. Raises Changed if they differ."""
        checksum, expected = xxhash.xxh3_128_intdigest(sample), checked.get_checksum(position)
        if checksum != expected:
            raise Changed(
                f"the sample {checked.index.names[position]!r} of {self._get_path(number)} has the checksum "
                f"{checksum:032x}, its index has {expected:032x}",
                cause="the shard was written after its manifest, or its bytes were changed in transit",
                next_step="compare the shard with its source; if the shard is right, write manifest and index again "
                "(`topkube cache manifest --index`)",
            )

    def _get_path(self, number: int) -> str:
        return self._cache.shards.listing.paths[self._cache.shards[number].start]

    @property
    def has_unverified(self) -> bool:
        """True if samples were read early and have not been compared with their shards yet."""
        return bool(self._unverified)

    def verify(self) -> None:
        """Compare the samples that were read early with their shards, if the shards are in the cache now. Raises
        Changed if a sample differs. After an error of the store or the disk, the next call compares the same samples
        again."""
        for number in list(self._unverified):
            if self._cache.has_samples(number):
                with self._get_lock():
                    digests = self._unverified.pop(number, {})
                try:
                    self._compare(number, digests)
                except Changed:
                    raise
                except BaseException:
                    with self._get_lock():
                        self._unverified[number] = {**digests, **self._unverified.get(number, {})}
                    raise

    def _compare(self, number: int, digests: dict[int, int]) -> None:
        cache = self._cache
        opened, index = cache.open_samples(number), cache.load_index(number)
        if self._index_digests.get(number, "") not in ("", _compute_index_digest(index)):
            raise build_early_error(f"the index of {self._get_path(number)}")
        for position, digest in digests.items():
            data = os.pread(opened.file, int(index.sizes[position]), int(index.offsets[position]))
            if xxhash.xxh3_64_intdigest(data) != digest:
                raise build_early_error(cache.shards.listing.paths[cache.shards[number].start + position])

    def _get_lock(self) -> threading.Lock:
        if self._process != os.getpid():  # after a fork the lock may be held by a thread of the parent
            self._process, self._lock = os.getpid(), threading.Lock()
        return self._lock


def _compute_index_digest(index: SampleIndex) -> str:
    """Return the xxh3-128 of all columns of the index (names, fields, positions, sizes)."""
    state = xxhash.xxh3_128()
    for column in index.to_columns().values():
        state.update(column.tobytes())
    return state.hexdigest()


def build_early_error(path: str) -> Changed:
    """Return the error for an object whose bytes were read early and differ from the bytes of its shard."""
    return Changed(
        f"{path} was read before its shard was fetched, and had other bytes than it has now",
        cause="the source sent two contents with one version, or memory or a disk changed bytes",
        next_step="resume from a checkpoint of an earlier job; write a manifest with checksums (`topkube cache "
        "manifest --checksums`)",
    )
