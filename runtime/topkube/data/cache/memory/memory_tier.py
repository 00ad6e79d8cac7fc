"""The memory tier: decoded samples of a dataset, one copy per node for all ranks and the workers of their data loaders.

The tier consists of files in memory (tmpfs): a column of records per leaf of the schema, and a presence byte and a
checksum per sample. Readers map the files read-only. A writer first reserves the sample and its space, then writes with
pwrite (if tmpfs is full, this is an error, not a SIGBUS), and then marks the sample as present. If a process dies, the
samples that it had reserved are read from the disk tier. Stored samples never move or change, so readers need no lock.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from topkube import _kernels
from topkube.data.base.batch import Array, Batch, Schema, fits_schema, infer_schema, split_sample, to_array
from topkube.data.base.file_lock import FileLock
from topkube.data.base.permissions import make_private_folder
from topkube.data.cache.memory.huge_pages import HugePages
from topkube.data.cache.memory.memory_column import MOST_DIMENSIONS, MemoryColumn, map_file, view_memory
from topkube.data.remote.listing import Longs
from topkube.errors import DatasetError
from topkube.files import write_json

_USED_BYTES, _NEXT_OFFSET = 0, 1
"""The shared numbers: the bytes of all samples, and the offset of the next record of variable size."""
_ABSENT, _PRESENT, _WRITING = 0, 1, 2


class Frozen(OSError):
    """The tier takes no more samples."""


class MemoryTier:
    """The samples of one dataset, decoded by one function. `limit`: the most bytes of all columns. All processes that
    open a tier with this name must pass the same limit."""

    def __init__(self, directory: Path, name: str, samples: int, limit: int) -> None:
        self.samples, self.limit = samples, limit
        self._owner_process = os.getpid()
        self.folder = directory / f"memory-{name}"
        self._user_lock = FileLock(directory / f"memory-{name}.users")
        make_private_folder(directory)
        remove_unused_tiers(directory)
        self._user_lock.acquire(shared=True)
        self.folder.mkdir(mode=0o700, exist_ok=True)
        self.is_frozen = False
        self.schema: Schema | None = None
        self._columns: list[MemoryColumn] = []
        self._only_column: MemoryColumn | None = None
        """The column if samples have one leaf of fixed size."""
        self._huge_pages: list[HugePages] = []
        """The columns whose pages this process still moves."""
        self._cells = map_file(self.folder / "cells", 16, write=True).view(np.int64)
        self.present = map_file(self.folder / "present", samples, write=True)
        """A byte per sample: the sample is absent, present, or being written."""
        self._checksums = map_file(self.folder / "sums", samples * 8, write=True).view(np.uint64)
        self._read_schema()

    @property
    def used_bytes(self) -> int:
        """The bytes of all samples that are present or being written, and of failed writes whose space is not used
        again."""
        return int(self._cells[_USED_BYTES])

    def _read_schema(self) -> None:
        if self.schema is not None:
            return
        with contextlib.suppress(FileNotFoundError):
            schema = Schema.from_data(json.loads((self.folder / "schema.json").read_text()))
            self._columns = [
                MemoryColumn(self.folder / f"column-{number}", leaf, self.samples, self.limit)
                for number, leaf in enumerate(schema.leaves)
            ]
            self.schema = schema
            self._huge_pages = [pages for column in self._columns if (pages := column.find_huge_pages(self.present))]
            if schema.has_fixed_shape and len(self._columns) == 1:
                self._only_column = self._columns[0]

    def gather(self, indices: Longs) -> Batch:
        """Return these samples. All of them must be present."""
        self._read_schema()
        assert self.schema is not None
        batch = Batch(self.schema, [column.gather(indices) for column in self._columns], indices.size)
        self._use_huge_pages()
        return batch

    def gather_present(self, indices: Longs) -> Batch | None:
        """Return these samples in one pass. Return None if a sample is absent, or if samples have several leaves or
        differ in size. The caller then uses `has` and `gather`."""
        column = self._only_column
        if column is None:
            return None
        assert self.schema is not None
        count, size = indices.size, column.record_bytes
        out = column.buffers.take(count * size)
        if not _kernels.gather_set_rows(self.present, column.bytes, size, np.ascontiguousarray(indices), out):
            return None
        self._use_huge_pages()
        return Batch(self.schema, [out.view(column.dtype).reshape(count, *column.shape)], count)

    def _use_huge_pages(self) -> None:
        """Move one page of the columns into a huge page, from which batches are read faster."""
        for pages in self._huge_pages[:1]:
            pages.advance()
            if pages.is_over:  # threads read at the same time, so the list is replaced and not changed
                self._huge_pages = [other for other in self._huge_pages if not other.is_over]

    def has(self, indices: Longs) -> npt.NDArray[np.bool_]:
        """Return, for each of these samples, True if it is present. A sample that lies outside a column, because the
        tier is damaged, is absent."""
        self._read_schema()
        is_present: npt.NDArray[np.bool_] = self.present.take(indices) == _PRESENT
        for column in self._columns:
            if not column.leaf.has_fixed_shape:
                is_present &= column.contains(indices)
        return is_present

    def admit(self, indices: Longs, samples: Sequence[Any]) -> None:
        """Store as many of these samples as fit. Raises Frozen (an OSError) the first time that a sample does not fit,
        DatasetError for samples that cannot be stored."""
        if self.is_frozen or not indices.size:
            return
        if self.schema is None:
            self._agree_on_schema(samples)
        assert self.schema is not None
        if isinstance(samples, Batch) and samples.schema == self.schema and self.schema.has_fixed_shape:
            had_room = self._admit_batch(indices, samples)
        else:
            fitting = [position for position in range(indices.size) if fits_schema(self.schema, samples[position])]
            rows = [[to_array(value) for value in split_sample(samples[position])[2]] for position in fitting]
            had_room = self._admit_each(indices[fitting], rows)
        if not had_room:
            self.is_frozen = True
            raise Frozen(errno.ENOSPC, f"the limit of {self.limit:,} bytes is reached")

    def _reserve(self, indices: Longs, sizes: Longs) -> tuple[Longs, bool]:
        """Reserve the absent samples and their space. Return the positions of the reserved samples in `indices`, and
        True if all absent samples fit."""
        _, first_positions = np.unique(indices, return_index=True)
        first_positions.sort()
        with self._lock_tier():
            absent = first_positions[self.present[indices[first_positions]] == _ABSENT]
            total = np.cumsum(sizes[absent])
            reserved = absent[: int(np.searchsorted(total, self.limit - self.used_bytes, "right"))]
            self._cells[_USED_BYTES] += sizes[reserved].sum()
            self.present[indices[reserved]] = _WRITING
        return reserved, reserved.size == absent.size

    def _settle(self, samples: Longs, sizes: Longs, stored: int, error: int) -> None:
        """Mark the first `stored` reserved samples as present. If `error` is an errno, release the others and raise
        Frozen."""
        self.present[samples[:stored]] = _PRESENT
        if error:
            self.is_frozen = True
            with self._lock_tier():
                self.present[samples[stored:]] = _ABSENT
                if self.schema is not None and self.schema.has_fixed_shape:  # else their offsets are not used again
                    self._cells[_USED_BYTES] -= sizes[stored:].sum()
            raise Frozen(error, os.strerror(error))

    def _admit_batch(self, indices: Longs, batch: Batch) -> bool:
        """Store a batch, whole columns at once. Return True if there was room for all samples."""
        assert self.schema is not None
        size = self.schema.record_bytes
        sizes = np.full(indices.size, size)
        reserved, had_room = self._reserve(indices, sizes)
        samples = np.ascontiguousarray(indices[reserved])
        columns = [to_array(column) for column in batch.columns]
        if reserved.size < indices.size:
            columns = [column[reserved] for column in columns]
        stored, error = reserved.size, 0
        for column, rows in zip(self._columns, columns, strict=True):
            written, write_error = column.put_rows(samples[:stored], rows[:stored])
            if written < stored:
                stored, error = written, write_error
        if len(columns) == 1 and size:
            view = view_memory(columns[0])
            sums = [xxhash.xxh3_64_intdigest(view[at : at + size]) for at in range(0, stored * size, size)]
        else:
            sums = [_compute_checksum([column[at] for column in columns]) for at in range(stored)]
        self._checksums[samples[:stored]] = np.array(sums, np.uint64)
        self._settle(samples, sizes[reserved], stored, error)
        return had_room

    def _admit_each(self, indices: Longs, rows: list[list[Array]]) -> bool:
        """Store samples, given as lists of the arrays of their leaves. Return True if there was room for all
        samples."""
        assert self.schema is not None
        most = max((array.ndim for row in rows for array in row), default=0)
        if most > MOST_DIMENSIONS and not self.schema.has_fixed_shape:
            raise DatasetError(
                f"decode returned an array of {most} dimensions", next_step=f"use at most {MOST_DIMENSIONS}"
            )
        sizes = np.array([sum(array.nbytes for array in row) for row in rows], np.int64)
        reserved, had_room = self._reserve(indices, sizes)
        samples, rows = indices[reserved], [rows[at] for at in reserved.tolist()]
        with self._lock_tier():
            offset = int(self._cells[_NEXT_OFFSET])
            self._cells[_NEXT_OFFSET] += sum(
                row[at].nbytes for row in rows for at, leaf in enumerate(self.schema.leaves) if not leaf.has_fixed_shape
            )
        stored, write_error = 0, 0
        try:
            for sample, row in zip(samples.tolist(), rows, strict=True):
                for column, array in zip(self._columns, row, strict=True):
                    offset = column.put(sample, array, offset)
                self._checksums[sample] = _compute_checksum(row)
                stored += 1
        except OSError as error:
            write_error = error.errno or errno.EIO
        self._settle(samples, sizes[reserved], stored, write_error)
        return had_room

    def _agree_on_schema(self, samples: Sequence[Any]) -> None:
        """If the tier has no schema yet, store the schema of these samples for all processes."""
        with self._lock_tier():
            self._read_schema()
            if self.schema is None:
                schema = samples.schema if isinstance(samples, Batch) else infer_schema(list(samples))
                write_json(self.folder / "schema.json", schema.to_data())
        self._read_schema()

    def check(self) -> list[int]:
        """Return the samples whose bytes do not have their checksum, and mark these samples as absent."""
        damaged = []
        samples = np.flatnonzero(self.present == _PRESENT)
        for sample in samples[self.has(samples)].tolist():
            if _compute_checksum([column.get(sample) for column in self._columns]) != int(self._checksums[sample]):
                damaged.append(sample)
                self.present[sample] = _ABSENT
        return damaged

    def _lock_tier(self) -> FileLock:
        return FileLock(self.folder / "change")

    def close(self) -> None:
        """End the use by this process. The last user frees the memory."""
        if os.getpid() != self._owner_process or not self._user_lock.is_held:
            return
        self._user_lock.release()
        with contextlib.suppress(OSError):
            if self._user_lock.acquire(wait=False):
                _remove_folder(self.folder)
                self._user_lock.path.unlink(missing_ok=True)
                self._user_lock.release()


def _compute_checksum(arrays: Iterable[Array]) -> int:
    """Return the checksum of one sample, given the arrays of its leaves."""
    state = xxhash.xxh3_64()
    for array in arrays:
        state.update(view_memory(np.ascontiguousarray(array)))
    return int(state.intdigest())


def remove_unused_tiers(directory: Path) -> None:
    """Remove the tiers that no process uses: their users were killed. Their samples may be incomplete, and they take
    memory."""
    for path in directory.glob("memory-*.users"):
        lock = FileLock(path)
        with contextlib.suppress(OSError):
            if lock.acquire(wait=False):
                _remove_folder(path.with_suffix(""))
                path.unlink(missing_ok=True)
                lock.release()


def _remove_folder(folder: Path) -> None:
    with contextlib.suppress(FileNotFoundError):
        for path in list(folder.iterdir()):
            path.unlink(missing_ok=True)
        folder.rmdir()
