"""A column of the memory tier: the records of one leaf of all samples, in a file in memory (tmpfs)."""

from __future__ import annotations

import contextlib
import mmap
import os
from pathlib import Path

import numpy as np
import numpy.typing as npt

from topkube import _kernels
from topkube.data.base.batch import Array, Leaf
from topkube.data.base.batch_buffers import BatchBuffers
from topkube.data.cache.memory.huge_pages import HugePages, count_huge_pages, map_column
from topkube.data.remote.listing import Longs

MOST_DIMENSIONS = 5
"""The most dimensions of an array whose shape differs between samples."""


class MemoryColumn:
    """The records of one leaf. A record of fixed size is at sample * size. Other records are stored in the order of
    their writes, and their places are stored too."""

    def __init__(self, path: Path, leaf: Leaf, samples: int, limit: int) -> None:
        self.leaf = leaf
        self.dtype = np.dtype(leaf.dtype)
        self.buffers = BatchBuffers()
        self.shape = leaf.shape or ()
        self.record_bytes = leaf.record_bytes if leaf.has_fixed_shape else 0
        """The bytes of a record of fixed size."""
        self.bytes = map_file(path, samples * self.record_bytes if leaf.has_fixed_shape else limit, sparse=True)
        self._moved = map_file(path.with_name(f"{path.name}.huge"), count_huge_pages(self.bytes.size), write=True)
        self._file = os.open(path, os.O_WRONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        if leaf.has_fixed_shape:
            self._rows = self.bytes.view(self.dtype).reshape(samples, *self.shape)
        else:
            places = path.with_name(f"{path.name}.places")
            # offset, length, number of dimensions, the dimensions
            self._places = map_file(places, samples * 64, write=True).view(np.int64).reshape(samples, 8)

    def find_huge_pages(self, present: npt.NDArray[np.uint8]) -> HugePages | None:
        """Return the object that moves this column into huge pages. Return None if the column is too small, or if its
        records differ in size, because the samples of a page are then unknown."""
        if not self.record_bytes or not count_huge_pages(self.bytes.size):
            return None
        return HugePages(self.bytes, self.record_bytes, present, self._moved)

    def contains(self, indices: Longs) -> npt.NDArray[np.bool_]:
        """Return, for each of these samples, True if its record of variable size ends inside the column."""
        places = self._places[indices]
        is_inside: npt.NDArray[np.bool_] = places[:, 0] + places[:, 1] <= self.bytes.size
        return is_inside

    def gather(self, indices: Longs) -> Array | list[Array]:
        """Return the records of these samples: one array if the leaf has a fixed shape, else a list of arrays."""
        if self.leaf.has_fixed_shape:
            out = self.buffers.take(indices.size * self.record_bytes)
            _kernels.gather_rows(self.bytes, self.record_bytes, np.ascontiguousarray(indices), out)
            return out.view(self.dtype).reshape(indices.size, *self.shape)
        places = self._places[indices]
        lengths = np.ascontiguousarray(places[:, 1])
        out = np.empty(int(lengths.sum()), np.uint8)
        _kernels.gather_memory(self.bytes, np.ascontiguousarray(places[:, 0]), lengths, out)
        ends = np.cumsum(lengths)
        return [
            out[end - length : end].view(self.dtype).reshape(place[3 : 3 + place[2]])
            for end, length, place in zip(ends.tolist(), lengths.tolist(), places.tolist(), strict=True)
        ]

    def get(self, sample: int) -> Array:
        """Return the record of one sample."""
        if self.leaf.has_fixed_shape:
            return np.ascontiguousarray(self._rows[sample])
        arrays = self.gather(np.array([sample]))
        assert isinstance(arrays, list)
        return arrays[0]

    def put(self, sample: int, array: Array, offset: int) -> int:
        """Write a record. Return the offset for the next record of variable size."""
        if self.leaf.has_fixed_shape:
            self._write(array, sample * self.record_bytes)
            return offset
        self._write(array, offset)
        self._places[sample] = [offset, array.nbytes, array.ndim, *array.shape, *([0] * (MOST_DIMENSIONS - array.ndim))]
        return offset + array.nbytes

    def put_rows(self, samples: Longs, rows: Array) -> tuple[int, int]:
        """Write one record of fixed size per sample. Return the number of records that were written, and the errno of
        the first write that failed; 0 if all were written."""
        return _kernels.write_rows(self._file, self.record_bytes, samples, _view_bytes(rows))

    def _write(self, array: Array, offset: int) -> None:
        view = view_memory(np.ascontiguousarray(array))
        while view:
            count = os.pwrite(self._file, view, offset)
            view, offset = view[count:], offset + count

    def __del__(self) -> None:
        with contextlib.suppress(OSError, AttributeError):
            os.close(self._file)


def _view_bytes(array: Array) -> npt.NDArray[np.uint8]:
    return array.reshape(-1).view(np.uint8) if array.nbytes else np.empty(0, np.uint8)


def view_memory(array: Array) -> memoryview:
    """Return the bytes of a C-contiguous array."""
    return _view_bytes(array).data


def map_file(path: Path, size: int, *, write: bool = False, sparse: bool = False) -> npt.NDArray[np.uint8]:
    """Map a file, and create it if it does not exist. Unless `sparse`, all pages are allocated now, so that a later
    write cannot fail."""
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        size = max(size, 1)
        if os.fstat(file).st_size < size:
            if sparse:
                os.ftruncate(file, size)
            else:
                os.posix_fallocate(file, 0, size)
        if sparse:
            return map_column(file, size)
        memory = mmap.mmap(file, size, prot=mmap.PROT_READ | (mmap.PROT_WRITE if write else 0))
    finally:
        os.close(file)
    return np.frombuffer(memory, np.uint8)
