"""Row groups of Parquet shards that are read before their shard is in the cache.

The footer of a Parquet file is the index of its row groups, so a group can be requested alone. This is done only if the
store sends nothing but the listed version (If-Match, If-Unmodified-Since), because a checksum of the whole file cannot
check a range. When the shard is in the cache, the ranges that were read early are compared with it. A difference raises
Changed.
"""

from __future__ import annotations

import io
from typing import TYPE_CHECKING, Any

import numpy as np
import xxhash

from topkube.data.cache.disk.shard_file import compute_digest
from topkube.data.cache.early.early_samples import build_early_error
from topkube.data.remote.listing import Longs, RemoteObject
from topkube.data.remote.retry import Changed
from topkube.errors import StoreError

if TYPE_CHECKING:
    from topkube.data.cache.shard_cache import ShardCache

_FOOTER_BYTES = 64 << 10
"""The bytes that are read first from the end of a file: most footers are smaller."""
_LEAST_GROUPS = 4
"""A group is read early only if its shard is at least this many times larger. For a smaller shard, waiting takes about
as long as the request."""


class _RemoteFile(io.RawIOBase):
    """A remote object as a file for Arrow. `ranges`: start, stop and xxh3-128 of every range that was requested."""

    def __init__(self, cache: ShardCache, remote_object: RemoteObject) -> None:
        self._cache, self._object, self._at = cache, remote_object, 0
        self._held: list[tuple[int, bytes]] = []
        """Ranges from which `read` takes bytes: the position and the bytes of each range."""
        self.ranges: list[tuple[int, int, str]] = []
        self.error: Exception | None = None
        """The error of the store that ended a read."""

    def hold(self, start: int, stop: int) -> None:
        """Request a range, and keep its bytes for reads until `release`. Raises StoreError."""
        data = self._cache.store.read(self._object, start, stop)
        self._cache.counters.add("remote_bytes", len(data))
        self.ranges.append((start, stop, xxhash.xxh3_128_hexdigest(data)))
        self._held.append((start, data))

    def release(self) -> None:
        """Forget the bytes of all ranges."""
        self._held.clear()

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._at = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._object.size}[whence]
        return self._at

    def size(self) -> int:
        return self._object.size

    def read(self, size: int = -1) -> bytes:
        start, stop = self._at, self._object.size if size < 0 else min(self._at + size, self._object.size)
        self._at = max(start, stop)
        for attempt in range(2):  # the second attempt reads from the range that the first attempt has requested
            for first, data in self._held:
                if first <= start and stop <= first + len(data):
                    return data[start - first : stop - first]
            if start >= stop or attempt:
                break
            try:
                self.hold(start, stop)
            except Exception as error:  # Arrow may raise another error in its place
                self.error = error
                raise
        return b""


class EarlyGroups:
    """Reads row groups of shards that the fillers of this node have not fetched yet. The format of the dataset must be
    parquet. The caller makes sure that one thread uses it at a time."""

    def __init__(self, cache: ShardCache, arrow: Any) -> None:
        self._cache, self._arrow = cache, arrow
        self._files: dict[int, tuple[Any, _RemoteFile]] = {}
        self._refused: set[int] = set()
        """Shards that cannot be read early."""

    def can_read(self, number: int) -> bool:
        """Return True if the shard is not in the cache, fillers are at work, and ranges of the shard can be checked."""
        cache = self._cache
        if number in self._refused or not cache.node_state.filler_count or cache.has_samples(number):
            return False
        shard = cache.shards[number]
        if cache.shards.find_compression(number) or not cache.store.can_check_range(cache.shards.listing[shard.start]):
            self._refused.add(number)
            return False
        return True

    def find_first_rows(self, number: int) -> Longs | None:
        """Return the first row of each group of the shard, then the number of rows: (groups + 1,). Return None if the
        remote does not send the footer; then the caller waits for the shard. Raises Changed, and the errors of
        Arrow."""
        opened = self._open(number)
        if opened is None:
            return None
        metadata = opened[0].metadata
        counts = [metadata.row_group(group).num_rows for group in range(metadata.num_row_groups)]
        return np.concatenate(([0], np.cumsum(counts))).astype(np.int64)

    def read_group(self, number: int, group: int) -> Any | None:
        """Return a row group as an Arrow table. Return None if the group is a large part of its shard, or if the remote
        does not send it. Raises Changed, and the errors of Arrow."""
        opened = self._open(number)
        if opened is None:
            return None
        file, remote_file = opened
        columns = [file.metadata.row_group(group).column(at) for at in range(file.metadata.num_columns)]
        starts = [min(filter(None, (column.dictionary_page_offset, column.data_page_offset))) for column in columns]
        stops = [start + column.total_compressed_size for start, column in zip(starts, columns, strict=True)]
        start, stop = min(starts, default=0), max(stops, default=0)
        if not 0 < start < stop <= remote_file.size() or (stop - start) * _LEAST_GROUPS > remote_file.size():
            return None
        try:
            remote_file.hold(start, stop)
            return file.read_row_group(group, use_threads=False)
        except Exception as error:
            self._refuse_or_raise(number, remote_file.error or error)
            return None
        finally:
            remote_file.release()

    def _open(self, number: int) -> tuple[Any, _RemoteFile] | None:
        """Return the shard as a Parquet file, and the remote object behind it. Return None if the remote does not send
        the footer."""
        if number not in self._files:
            remote_object = self._cache.shards.listing[self._cache.shards[number].start]
            remote_file = _RemoteFile(self._cache, remote_object)
            try:
                remote_file.hold(max(0, remote_object.size - _FOOTER_BYTES), remote_object.size)
                file = self._arrow.parquet.ParquetFile(self._arrow.PythonFile(remote_file, "r"), pre_buffer=False)
            except Exception as error:
                self._refuse_or_raise(number, remote_file.error or error)
                return None
            finally:
                remote_file.release()
            self._files[number] = (file, remote_file)
        return self._files[number]

    def _refuse_or_raise(self, number: int, error: Exception) -> None:
        """After an error of the store, read no more of the shard early: the fetch of the whole shard will succeed or
        report the error. Raise all other errors."""
        if not isinstance(error, StoreError) or isinstance(error, Changed):
            raise error
        self._refused.add(number)

    def verify(self) -> None:
        """Compare the ranges that were read early with their shards, if the shards are in the cache now. Raises Changed
        if a range differs. After an error of the store or the disk, the next call compares the same ranges again."""
        cache = self._cache
        for number in [number for number in self._files if cache.has_samples(number)]:
            opened = cache.open_samples(number)
            ranges = self._files[number][1].ranges
            digests = [compute_digest(opened.file, stop - start, start) for start, stop, _ in ranges]
            del self._files[number]
            if digests != [expected for _, _, expected in ranges]:
                raise build_early_error(cache.shards.listing.paths[cache.shards[number].start])
