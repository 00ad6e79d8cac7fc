"""The index of a dataset's folder: a log of records of 64 bytes, one per published or removed shard.

It is read as one array, so that a million entries open in milliseconds; a torn or damaged record is passed over. The
record is on disk before its shard has its final name: a shard without one does not exist for us.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from topkube.data.locks import FileLock

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
PUBLISHED, REMOVED = 0x544B0001, 0x544B0002
Records = npt.NDArray[Any]
_SUMMED = RECORD.itemsize - 8


def key_of(record: Any) -> str:
    """32 hexadecimal digits."""
    return f"{int(record['key'][0]):016x}{int(record['key'][1]):016x}"


def hash_of(record: Any) -> str:
    return f"{int(record['hash'][0]):016x}{int(record['hash'][1]):016x}"


class RecordLog:
    """The log in `path`; every append is whole and on disk when it returns."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._seen: tuple[tuple[int, int], Records] | None = None

    def all(self) -> Records:
        """Every good record, in order."""
        try:
            stat = os.stat(self.path)
        except FileNotFoundError:
            return np.empty(0, RECORD)
        state = (stat.st_ino, stat.st_size)
        if self._seen is not None and self._seen[0] == state:
            return self._seen[1]
        count = stat.st_size // RECORD.itemsize
        records: Records = np.memmap(self.path, RECORD, "r", shape=(count,)) if count else np.empty(0, RECORD)
        good = (records["kind"] == PUBLISHED) | (records["kind"] == REMOVED)
        if count <= 4096:  # in a large log the sum is checked when a record is used
            good &= np.fromiter((_whole(record) for record in records), bool, count)
        if not good.all():
            records = records[good]
        self._seen = (state, records)
        return records

    def live(self) -> Records:
        """The record of every shard that is there, the newest of each."""
        records = self.all()
        removed = records["kind"] == REMOVED
        if not removed.any():
            return records
        gone = np.isin(records["key"][:, 0], records["key"][removed, 0])
        last: dict[bytes, int] = {}
        for index in np.flatnonzero(gone):
            last[records["key"][index].tobytes()] = int(index)
        kept = [index for index in last.values() if records["kind"][index] == PUBLISHED]
        return records[np.sort(np.concatenate((np.flatnonzero(~gone), np.array(kept, np.int64))))]

    def total(self) -> int:
        """Bytes of all shards that are there."""
        return int(self.all()["size"].sum())

    def find(self, key: str) -> Any | None:
        """The record of a shard that is there, None where there is none or it is damaged."""
        records = self.all()
        first, second = _words(key)
        at = np.flatnonzero(records["key"][:, 0] == first)
        at = at[records["key"][at, 1] == second]
        if not at.size or records["kind"][at[-1]] != PUBLISHED or not _whole(records[at[-1]]):
            return None
        return records[at[-1]]

    def append(self, key: str, digest: str, size: int, samples: int = -1) -> None:
        with FileLock(self.path):
            rows = []
            old = self.find(key)
            if old is not None:
                rows.append(_row(REMOVED, key, "0" * 32, -int(old["size"])))
            self._write([*rows, _row(PUBLISHED, key, digest, size, samples)])

    def remove(self, key: str) -> int:
        """Returns the bytes that the shard had; 0 where there was none."""
        with FileLock(self.path):
            old = self.find(key)
            if old is None:
                return 0
            self._write([_row(REMOVED, key, "0" * 32, -int(old["size"]))])
            return int(old["size"])

    def _write(self, rows: list[bytes]) -> None:
        file = os.open(self.path, os.O_WRONLY | os.O_CLOEXEC)
        try:
            end = os.fstat(file).st_size
            end -= end % RECORD.itemsize  # what a killed writer left
            data = b"".join(rows)
            written = os.pwrite(file, data, end)
            if written < len(data):  # a full disk takes part of it: half a record does not count
                raise OSError(28, "no room for an index record")
            os.fsync(file)
        finally:
            os.close(file)


def _words(key: str) -> tuple[int, int]:
    return int(key[:16], 16), int(key[16:], 16)


def _row(kind: int, key: str, digest: str, size: int, samples: int = -1) -> bytes:
    row = np.zeros((), RECORD)
    row["key"], row["hash"], row["size"], row["when"] = _words(key), _words(digest), size, int(time.time())
    row["kind"], row["samples"] = kind, samples
    row["sum"] = xxhash.xxh3_64_intdigest(row.tobytes()[:_SUMMED])
    return row.tobytes()


def _whole(record: Any) -> bool:
    return int(record["sum"]) == xxhash.xxh3_64_intdigest(record.tobytes()[:_SUMMED])
