"""The index of a dataset's folder: a log with a record of 64 bytes for every published or removed shard.

The log is read as one array, so a million records load in milliseconds. An incomplete or damaged record is ignored. The
record of a shard is on disk before the shard gets its final name. The cache does not use a shard without a record.
"""

from __future__ import annotations

import errno
import os
import time
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from topkube.data.base.file_lock import FileLock

RECORD = np.dtype(
    [
        ("key", "<u8", 2),
        ("hash", "<u8", 2),
        ("size", "<i8"),  # negative: the shard was removed
        ("when", "<i8"),
        ("kind", "<u4"),
        ("samples", "<i4"),
        ("sum", "<u8"),
    ]
)
assert RECORD.itemsize == 64
PUBLISHED, REMOVED, INDEXED = 0x544B0001, 0x544B0002, 0x544B0003
"""Kinds of records. INDEXED: the sample index of the shard has `size` bytes. Older versions of TopKube ignore it."""
Records = npt.NDArray[Any]
_CHECKSUMMED_BYTES = RECORD.itemsize - 8
"""The bytes of a record that its checksum `sum` covers."""


def read_key(record: Any) -> str:
    """Return the key of the record's shard, 32 hexadecimal digits."""
    return f"{int(record['key'][0]):016x}{int(record['key'][1]):016x}"


def read_hash(record: Any) -> str:
    """Return the xxh3-128 of the record's shard, 32 hexadecimal digits."""
    return f"{int(record['hash'][0]):016x}{int(record['hash'][1]):016x}"


class RecordLog:
    """The log in the file `path`. A record is on disk when `append` returns."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._last_read: tuple[tuple[int, int], Records] | None = None
        """The state (inode and size) of the file at the last read, and its records."""
        self._index_bytes: tuple[Records, int] | None = None
        """The last result of `sum_index_bytes`, and the records to which it belongs."""

    def read_all(self) -> Records:
        """Return every valid record, in order."""
        try:
            stat = os.stat(self.path)
        except FileNotFoundError:
            return np.empty(0, RECORD)
        state = (stat.st_ino, stat.st_size)
        if self._last_read is not None and self._last_read[0] == state:
            return self._last_read[1]
        count = stat.st_size // RECORD.itemsize
        records: Records = np.memmap(self.path, RECORD, "r", shape=(count,)) if count else np.empty(0, RECORD)
        is_good = (records["kind"] >= PUBLISHED) & (records["kind"] <= INDEXED)
        if count <= 4096:  # in a large log, the checksum of a record is compared when the record is used
            is_good &= np.fromiter((_is_valid(record) for record in records), bool, count)
        if not is_good.all():
            records = records[is_good]
        self._last_read = (state, records)
        return records

    def read_live(self) -> Records:
        """Return the newest record of every shard in the cache."""
        records = self._select_shard_records()
        removed = records["kind"] == REMOVED
        if not removed.any():
            return records
        was_removed = np.isin(records["key"][:, 0], records["key"][removed, 0])  # the shard may be in the cache again
        newest: dict[bytes, int] = {}
        for index in np.flatnonzero(was_removed):
            newest[records["key"][index].tobytes()] = int(index)
        kept = [index for index in newest.values() if records["kind"][index] == PUBLISHED]
        return records[np.sort(np.concatenate((np.flatnonzero(~was_removed), np.array(kept, np.int64))))]

    def sum_shard_bytes(self) -> int:
        """Return the bytes of all shards in the cache."""
        records = self.read_all()
        return int(records["size"].sum(where=records["kind"] != INDEXED))

    def count_shards(self) -> int:
        """Return the number of shards in the cache. This takes a fraction of the memory of `read_live`."""
        kinds = self.read_all()["kind"]
        return int(np.count_nonzero(kinds == PUBLISHED)) - int(np.count_nonzero(kinds == REMOVED))

    def sum_index_bytes(self) -> int:
        """Return the bytes of the sample indexes of all shards in the cache."""
        records = self.read_all()
        if self._index_bytes is None or self._index_bytes[0] is not records:
            indexes = records[records["kind"] == INDEXED][::-1]
            if indexes.size:
                _, last = np.unique(indexes["key"][:, 0], return_index=True)
                indexes = indexes[last]
                indexes = indexes[np.isin(indexes["key"][:, 0], self.read_live()["key"][:, 0])]
            self._index_bytes = (records, int(indexes["size"].sum()))
        return self._index_bytes[1]

    def _select_shard_records(self) -> Records:
        """Return the records that publish or remove a shard."""
        records = self.read_all()
        indexes = records["kind"] == INDEXED
        return records[~indexes] if indexes.any() else records

    def find(self, key: str) -> Any | None:
        """Return the newest record of a shard; None if the cache does not have the shard or the record is damaged."""
        records = self._select_shard_records()
        first, second = _split_key(key)
        positions = np.flatnonzero(records["key"][:, 0] == first)
        positions = positions[records["key"][positions, 1] == second]
        if not positions.size:
            return None
        newest = records[positions[-1]]
        return newest if newest["kind"] == PUBLISHED and _is_valid(newest) else None

    def append(self, key: str, digest: str, size: int, samples: int = -1) -> None:
        """Record that a shard of `size` bytes with the xxh3-128 `digest` is published. `samples`: the number of its
        samples; -1 if it is unknown."""
        with FileLock(self.path):
            rows = []
            old = self.find(key)
            if old is not None:
                rows.append(_build_row(REMOVED, key, "0" * 32, -int(old["size"])))
            self._write([*rows, _build_row(PUBLISHED, key, digest, size, samples)])

    def append_index(self, key: str, size: int) -> None:
        """Record the size of a shard's index. If the machine crashes, the record may be lost. Then the index is created
        again."""
        with FileLock(self.path):
            self._write([_build_row(INDEXED, key, "0" * 32, size)], synced=False)

    def remove(self, key: str) -> int:
        """Record that a shard was removed. Return its bytes; 0 if the cache did not have the shard."""
        with FileLock(self.path):
            old = self.find(key)
            if old is None:
                return 0
            self._write([_build_row(REMOVED, key, "0" * 32, -int(old["size"]))])
            return int(old["size"])

    def _write(self, rows: list[bytes], *, synced: bool = True) -> None:
        file = os.open(self.path, os.O_WRONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            end = os.fstat(file).st_size
            end -= end % RECORD.itemsize  # overwrites the incomplete record of a writer that was killed
            data = b"".join(rows)
            byte_count = os.pwrite(file, data, end)
            if byte_count < len(data):  # the disk is full; readers ignore the incomplete record
                raise OSError(errno.ENOSPC, "the disk has no room for a record")
            if synced:
                os.fsync(file)
        finally:
            os.close(file)


def _split_key(key: str) -> tuple[int, int]:
    return int(key[:16], 16), int(key[16:], 16)


def _build_row(kind: int, key: str, digest: str, size: int, samples: int = -1) -> bytes:
    row = np.zeros((), RECORD)
    row["key"], row["hash"], row["size"], row["when"] = _split_key(key), _split_key(digest), size, int(time.time())
    row["kind"], row["samples"] = kind, samples
    row["sum"] = xxhash.xxh3_64_intdigest(row.tobytes()[:_CHECKSUMMED_BYTES])
    return row.tobytes()


def _is_valid(record: Any) -> bool:
    return int(record["sum"]) == xxhash.xxh3_64_intdigest(record.tobytes()[:_CHECKSUMMED_BYTES])
