"""Rows of Parquet and Arrow files. A row group (a record batch) is decoded once and cached while its rows are used."""

from __future__ import annotations

import contextlib
import os
import threading
from collections import OrderedDict
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from topkube.data.base.open_files import build_too_many_files_error, is_files_pressure, limit_open_files
from topkube.data.cache.early.early_groups import EarlyGroups
from topkube.data.remote.listing import Longs, RemoteObject
from topkube.data.remote.retry import Changed
from topkube.errors import DatasetError
from topkube.installation import build_install_command

if TYPE_CHECKING:
    from topkube.data.cache.shard_cache import ShardCache
    from topkube.data.remote.object_store import ObjectStore

_MOST_FILES = 64
"""The most files of shards that stay open."""
_KEPT_BYTES = 512 << 20
"""The most bytes of decoded row groups that a process keeps. A shuffled batch has rows of many row groups."""
_FOOTER_BYTES = 64 << 10
"""The bytes that are read first from the end of a Parquet file: most footers are smaller."""


def _import_arrow() -> Any:
    try:
        import pyarrow
        import pyarrow.ipc
        import pyarrow.parquet
    except ImportError as error:
        raise DatasetError(
            "pyarrow is needed for Parquet and Arrow files",
            cause=str(error),
            next_step=build_install_command("parquet"),
        ) from None
    return pyarrow


def count_parquet_rows(store: ObjectStore, remote_object: RemoteObject) -> int:
    """Return the number of rows, read from the footer of the file. Raises DatasetError if the file is not Parquet."""
    arrow = _import_arrow()
    tail = store.read(remote_object, max(0, remote_object.size - _FOOTER_BYTES), remote_object.size)
    if len(tail) < 12 or tail[-4:] != b"PAR1":
        raise DatasetError(f"{remote_object.path} is not a Parquet file", next_step="compare it with its source")
    length = int.from_bytes(tail[-8:-4], "little") + 8
    if length > remote_object.size:
        raise DatasetError(f"{remote_object.path} is a damaged Parquet file", next_step="compare it with its source")
    if length > len(tail):
        tail = store.read(remote_object, remote_object.size - length, remote_object.size)
    try:
        return int(arrow.parquet.read_metadata(arrow.BufferReader(b"PAR1" + tail[-length:])).num_rows)
    except (arrow.ArrowException, OSError) as error:
        raise DatasetError(
            f"{remote_object.path} is a damaged Parquet file: {error}", next_step="compare it with its source"
        ) from None


def count_rows_of_file(file: int, name: str) -> int:
    """Return the number of rows of the Parquet file that is open as `file`. Raises DatasetError."""
    arrow = _import_arrow()
    try:
        return int(arrow.parquet.read_metadata(f"/proc/self/fd/{file}").num_rows)
    except (arrow.ArrowException, OSError) as error:
        raise DatasetError(f"{name} is not a Parquet file: {error}", next_step="compare it with its source") from None


class RowGroups:
    """A reader of rows that decodes whole row groups. Threads may share it. `early`: if possible, read groups of a
    Parquet shard before the shard is in the cache (early_groups.py)."""

    def __init__(self, cache: ShardCache, *, early: bool = False) -> None:
        self._cache, self._arrow, self._process = cache, _import_arrow(), os.getpid()
        self._early = EarlyGroups(cache, self._arrow) if early and cache.shards.format == "parquet" else None
        self._files: OrderedDict[int, tuple[Any, Longs]] = OrderedDict()
        self._groups: OrderedDict[tuple[int, int], Any] = OrderedDict()
        self._kept_bytes = 0
        self._most_files = limit_open_files(_MOST_FILES, 8)
        self._lock = threading.Lock()

    def _open_file(self, number: int) -> tuple[Any, Longs]:
        """Return the open file of a shard, and the first row of each of its groups, then the number of rows."""
        if number not in self._files:
            opened = self._cache.open_samples(number)
            # A file that is opened again has its own position. Forks share the position of an inherited descriptor.
            with self._translate_errors(number):
                source = self._arrow.OSFile(f"/proc/self/fd/{opened.file}")
                if self._cache.shards.format == "parquet":
                    file = self._arrow.parquet.ParquetFile(source)
                    counts = [file.metadata.row_group(at).num_rows for at in range(file.metadata.num_row_groups)]
                else:
                    file = self._arrow.ipc.open_file(source)
                    counts = [file.get_batch(at).num_rows for at in range(file.num_record_batches)]
            self._files[number] = (file, np.concatenate(([0], np.cumsum(counts))).astype(np.int64))
            while len(self._files) > self._most_files:
                self._files.popitem(last=False)
        self._files.move_to_end(number)
        return self._files[number]

    @contextlib.contextmanager
    def _translate_errors(self, number: int) -> Iterator[None]:
        """Replace errors of Arrow, and errors of Python for values that it cannot represent, by DatasetError with the
        name of the shard."""
        try:
            yield
        except (self._arrow.ArrowException, OSError, ValueError, TypeError, OverflowError) as error:
            if isinstance(error, OSError) and is_files_pressure(error):
                raise build_too_many_files_error() from None
            name = self._cache.shards.listing.paths[self._cache.shards[number].start]
            raise DatasetError(f"{name} cannot be read: {error}", next_step="compare it with its source") from None

    def _get_lock(self) -> threading.Lock:
        if self._process != os.getpid():  # after a fork the descriptors share their positions with the parent
            self._process, self._lock = os.getpid(), threading.Lock()
            self._files.clear()
        return self._lock

    def close_files(self) -> None:
        """Close all files unless a thread reads from them. Decoded groups are kept."""
        if self._lock.acquire(blocking=False):
            self._files.clear()
            self._lock.release()

    def count_rows(self, number: int) -> int:
        """Return the number of rows of the shard."""
        with self._get_lock():
            return int(self._open_file(number)[1][-1])

    def _read_group(self, number: int, group: int) -> Any:
        """Return the row group as an Arrow table."""
        key = (number, group)
        if key not in self._groups:
            table, early = None, self._choose_early_reader(number)
            if early is not None:
                with self._translate_errors(number):
                    table = early.read_group(number, group)
            if table is None:
                file = self._open_file(number)[0]
                with self._translate_errors(number):
                    table = file.read_row_group(group) if hasattr(file, "read_row_group") else file.get_batch(group)
            self._groups[key] = table
            self._kept_bytes += table.nbytes
            while self._kept_bytes > _KEPT_BYTES and len(self._groups) > 1:
                self._kept_bytes -= self._groups.popitem(last=False)[1].nbytes
        self._groups.move_to_end(key)
        return self._groups[key]

    def _choose_early_reader(self, number: int) -> EarlyGroups | None:
        """Return the reader of early groups if it can read groups of this shard now; else None."""
        early = self._early
        return early if early is not None and number not in self._files and early.can_read(number) else None

    def _find_first_rows(self, number: int) -> Longs:
        """Return the first row of each group of the shard, then the number of rows: (groups + 1,)."""
        if (early := self._choose_early_reader(number)) is not None:
            with self._translate_errors(number):
                if (first_rows := early.find_first_rows(number)) is not None:
                    return first_rows
        return self._open_file(number)[1]

    def verify_early(self) -> None:
        """Compare the groups that were read early with their shards, if the shards are in the cache now. Raises
        Changed if a group differs."""
        if self._early is None:
            return
        with self._get_lock():
            try:
                self._early.verify()
            except Changed:
                self._groups.clear()  # they may have the wrong bytes
                self._kept_bytes = 0
                raise

    def read_rows(self, numbers: Longs, rows: Longs) -> list[dict[str, Any]]:
        """Return row rows[i] of shard numbers[i] for every i, as dicts of columns. Each group is decoded once for all
        rows that it has."""
        result: list[dict[str, Any]] = [{}] * rows.size
        self.verify_early()
        with self._get_lock():
            places: dict[tuple[int, int], list[tuple[int, int]]] = {}
            missing = {
                number
                for number in np.unique(numbers).tolist()
                if number not in self._files and not self._cache.has_samples(number)
            }
            for position, (number, row) in enumerate(zip(numbers.tolist(), rows.tolist(), strict=True)):
                starts = self._find_first_rows(number)
                group = int(np.searchsorted(starts, row, "right")) - 1
                places.setdefault((number, group), []).append((position, row - int(starts[group])))
            for (number, group), rows_in_group in places.items():
                if number in missing and (number, group) not in self._groups:
                    self._cache.counters.add("disk_misses", len(rows_in_group))
                table = self._read_group(number, group)
                with self._translate_errors(number):
                    table_rows = table.take([row for _, row in rows_in_group]).to_pylist()
                for (position, _), row in zip(rows_in_group, table_rows, strict=True):
                    result[position] = row
        return result
