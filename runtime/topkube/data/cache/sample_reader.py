"""The reader of raw samples. It finds their shards and positions, and reads the bytes of many samples at once."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from topkube import _kernels
from topkube.data.base.batch import ArrayOf, Batch
from topkube.data.base.batch_buffers import BatchBuffers
from topkube.data.base.open_files import limit_open_files
from topkube.data.cache.early.early_samples import EarlySamples
from topkube.data.cache.open_shards import ShardFile
from topkube.data.cache.row_groups import RowGroups
from topkube.data.cache.sample_locations import SampleLocations
from topkube.data.cache.shard_cache import ShardCache
from topkube.data.formats.checked_index import CheckedIndex
from topkube.data.formats.sample_index import ABSENT, SampleIndex
from topkube.data.remote.listing import Longs
from topkube.errors import StoreError

NAME = "__key__"
"""The key of a tar sample's name."""
_MOST_HELD = 300
"""The most shards that a reader holds open."""
_TRIES = 4


class _HeldShards:
    """Open shards by number, and their descriptors; -1 for a shard that is not open."""

    def __init__(self, shards: int) -> None:
        self.files: dict[int, ShardFile] = {}
        self.descriptors = np.full(shards, -1, np.int32)


class _SampleBytes(NamedTuple):
    """The bytes of samples, one after the other, and the length of each. `early`: the indexes of the shards whose
    samples were read before the shards were in the cache."""

    data: npt.NDArray[np.uint8]
    lengths: Longs
    early: Mapping[int, SampleIndex] = MappingProxyType({})


class SampleReader:
    """Reads the samples of a dataset. Shard i has `counts[i]` samples. `field`: read only this field of tar samples.
    `early`: if possible, read samples before their shard is in the cache (early_samples.py)."""

    def __init__(self, cache: ShardCache, counts: Longs, field: str | None = None, *, early: bool = False) -> None:
        self.cache = cache
        self._locations = SampleLocations(cache, counts, field)
        self.starts = self._locations.starts
        """The first sample of each shard, then the number of samples: (shards + 1,)."""
        self._buffers = BatchBuffers()
        self._held = _HeldShards(counts.size)
        self._most_held = limit_open_files(_MOST_HELD, 4)
        close_held = weakref.WeakMethod(self._close_held)
        cache.open_shards.closers.append(lambda: (method := close_held()) and method())
        self._early = EarlySamples(cache) if early and cache.shards.format in ("files", "tar") else None
        self._row_groups = RowGroups(cache, early=early) if cache.shards.format in ("parquet", "arrow") else None
        self._lock = threading.Lock()
        self._process = os.getpid()

    def _close_held(self) -> None:
        """Stop holding shards open. A shard is closed when the last read that uses it ends."""
        self._held = _HeldShards(len(self.cache.shards))
        if self._row_groups is not None:
            self._row_groups.close_files()

    def __len__(self) -> int:
        return int(self.starts[-1])

    def find_shards(self, indices: Longs) -> Longs:
        """Return the shard of each sample."""
        return self._locations.find_shards(indices)

    def _get_lock(self) -> threading.Lock:
        if self._process != os.getpid():  # after a fork the lock may be held by a thread of the parent
            self._process, self._lock = os.getpid(), threading.Lock()
        return self._lock

    def _read_bytes(self, indices: Longs) -> _SampleBytes:
        """Return the bytes of the samples. Raises StoreError."""
        numbers = self.find_shards(indices)
        self.cache.counters.add("disk_requests", indices.size)
        if self._early is not None:
            self._early.verify()
            indexes = self._load_early_indexes(indices, numbers)
            if indexes and (read := self._read_partly_early(indices, numbers, indexes)) is not None:
                return read
        return _SampleBytes(*self._read_from_shards(indices, numbers))

    def _load_early_indexes(self, indices: Longs, numbers: Longs) -> dict[int, CheckedIndex]:
        """Return the indexes of the shards whose samples are read before the shards are in the cache."""
        assert self._early is not None
        is_open = self._held.descriptors.take(numbers) >= 0
        positions = {
            number: np.unique(indices[numbers == number]) - self.starts[number]
            for number in np.unique(numbers[~is_open]).tolist()
        }
        return self._early.load_indexes(positions) if positions else {}

    def _read_partly_early(
        self, indices: Longs, numbers: Longs, indexes: Mapping[int, CheckedIndex]
    ) -> _SampleBytes | None:
        """Read the samples of the shards in `indexes` before these shards are in the cache, and the other samples from
        their shards. Return None if that is not possible."""
        assert self._early is not None
        is_early = np.isin(numbers, list(indexes))
        early, whole = np.flatnonzero(is_early), np.flatnonzero(~is_early)
        starts, lengths, sizes = np.zeros((3, indices.size), np.int64)
        for number, checked in indexes.items():
            places = np.flatnonzero(numbers == number)
            positions = indices[places] - self.starts[number]
            field_starts, field_lengths = self._locations.find_fields(number, checked.index)
            starts[places] = np.broadcast_to(field_starts, field_lengths.shape)[positions]
            lengths[places], sizes[places] = field_lengths[positions], checked.index.sizes[positions]
        regions = np.empty(int(sizes.sum()), np.uint8)
        region_starts = np.cumsum(sizes) - sizes
        if not self._early.read(
            indexes, numbers[early], indices[early] - self.starts[numbers[early]], region_starts[early], regions
        ):
            return None
        self.cache.counters.add("disk_misses", early.size)
        data, lengths[whole] = self._read_from_shards(indices[whole], numbers[whole])
        sources = np.zeros(indices.size, np.int64)
        sources[early] = region_starts[early] + starts[early]
        sources[whole] = np.cumsum(lengths[whole]) - lengths[whole]
        joined = _join_samples(is_early, regions, data, sources, lengths)
        return _SampleBytes(joined, lengths, {number: checked.index for number, checked in indexes.items()})

    def verify_early(self) -> None:
        """Compare the samples that were read early with their shards, if the shards are in the cache now. Raises
        Changed if a sample differs."""
        if self._early is not None:
            self._early.verify()
        if self._row_groups is not None:
            self._row_groups.verify_early()

    def _read_held(self, indices: Longs, length: int) -> npt.NDArray[np.uint8] | None:
        """Return the bytes of samples whose shards this reader holds open, in one pass. Return None if a shard is not
        open, or if a sample has another length or cannot be read. Then `_read_bytes` opens the shard or raises the
        error."""
        if self._early is not None and self._early.has_unverified:
            return None
        held = self._held  # this reference keeps the files open until the read ends
        out = self._buffers.take(indices.size * length)
        if not _kernels.gather_samples(
            self.starts,
            held.descriptors,
            self._locations.offsets,
            self._locations.lengths,
            np.ascontiguousarray(indices),
            length,
            out,
        ):
            return None
        self.cache.counters.add("disk_requests", indices.size)
        self.cache.counters.add("disk_bytes", out.size)
        return out

    def _read_from_shards(self, indices: Longs, numbers: Longs) -> tuple[npt.NDArray[np.uint8], Longs]:
        """Return the bytes of the samples, one after the other, and the length of each."""
        most_shards = self._most_held
        if indices.size <= most_shards or np.unique(numbers).size <= most_shards:
            return self._read_few_shards(indices, numbers)
        parts = [
            self._read_few_shards(indices[at : at + most_shards], numbers[at : at + most_shards])
            for at in range(0, indices.size, most_shards)
        ]
        return np.concatenate([data for data, _ in parts]), np.concatenate([lengths for _, lengths in parts])

    def _read_few_shards(self, indices: Longs, numbers: Longs) -> tuple[npt.NDArray[np.uint8], Longs]:
        """Read samples of so few shards that all of them can be open at the same time."""
        counters = self.cache.counters
        for attempt in range(_TRIES):
            held = self._held  # this reference keeps the files open until the read ends
            opened = held.descriptors.take(numbers)
            if opened.size and opened.min() < 0:
                held = self._open_shards(held, numbers, count_misses=attempt == 0)
                opened = held.descriptors.take(numbers)
            lengths = self._locations.lengths.take(indices)
            total = int(lengths.sum())
            out = self._buffers.take(total)
            read_count, error = _kernels.gather_files(opened, self._locations.offsets.take(indices), lengths, out)
            if read_count == indices.size:
                counters.add("disk_bytes", total)
                return out, lengths
            self.cache.report_lost(int(numbers[read_count]), error)
            self._held = _HeldShards(len(self.cache.shards))
        raise StoreError(
            f"a shard of {self.cache.shards.uri} could not be read {_TRIES} times in a row",
            cause=os.strerror(error) if error else "its file has become shorter",
            next_step="check the kernel's log for errors of the disk",
        )

    def _open_shards(self, held: _HeldShards, numbers: Longs, *, count_misses: bool) -> _HeldShards:
        """Open the shards that are not in `held`. Return the object that holds all of these shards."""
        unique = np.unique(numbers)
        if len(held.files) + unique.size > self._most_held:  # other threads may be reading from the old object
            held = self._held = _HeldShards(len(self.cache.shards))
        for number in unique.tolist():
            if number in held.files:
                continue
            is_miss = count_misses and not self.cache.has_samples(number)
            opened = self.cache.open_samples(number)
            if is_miss:
                self.cache.counters.add("disk_misses", int((numbers == number).sum()))
            self._locations.locate_shard(number)
            with self._get_lock():  # another thread may have opened the shard and be reading from it
                if number not in held.files:
                    held.files[number] = opened
                    held.descriptors[number] = opened.file
            if not opened.is_cached:  # do not keep a shard in memory for long
                self._held = _HeldShards(len(self.cache.shards))
        return held

    def read_samples(self, indices: Longs) -> list[Any]:
        """Return raw samples: the bytes of a file, a dict of the fields of a tar sample (with its name as `__key__`),
        or a dict of the columns of a row."""
        if self._row_groups is not None:
            numbers = self.find_shards(indices)
            self.cache.counters.add("disk_requests", indices.size)
            return self._row_groups.read_rows(numbers, indices - self.starts[numbers])
        data, lengths, early = self._read_bytes(indices)
        view, ends = data.data, np.cumsum(lengths)
        regions = [view[end - length : end] for end, length in zip(ends.tolist(), lengths.tolist(), strict=True)]
        if self.cache.shards.format == "files":
            return [bytes(region) for region in regions]
        samples = []
        for region, index, number in zip(regions, indices.tolist(), self.find_shards(indices).tolist(), strict=True):
            shard_index = early[number] if number in early else self._locations.load_index(number)
            position = index - int(self.starts[number])
            sample: dict[str, Any] = {NAME: shard_index.names[position]}
            for field, start, length in zip(
                shard_index.fields,
                shard_index.starts[position].tolist(),
                shard_index.lengths[position].tolist(),
                strict=True,
            ):
                if length != ABSENT:
                    sample[field] = bytes(region[start : start + length])
            samples.append(sample)
        return samples

    def read_arrays(self, indices: Longs, decode: ArrayOf) -> Batch:
        """Return samples that `decode` decodes as one batch. `decode` must have the same field as this reader."""
        if (held_bytes := self._read_held(indices, decode.record_bytes)) is not None:
            return decode.decode_many(held_bytes, indices.size)
        data, lengths, _ = self._read_bytes(indices)
        if (lengths != decode.record_bytes).any():
            raise decode.size_error(int(lengths[lengths != decode.record_bytes][0]))
        return decode.decode_many(data, indices.size)


def _join_samples(
    is_early: npt.NDArray[np.bool_],
    regions: npt.NDArray[np.uint8],
    data: npt.NDArray[np.uint8],
    sources: Longs,
    lengths: Longs,
) -> npt.NDArray[np.uint8]:
    """Return the bytes of all samples, one after the other. Sample i has lengths[i] bytes from byte sources[i] on: of
    `regions` if is_early[i], else of `data`."""
    ends = np.cumsum(lengths)
    joined = np.empty(int(ends[-1]), np.uint8)
    for early, source, length, end in zip(
        is_early.tolist(), sources.tolist(), lengths.tolist(), ends.tolist(), strict=True
    ):
        joined[end - length : end] = (regions if early else data)[source : source + length]
    return joined


def convert_indices(indices: Sequence[int] | Longs, count: int) -> Longs:
    """Return the numbers of samples as an array without negative numbers, which count from the end of the `count`
    samples. Raises IndexError."""
    array = np.asarray(indices, np.int64)
    if array.size and (array.min() < -count or array.max() >= count):
        raise IndexError(f"sample {array.max() if array.max() >= count else array.min()} of {count}")
    return np.where(array < 0, array + count, array) if array.size and array.min() < 0 else array
