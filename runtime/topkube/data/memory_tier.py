"""The memory tier: decoded samples of a dataset, one copy per node for all its ranks and their data loader's workers.

Files in memory (tmpfs): a column of records per leaf of the schema, a presence byte and a checksum per sample. Readers
map them read-only. A sample is claimed, with its room, by whoever writes it; it is written by pwrite, where a full
tmpfs is an error and not a SIGBUS, and counts as present only afterwards. What a process had claimed when it died stays
on the disk tier. Nothing is ever moved or changed, so there is nothing to lock against readers and no process number to
believe.
"""

from __future__ import annotations

import contextlib
import errno
import json
import mmap
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from topkube import _kernels
from topkube.data.batch import Array, Batch, Leaf, Schema, as_array, fits, parts, schema_of
from topkube.data.buffers import Buffers
from topkube.data.locks import FileLock
from topkube.errors import DatasetError

_USED, _BUMP = 0, 1
_ABSENT, _PRESENT, _WRITING = 0, 1, 2
_DIMENSIONS = 5
"""Most that an array of open shape may have."""
Longs = npt.NDArray[np.int64]


class Frozen(OSError):
    """The tier takes no more samples."""


class MemoryTier:
    """Room for the samples of one dataset under one transform. `limit`: most bytes, of all columns together."""

    def __init__(self, directory: Path, name: str, samples: int, limit: int) -> None:
        self.samples, self.limit = samples, limit
        self._owner = os.getpid()
        self.folder = directory / f"memory-{name}"
        self._user = FileLock(directory / f"memory-{name}.users")
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        if self._user.acquire(wait=False):
            _remove(self.folder)
            self._user.release()
        self._user.acquire(shared=True)
        self.folder.mkdir(mode=0o700, exist_ok=True)
        self.frozen = False
        self.schema: Schema | None = None
        self._columns: list[_Column] = []
        self._change = FileLock(self.folder / "change")
        self._cells = _map(self.folder / "cells", 16, write=True).view(np.int64)
        self.present = _map(self.folder / "present", samples, write=True)
        """A byte per sample: it is not here, it is here, or somebody is writing it."""
        self._sums = _map(self.folder / "sums", samples * 8, write=True).view(np.uint64)
        self._read_schema()

    @property
    def used(self) -> int:
        """Bytes of all samples that are here, or about to be."""
        return int(self._cells[_USED])

    def _read_schema(self) -> None:
        if self.schema is not None:
            return
        with contextlib.suppress(FileNotFoundError):
            schema = Schema.from_data(json.loads((self.folder / "schema.json").read_text()))
            self._columns = [
                _Column(self.folder / f"column-{number}", leaf, self.samples, self.limit)
                for number, leaf in enumerate(schema.leaves)
            ]
            self.schema = schema

    def gather(self, indices: Longs) -> Batch:
        """These samples, all of them present."""
        self._read_schema()
        assert self.schema is not None
        return Batch(self.schema, [column.gather(indices) for column in self._columns], indices.size)

    def has(self, indices: Longs) -> npt.NDArray[np.bool_]:
        """Which of these samples are here."""
        found: npt.NDArray[np.bool_] = self.present.take(indices) == _PRESENT
        return found

    def admit(self, indices: Longs, samples: Sequence[Any]) -> None:
        """Keeps these samples as far as there is room. Raises Frozen (an OSError) once where there is none any more,
        DatasetError where samples cannot be kept at all."""
        if self.frozen or not indices.size:
            return
        if self.schema is None:
            self._agree(samples)
        assert self.schema is not None
        if isinstance(samples, Batch) and samples.schema == self.schema and self.schema.fixed:
            whole = self._admit_batch(indices, samples)
        else:
            kept = [at for at in range(indices.size) if fits(self.schema, samples[at])]
            rows = [[as_array(value) for value in parts(samples[at])[2]] for at in kept]
            whole = self._admit_each(indices[kept], rows)
        if not whole:
            self.frozen = True
            raise Frozen(errno.ENOSPC, f"the limit of {self.limit:,} bytes is reached")

    def _claim(self, indices: Longs, sizes: Longs) -> tuple[Longs, bool]:
        """Takes room for the samples that nobody has or writes. Returns where in `indices` they stand, and whether
        there was room for all of them."""
        _, first = np.unique(indices, return_index=True)
        first.sort()
        with self._locked():
            free = first[self.present[indices[first]] == _ABSENT]
            total = np.cumsum(sizes[free])
            claimed = free[: int(np.searchsorted(total, self.limit - self.used, "right"))]
            self._cells[_USED] += sizes[claimed].sum()
            self.present[indices[claimed]] = _WRITING
        return claimed, claimed.size == free.size

    def _settle(self, samples: Longs, sizes: Longs, written: int, error: int) -> None:
        """The first `written` of the claimed samples are here, the others will not come. Raises Frozen for an error."""
        self.present[samples[:written]] = _PRESENT
        if error:
            self.frozen = True
            with self._locked():
                self.present[samples[written:]] = _ABSENT
                self._cells[_USED] -= sizes[written:].sum()
            raise Frozen(error, os.strerror(error))

    def _admit_batch(self, indices: Longs, batch: Batch) -> bool:
        """Whole columns at once. Returns whether there was room for all."""
        assert self.schema is not None
        size = self.schema.record_bytes
        sizes = np.full(indices.size, size)
        claimed, whole = self._claim(indices, sizes)
        samples = np.ascontiguousarray(indices[claimed])
        columns = [as_array(column) for column in batch.columns]
        if claimed.size < indices.size:
            columns = [column[claimed] for column in columns]
        written, error = claimed.size, 0
        for column, rows in zip(self._columns, columns, strict=True):
            done, failed = column.put_rows(samples[:written], rows[:written])
            if done < written:
                written, error = done, failed
        if len(columns) == 1 and size:
            view = _view(columns[0])
            sums = [xxhash.xxh3_64_intdigest(view[at : at + size]) for at in range(0, written * size, size)]
        else:
            sums = [_checksum([column[at] for column in columns]) for at in range(written)]
        self._sums[samples[:written]] = np.array(sums, np.uint64)
        self._settle(samples, sizes[claimed], written, error)
        return whole

    def _admit_each(self, indices: Longs, rows: list[list[Array]]) -> bool:
        """Samples as lists of their leaves' arrays. Returns whether there was room for all."""
        assert self.schema is not None
        most = max((array.ndim for row in rows for array in row), default=0)
        if most > _DIMENSIONS and not self.schema.fixed:
            raise DatasetError(f"an array has {most} dimensions", next_step=f"return at most {_DIMENSIONS}")
        sizes = np.array([sum(array.nbytes for array in row) for row in rows], np.int64)
        claimed, whole = self._claim(indices, sizes)
        samples, rows = indices[claimed], [rows[at] for at in claimed.tolist()]
        with self._locked():
            offset = int(self._cells[_BUMP])
            self._cells[_BUMP] += sum(
                row[at].nbytes for row in rows for at, leaf in enumerate(self.schema.leaves) if not leaf.fixed
            )
        written, failed = 0, 0
        try:
            for sample, row in zip(samples.tolist(), rows, strict=True):
                for column, array in zip(self._columns, row, strict=True):
                    offset = column.put(sample, array, offset)
                self._sums[sample] = _checksum(row)
                written += 1
        except OSError as error:
            failed = error.errno or errno.EIO
        self._settle(samples, sizes[claimed], written, failed)
        return whole

    def _agree(self, samples: Sequence[Any]) -> None:
        """The first samples decide the schema for all processes."""
        with self._locked():
            self._read_schema()
            if self.schema is None:
                schema = samples.schema if isinstance(samples, Batch) else schema_of(list(samples))
                part = self.folder / ".schema.json"
                part.write_text(json.dumps(schema.to_data()))
                os.replace(part, self.folder / "schema.json")
        self._read_schema()

    def check(self) -> list[int]:
        """Samples whose bytes are not what was written; they are no longer present afterwards."""
        damaged = []
        self._read_schema()
        for sample in np.flatnonzero(self.present == _PRESENT).tolist():
            if _checksum([column.get(sample) for column in self._columns]) != int(self._sums[sample]):
                damaged.append(sample)
                self.present[sample] = _ABSENT
        return damaged

    def _locked(self) -> FileLock:
        return FileLock(self.folder / "change")

    def close(self) -> None:
        """Ends this process's use; the last user's end frees the memory."""
        if os.getpid() != self._owner or not self._user.held:
            return
        self._user.release()
        with contextlib.suppress(OSError):
            if self._user.acquire(wait=False):
                _remove(self.folder)
                self._user.path.unlink(missing_ok=True)
                self._user.release()


class _Column:
    """The records of one leaf: of equal size at sample * size, or, where shapes differ, wherever there was room."""

    def __init__(self, path: Path, leaf: Leaf, samples: int, limit: int) -> None:
        self.leaf = leaf
        self._dtype = np.dtype(leaf.dtype)
        self._buffers = Buffers()
        size = samples * leaf.record_bytes if leaf.fixed else limit
        self._bytes = _map(path, size, sparse=True)
        self._file = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
        if leaf.fixed:
            assert leaf.shape is not None
            self._rows = self._bytes.view(self._dtype).reshape(samples, *leaf.shape)
        else:
            places = path.with_name(f"{path.name}.places")
            # offset, length, number of dimensions, the dimensions
            self._places = _map(places, samples * 64, write=True).view(np.int64).reshape(samples, 8)

    def gather(self, indices: Longs) -> Array | list[Array]:
        if self.leaf.fixed:
            assert self.leaf.shape is not None
            out = self._buffers.bytes(indices.size * self.leaf.record_bytes)
            _kernels.gather_rows(self._bytes, self.leaf.record_bytes, np.ascontiguousarray(indices), out)
            return out.view(self._dtype).reshape(indices.size, *self.leaf.shape)
        places = self._places[indices]
        lengths = np.ascontiguousarray(places[:, 1])
        out = np.empty(int(lengths.sum()), np.uint8)
        _kernels.gather_memory(self._bytes, np.ascontiguousarray(places[:, 0]), lengths, out)
        ends = np.cumsum(lengths)
        return [
            out[end - length : end].view(self._dtype).reshape(place[3 : 3 + place[2]])
            for end, length, place in zip(ends.tolist(), lengths.tolist(), places.tolist(), strict=True)
        ]

    def get(self, sample: int) -> Array:
        if self.leaf.fixed:
            return np.ascontiguousarray(self._rows[sample])
        found = self.gather(np.array([sample]))
        assert isinstance(found, list)
        return found[0]

    def put(self, sample: int, array: Array, offset: int) -> int:
        """Writes the record; returns where the next one of open shape goes."""
        if self.leaf.fixed:
            self._write(array, sample * self.leaf.record_bytes)
            return offset
        self._write(array, offset)
        self._places[sample] = [offset, array.nbytes, array.ndim, *array.shape, *([0] * (_DIMENSIONS - array.ndim))]
        return offset + array.nbytes

    def put_rows(self, samples: Longs, rows: Array) -> tuple[int, int]:
        """Writes records of equal size, one per sample. Returns how many, and the errno where one could not be."""
        return _kernels.write_rows(self._file, self.leaf.record_bytes, samples, _bytes(rows))

    def _write(self, array: Array, offset: int) -> None:
        view = _view(np.ascontiguousarray(array))
        while view:
            done = os.pwrite(self._file, view, offset)
            view, offset = view[done:], offset + done

    def __del__(self) -> None:
        with contextlib.suppress(OSError, AttributeError):
            os.close(self._file)


def _checksum(arrays: Iterable[Array]) -> int:
    """Of one sample: the arrays of its leaves."""
    state = xxhash.xxh3_64()
    for array in arrays:
        state.update(_view(np.ascontiguousarray(array)))
    return int(state.intdigest())


def _bytes(array: Array) -> npt.NDArray[np.uint8]:
    return array.reshape(-1).view(np.uint8) if array.nbytes else np.empty(0, np.uint8)


def _view(array: Array) -> memoryview:
    return _bytes(array).data


def _map(path: Path, size: int, *, write: bool = False, sparse: bool = False) -> npt.NDArray[np.uint8]:
    """The file's bytes, made where it is not there. Not `sparse`: its pages are taken now, so that writing to them
    cannot fail later."""
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        size = max(size, 1)
        if os.fstat(file).st_size < size:
            if sparse:
                os.ftruncate(file, size)
            else:
                os.posix_fallocate(file, 0, size)
        memory = mmap.mmap(file, size, prot=mmap.PROT_READ | (mmap.PROT_WRITE if write else 0))
    finally:
        os.close(file)
    return np.frombuffer(memory, np.uint8)


def _remove(folder: Path) -> None:
    with contextlib.suppress(FileNotFoundError):
        for path in list(folder.iterdir()):
            path.unlink(missing_ok=True)
        folder.rmdir()
