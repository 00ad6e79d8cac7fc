"""The index of a tar shard with a checksum of every sample, as it is stored beside a manifest.

With this index, a sample can be requested alone and checked before its shard is in the cache. The manifest has the
checksum of the index, and the index has the checksums of the samples. All numbers have 64 bits, little-endian:

    magic (8 bytes), samples n, fields f, bytes of the samples' names, bytes of the fields' names
    ends of the names (n), offsets (n), sizes (n), starts (n, f), lengths (n, f), halves of the checksums (n, 2)
    names of the samples (UTF-8), names of the fields (UTF-8, a zero byte between two names)
"""

from __future__ import annotations

import os
import struct
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from topkube.data.formats.sample_index import ABSENT, SampleIndex
from topkube.data.remote.listing import Texts

_MAGIC = b"tkindex1"
_HEAD = struct.Struct("<8s4Q")
_MOST_FIELDS = 256
_READ_BYTES = 1 << 20


@dataclass(frozen=True)
class CheckedIndex:
    """`index`: the positions of n samples. `checksums`: (n, 2) uint64, the halves of the xxh3-128 of each sample: of
    its bytes from `offsets[i]` to `offsets[i] + sizes[i]` of the shard, with the headers between its fields."""

    index: SampleIndex
    checksums: npt.NDArray[np.uint64]

    def get_checksum(self, sample: int) -> int:
        """Return the xxh3-128 of a sample as a number."""
        high, low = self.checksums[sample].tolist()
        return int(high) << 64 | int(low)

    def pack(self) -> bytes:
        """Return the index in its stored form (see the docstring of this module)."""
        index = self.index
        fields, names = "\0".join(index.fields).encode(), index.names.blob.tobytes()
        head = _HEAD.pack(_MAGIC, len(index), len(index.fields), len(names), len(fields))
        numbers = (index.names.ends, index.offsets, index.sizes, index.starts, index.lengths)
        columns = [column.astype("<i8").tobytes() for column in numbers]
        return b"".join([head, *columns, self.checksums.astype("<u8").tobytes(), names, fields])


def compute_checked_index(file: int, index: SampleIndex) -> CheckedIndex:
    """Return the index with the checksums of its samples, read from the shard that is open as `file`."""
    checksums = np.empty((len(index), 2), np.uint64)
    for sample, (offset, size) in enumerate(zip(index.offsets.tolist(), index.sizes.tolist(), strict=True)):
        checksum = _compute_checksum(file, offset, size)
        checksums[sample] = checksum >> 64, checksum & (2**64 - 1)
    return CheckedIndex(index, checksums)


def _compute_checksum(file: int, offset: int, size: int) -> int:
    state, end = xxhash.xxh3_128(), offset + size
    while offset < end and (data := os.pread(file, min(end - offset, _READ_BYTES), offset)):
        state.update(data)
        offset += len(data)
    return state.intdigest()


def unpack_checked_index(data: bytes, shard_bytes: int) -> CheckedIndex:
    """Return the index from its stored form. Raises ValueError if the data is damaged, or if a sample lies outside of a
    shard of `shard_bytes` bytes."""
    if len(data) < _HEAD.size:
        raise ValueError("the index is too short")
    magic, count, field_count, name_bytes, field_bytes = _HEAD.unpack_from(data)
    expected = _HEAD.size + 8 * count * (5 + 2 * field_count) + name_bytes + field_bytes
    if magic != _MAGIC or not 1 <= field_count <= _MOST_FIELDS or len(data) != expected:
        raise ValueError("the index has another format or length")
    offset = _HEAD.size

    def take(kind: str, *shape: int) -> Any:
        nonlocal offset
        size = int(np.prod(shape))
        column = np.frombuffer(data, kind, size, offset).reshape(shape)
        offset += column.nbytes
        return column

    ends, offsets, sizes = (take("<i8", count) for _ in range(3))
    starts, lengths = (take("<i8", count, field_count) for _ in range(2))
    checksums, names, fields = take("<u8", count, 2), take("u1", name_bytes), take("u1", field_bytes).tobytes()
    _check_places(offsets, sizes, shard_bytes)
    is_present = lengths != ABSENT
    _check_places(np.where(is_present, starts, 0), np.where(is_present, lengths, 0), sizes[:, None])
    if (np.diff(ends, prepend=0) < 0).any() or (int(ends[-1]) if count else 0) != name_bytes:
        raise ValueError("the names of the index are damaged")
    field_names = tuple(fields.decode().split("\0"))
    if len(set(field_names)) != field_count:
        raise ValueError("the fields of the index are damaged")
    return CheckedIndex(SampleIndex(Texts(names, ends), offsets, sizes, field_names, starts, lengths), checksums)


def _check_places(starts: Any, sizes: Any, end: Any) -> None:
    """Raise ValueError unless all ranges, given by their starts and sizes, lie between 0 and `end`."""
    if ((starts < 0) | (starts > end) | (sizes < 0) | (sizes > end - starts)).any():
        raise ValueError("a sample of the index lies outside of its shard")
