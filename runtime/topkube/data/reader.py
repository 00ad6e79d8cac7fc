"""Raw samples by number: which shard, where in it, and their bytes, many at once."""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from topkube import _kernels
from topkube.data.batch import ArrayOf, Batch
from topkube.data.buffers import Buffers
from topkube.data.cache import Cache, ShardFile
from topkube.data.listing import Longs
from topkube.data.row_groups import RowGroups
from topkube.data.sample_index import ABSENT, SampleIndex
from topkube.errors import DatasetError, StoreError

NAME = "__key__"
"""Under this a tar's sample has its name."""
_INDEXES = 64
_HELD = 300
"""Shards held open."""
_TRIES = 4


class _Held:
    """Open shards by number, and their descriptors: -1 where there is none."""

    def __init__(self, shards: int) -> None:
        self.files: dict[int, ShardFile] = {}
        self.descriptors = np.full(shards, -1, np.int32)


class Reader:
    """Samples of a dataset whose shards have `counts` samples."""

    def __init__(self, cache: Cache, counts: Longs, field: str | None = None) -> None:
        self.cache = cache
        self.starts: Longs = np.concatenate(([0], np.cumsum(counts))).astype(np.int64)
        self._field = field
        self._buffers = Buffers()
        self._indexes: OrderedDict[int, SampleIndex] = OrderedDict()
        self._held = _Held(counts.size)
        self._known = np.zeros(counts.size, bool)
        self._offsets = np.zeros(len(self), np.int64)
        self._lengths = np.zeros(len(self), np.int64)
        self._row_groups = RowGroups(cache) if cache.shards.format in ("parquet", "arrow") else None
        self._lock = threading.Lock()
        self._process = os.getpid()

    def __len__(self) -> int:
        return int(self.starts[-1])

    def shards_of(self, indices: Longs) -> Longs:
        """The shard of each sample."""
        return np.searchsorted(self.starts, indices, "right") - 1

    def _places(self, number: int) -> None:
        """Learns where the shard's samples (or their `field`) lie."""
        if self._known[number]:
            return
        index = self._index(number)
        first, last = int(self.starts[number]), int(self.starts[number + 1])
        if len(index) != last - first:
            raise DatasetError(
                f"{self._object(number)} holds {len(index)} samples, the manifest says {last - first}",
                cause="the shard was written again after its manifest",
                next_step="write the manifest again (`topkube cache manifest`)",
            )
        if self._field is None or index.fields == ("",):
            offsets, lengths = index.offsets, index.sizes
        else:
            try:
                column = index.fields.index(self._field)
            except ValueError:
                raise DatasetError(
                    f"{self._object(number)} has no field {self._field!r}",
                    cause=f"its samples have {', '.join(index.fields)}",
                    next_step="name one of these",
                ) from None
            lengths = index.lengths[:, column]
            if (lengths == ABSENT).any():
                missing = index.names[int(np.argmax(lengths == ABSENT))]
                raise DatasetError(f"{missing!r} in {self._object(number)} has no field {self._field!r}")
            offsets = index.offsets + index.starts[:, column]
        self._offsets[first:last], self._lengths[first:last] = offsets, lengths
        self._known[number] = True

    def _index(self, number: int) -> SampleIndex:
        with self._guard():
            found = self._indexes.get(number)
        if found is None:
            found = self.cache.index(number)
            with self._guard():
                self._indexes[number] = found
                while len(self._indexes) > _INDEXES:
                    self._indexes.popitem(last=False)
        return found

    def _guard(self) -> threading.Lock:
        if self._process != os.getpid():
            self._process, self._lock = os.getpid(), threading.Lock()
        return self._lock

    def _object(self, number: int) -> str:
        return self.cache.shards.listing.paths[self.cache.shards[number].start]

    def read(self, indices: Longs) -> tuple[npt.NDArray[np.uint8], Longs]:
        """The samples' bytes, one after the other, and the length of each. Raises StoreError."""
        counters = self.cache.counters
        numbers = self.shards_of(indices)
        counters.add("disk_requests", indices.size)
        for turn in range(_TRIES):
            held = self._held  # kept to the end of the read: its files stay open
            opened = held.descriptors.take(numbers)
            if opened.size and opened.min() < 0:
                held = self._hold(held, numbers, count_misses=turn == 0)
                opened = held.descriptors.take(numbers)
            lengths = self._lengths.take(indices)
            total = int(lengths.sum())
            out = self._buffers.bytes(total)
            done, error = _kernels.gather_files(opened, self._offsets.take(indices), lengths, out)
            if done == indices.size:
                counters.add("disk_bytes", total)
                return out, lengths
            self.cache.lost(int(numbers[done]), error)
            self._held = _Held(len(self.cache.shards))
        raise StoreError(
            f"a shard of {self.cache.shards.uri} could not be read {_TRIES} times in a row",
            cause=os.strerror(error) if error else "its file is shorter than it was",
            next_step="look at the kernel's log for errors of the disk",
        )

    def _hold(self, held: _Held, numbers: Longs, *, count_misses: bool) -> _Held:
        """Opens what `held` lacks of these shards; what holds all of them."""
        unique = np.unique(numbers)
        if len(held.files) + unique.size > _HELD:  # others may be reading from the old one
            held = self._held = _Held(len(self.cache.shards))
        for number in unique.tolist():
            if number in held.files:
                continue
            missed = count_misses and not self.cache.has(number)
            file = self.cache.open(number)
            if missed:
                self.cache.counters.add("disk_misses", int((numbers == number).sum()))
            self._places(number)
            held.files[number] = file
            held.descriptors[number] = file.file
            if not file.cached:  # a shard in memory is not held for long
                self._held = _Held(len(self.cache.shards))
        return held

    def samples(self, indices: Longs) -> list[Any]:
        """Raw samples: bytes of a file; of a tar a dict of fields, with the sample's name under `__key__`; of a table a
        dict of its columns."""
        if self._row_groups is not None:
            numbers = self.shards_of(indices)
            self.cache.counters.add("disk_requests", indices.size)
            return self._row_groups.rows(numbers, indices - self.starts[numbers])
        data, lengths = self.read(indices)
        view, ends = data.data, np.cumsum(lengths)
        regions = [view[end - length : end] for end, length in zip(ends.tolist(), lengths.tolist(), strict=True)]
        if self.cache.shards.format == "files":
            return [bytes(region) for region in regions]
        found = []
        for region, index, number in zip(regions, indices.tolist(), self.shards_of(indices).tolist(), strict=True):
            shard, at = self._index(number), index - int(self.starts[number])
            sample: dict[str, Any] = {NAME: shard.names[at]}
            for field, start, length in zip(
                shard.fields, shard.starts[at].tolist(), shard.lengths[at].tolist(), strict=True
            ):
                if length != ABSENT:
                    sample[field] = bytes(region[start : start + length])
            found.append(sample)
        return found

    def arrays(self, indices: Longs, decode: ArrayOf) -> Batch:
        """The samples as `decode` has them, in one piece. Its field must be this reader's."""
        data, lengths = self.read(indices)
        if (lengths != decode.record_bytes).any():
            raise decode.wrong(int(lengths[lengths != decode.record_bytes][0]))
        return decode.many(data, indices.size)


def as_indices(indices: Sequence[int] | Longs, count: int) -> Longs:
    """Sample numbers as an array; negative ones count from the end. Raises IndexError."""
    array = np.asarray(indices, np.int64)
    if array.size and (array.min() < -count or array.max() >= count):
        raise IndexError(f"sample {array.max() if array.max() >= count else array.min()} of {count}")
    return np.where(array < 0, array + count, array) if array.size and array.min() < 0 else array
