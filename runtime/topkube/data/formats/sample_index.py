"""The positions of the samples in a shard. A sample is a contiguous region, and its fields are parts of that region."""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from topkube.data.remote.listing import Longs, Texts

ABSENT = -1
"""The length of a field that is missing in a sample."""


@dataclass(frozen=True)
class SampleIndex:
    """The positions of n samples with f fields, as columns. Field j of sample i has `lengths[i, j]` bytes from byte
    `offsets[i] + starts[i, j]` of the shard on; the length is ABSENT if the sample has no such field.

    `names` are the n names of the samples. `offsets` and `sizes` are (n,) int64: the first byte and the number of bytes
    of each sample. `fields` are the f names of the fields. `starts` and `lengths` are (n, f) int64, in bytes.
    """

    names: Texts
    offsets: Longs
    sizes: Longs
    fields: tuple[str, ...]
    starts: Longs
    lengths: Longs

    def __len__(self) -> int:
        return self.offsets.size

    def to_columns(self) -> dict[str, npt.NDArray[Any]]:
        """Return the arrays that `load` reads, by name, for `numpy.savez`."""
        return {
            "names": self.names.blob,
            "name_ends": self.names.ends,
            "offsets": self.offsets,
            "sizes": self.sizes,
            "fields": np.frombuffer("\0".join(self.fields).encode(), np.uint8),
            "starts": self.starts,
            "lengths": self.lengths,
        }

    @classmethod
    def load(cls, path: Path | BinaryIO) -> SampleIndex:
        """Load an index. Raises OSError, ValueError or KeyError if the file is incomplete."""
        with np.load(path, allow_pickle=False) as stored:
            count = stored["offsets"].size
            fields = tuple(stored["fields"].tobytes().decode().split("\0"))
            index = cls(
                Texts(stored["names"], stored["name_ends"]),
                stored["offsets"],
                stored["sizes"],
                fields,
                stored["starts"],
                stored["lengths"],
            )
        if not (len(index.names) == index.sizes.size == count and index.starts.shape == (count, len(fields))):
            raise ValueError(f"{path} is incomplete")
        return index


class IndexBuilder:
    """Builds an index from samples in the order of their bytes. Every sample has at least one field."""

    def __init__(self) -> None:
        self._names: list[str] = []
        self._first_parts: list[int] = []
        """For each sample, the number of fields that all samples before it have together."""
        self._fields: dict[str, int] = {}
        self._last_fields: set[str] = set()
        """The fields of the last sample that was begun."""
        self._columns, self._offsets, self._lengths = array("q"), array("q"), array("q")

    def begin(self, name: str) -> None:
        """Begin the next sample."""
        self._names.append(name)
        self._first_parts.append(len(self._offsets))
        self._last_fields.clear()

    def add(self, field: str, offset: int, length: int) -> bool:
        """Add a field to the sample that was begun last. Return False if it already has a field of that name. `offset`:
        the first byte of the field in the shard."""
        if field in self._last_fields:
            return False
        self._last_fields.add(field)
        self._columns.append(self._fields.setdefault(field, len(self._fields)))
        self._offsets.append(offset)
        self._lengths.append(length)
        return True

    def finish(self) -> SampleIndex:
        """Return the index of all samples."""
        count, width = len(self._names), max(1, len(self._fields))
        columns, offsets, lengths = (
            np.array(values, np.int64) for values in (self._columns, self._offsets, self._lengths)
        )
        firsts = np.array(self._first_parts, np.int64)
        samples = np.repeat(np.arange(count), np.diff(firsts, append=offsets.size))
        begins = np.minimum.reduceat(offsets, firsts) if count else offsets
        ends = np.maximum.reduceat(offsets + lengths, firsts) if count else offsets
        field_starts = np.zeros((count, width), np.int64)
        field_lengths = np.full((count, width), ABSENT, np.int64)
        field_starts[samples, columns], field_lengths[samples, columns] = offsets - begins[samples], lengths
        return SampleIndex(
            Texts.from_strings(self._names),
            begins,
            ends - begins,
            tuple(self._fields) or ("",),
            field_starts,
            field_lengths,
        )


def index_files(paths: list[str], sizes: Longs) -> SampleIndex:
    """Return the index of concatenated files. Each file is a sample with one field, whose name is empty."""
    ends = np.cumsum(sizes)
    count = sizes.size
    return SampleIndex(
        Texts.from_strings(paths),
        (ends - sizes).astype(np.int64),
        sizes.astype(np.int64),
        ("",),
        np.zeros((count, 1), np.int64),
        sizes.reshape(count, 1).astype(np.int64),
    )
