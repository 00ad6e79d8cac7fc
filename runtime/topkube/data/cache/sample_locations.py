"""The locations of samples: in which shard each sample is, and at which bytes of the shard."""

from __future__ import annotations

import os
import threading
from collections import OrderedDict

import numpy as np

from topkube.data.cache.shard_cache import ShardCache
from topkube.data.formats.sample_index import ABSENT, SampleIndex
from topkube.data.remote.listing import Longs
from topkube.errors import DatasetError

_MOST_INDEXES = 64
"""The most indexes of shards that are kept."""


class SampleLocations:
    """The locations of the samples of a dataset, or of one `field` of each sample. Shard i has `counts[i]` samples.
    Threads may share it; it keeps working after a fork."""

    def __init__(self, cache: ShardCache, counts: Longs, field: str | None) -> None:
        self._cache, self._field = cache, field
        self.starts: Longs = np.concatenate(([0], np.cumsum(counts))).astype(np.int64)
        """The first sample of each shard, then the number of samples: (shards + 1,)."""
        count = int(self.starts[-1])
        self.offsets: Longs = np.zeros(count, np.int64)
        self.lengths: Longs = np.zeros(count, np.int64)
        """The first byte of each sample in its shard, and the number of its bytes; 0 until its shard is located."""
        self._is_located = np.zeros(counts.size, bool)
        """True for each shard whose samples have entries in `offsets` and `lengths`."""
        self._indexes: OrderedDict[int, SampleIndex] = OrderedDict()
        self._lock = threading.Lock()
        self._process = os.getpid()

    def find_shards(self, indices: Longs) -> Longs:
        """Return the shard of each sample."""
        return np.searchsorted(self.starts, indices, "right") - 1

    def locate_shard(self, number: int) -> None:
        """Set the offsets and lengths of the shard's samples. Raises DatasetError if the shard has another number of
        samples than in the manifest, or if a sample does not have the field."""
        if self._is_located[number]:
            return
        index = self.load_index(number)
        first, last = int(self.starts[number]), int(self.starts[number + 1])
        if len(index) != last - first:
            raise DatasetError(
                f"{self._get_path(number)} has {len(index)} samples, but {last - first} in the manifest",
                cause="the shard was written again after its manifest",
                next_step="write the manifest again (`topkube cache manifest`)",
            )
        starts, lengths = self.find_fields(number, index)
        self.offsets[first:last], self.lengths[first:last] = index.offsets + starts, lengths
        self._is_located[number] = True

    def find_fields(self, number: int, index: SampleIndex) -> tuple[Longs | int, Longs]:
        """Return the start of the field in each sample of the shard, and the lengths of the fields. If whole samples
        are read, return 0 and the lengths of the samples."""
        if self._field is None or index.fields == ("",):
            return 0, index.sizes
        try:
            column = index.fields.index(self._field)
        except ValueError:
            raise DatasetError(
                f"{self._get_path(number)} has no field {self._field!r}",
                cause=f"the fields of its samples are {', '.join(index.fields)}",
                next_step="use one of these fields",
            ) from None
        lengths = index.lengths[:, column]
        if (lengths == ABSENT).any():
            missing = index.names[int(np.argmax(lengths == ABSENT))]
            raise DatasetError(f"{missing!r} in {self._get_path(number)} has no field {self._field!r}")
        return index.starts[:, column], lengths

    def load_index(self, number: int) -> SampleIndex:
        """Return the index of the shard's samples. The newest indexes are kept."""
        with self._get_lock():
            index = self._indexes.get(number)
        if index is None:
            index = self._cache.load_index(number)
            with self._get_lock():
                self._indexes[number] = index
                while len(self._indexes) > _MOST_INDEXES:
                    self._indexes.popitem(last=False)
        return index

    def _get_path(self, number: int) -> str:
        return self._cache.shards.listing.paths[self._cache.shards[number].start]

    def _get_lock(self) -> threading.Lock:
        if self._process != os.getpid():  # after a fork the lock may be held by a thread of the parent
            self._process, self._lock = os.getpid(), threading.Lock()
        return self._lock
