"""Rows of Parquet and Arrow files. A row group (a record batch) is decoded once and kept while its rows are used."""

from __future__ import annotations

import contextlib
import os
import threading
from collections import OrderedDict
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from topkube.data.listing import Longs, Object
from topkube.errors import DatasetError

if TYPE_CHECKING:
    from topkube.data.cache import Cache
    from topkube.data.store import Store

_FILES = 64
_KEPT_BYTES = 512 << 20
"""Of decoded row groups, per process: a shuffle reads from many at once."""
_FOOTER_BYTES = 64 << 10


def _arrow() -> Any:
    try:
        import pyarrow
        import pyarrow.ipc
        import pyarrow.parquet
    except ImportError as error:
        raise DatasetError(
            "Parquet and Arrow files need pyarrow", cause=str(error), next_step="pip install 'topkube[parquet]'"
        ) from None
    return pyarrow


def parquet_rows(store: Store, one: Object) -> int:
    """The number of rows, from the file's footer alone. Raises DatasetError for what is not Parquet."""
    arrow = _arrow()
    tail = store.read(one, max(0, one.size - _FOOTER_BYTES), one.size)
    if len(tail) < 12 or tail[-4:] != b"PAR1":
        raise DatasetError(f"{one.path} is not a Parquet file", next_step="compare it with its source")
    length = int.from_bytes(tail[-8:-4], "little") + 8
    if length > one.size:
        raise DatasetError(f"{one.path} is a damaged Parquet file", next_step="compare it with its source")
    if length > len(tail):
        tail = store.read(one, one.size - length, one.size)
    try:
        return int(arrow.parquet.read_metadata(arrow.BufferReader(b"PAR1" + tail[-length:])).num_rows)
    except (arrow.ArrowException, OSError) as error:
        raise DatasetError(
            f"{one.path} is a damaged Parquet file: {error}", next_step="compare it with its source"
        ) from None


class RowGroups:
    """Rows by shard and number, decoded group by group. Threads may share it."""

    def __init__(self, cache: Cache) -> None:
        self._cache, self._arrow, self._process = cache, _arrow(), os.getpid()
        self._files: OrderedDict[int, tuple[Any, Longs]] = OrderedDict()
        self._groups: OrderedDict[tuple[int, int], Any] = OrderedDict()
        self._bytes = 0
        self._lock = threading.Lock()

    def _file(self, number: int) -> tuple[Any, Longs]:
        """An open file and the first row of each of its groups."""
        if number not in self._files:
            shard = self._cache.open(number)
            # A file position of its own: forks of this process share the descriptor's.
            source = self._arrow.OSFile(f"/proc/self/fd/{shard.file}")
            with self._naming(number):
                if self._cache.shards.format == "parquet":
                    file = self._arrow.parquet.ParquetFile(source)
                    counts = [file.metadata.row_group(at).num_rows for at in range(file.metadata.num_row_groups)]
                else:
                    file = self._arrow.ipc.open_file(source)
                    counts = [file.get_batch(at).num_rows for at in range(file.num_record_batches)]
            self._files[number] = (file, np.concatenate(([0], np.cumsum(counts))).astype(np.int64))
            while len(self._files) > _FILES:
                self._files.popitem(last=False)
        self._files.move_to_end(number)
        return self._files[number]

    @contextlib.contextmanager
    def _naming(self, number: int) -> Iterator[None]:
        """Arrow's errors become ours, with the shard's name."""
        try:
            yield
        except (self._arrow.ArrowException, OSError) as error:
            name = self._cache.shards.listing.paths[self._cache.shards[number].start]
            raise DatasetError(f"{name} cannot be read: {error}", next_step="compare it with its source") from None

    def _guard(self) -> threading.Lock:
        if self._process != os.getpid():  # a fork: the descriptors' positions are its parent's too
            self._process, self._lock = os.getpid(), threading.Lock()
            self._files.clear()
        return self._lock

    def count(self, number: int) -> int:
        """Rows of the shard."""
        with self._guard():
            return int(self._file(number)[1][-1])

    def _group(self, number: int, group: int) -> Any:
        """The row group as an Arrow table."""
        key = (number, group)
        if key not in self._groups:
            file = self._file(number)[0]
            with self._naming(number):
                table = file.read_row_group(group) if hasattr(file, "read_row_group") else file.get_batch(group)
            self._groups[key] = table
            self._bytes += table.nbytes
            while self._bytes > _KEPT_BYTES and len(self._groups) > 1:
                self._bytes -= self._groups.popitem(last=False)[1].nbytes
        self._groups.move_to_end(key)
        return self._groups[key]

    def rows(self, numbers: Longs, rows: Longs) -> list[dict[str, Any]]:
        """Row rows[i] of shard numbers[i], as a dict of its columns. A group is decoded once for all its rows."""
        found: list[dict[str, Any]] = [{}] * rows.size
        with self._guard():
            places: dict[tuple[int, int], list[tuple[int, int]]] = {}
            for at, (number, row) in enumerate(zip(numbers.tolist(), rows.tolist(), strict=True)):
                starts = self._file(number)[1]
                group = int(np.searchsorted(starts, row, "right")) - 1
                places.setdefault((number, group), []).append((at, row - int(starts[group])))
            for (number, group), wanted in places.items():
                taken = self._group(number, group).take([row for _, row in wanted]).to_pylist()
                for (at, _), row in zip(wanted, taken, strict=True):
                    found[at] = row
        return found
