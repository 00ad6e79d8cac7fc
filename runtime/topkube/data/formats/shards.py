"""The division of a dataset into shards. A shard is the unit that is fetched, cached and verified.

If all files of a dataset are tar files, or all Parquet, or all Arrow, or if the caller names such a format, each file
is a shard. Files that describe a dataset (README.md, _SUCCESS, hidden files) do not count for that; they are shards
without samples, and so are files with other endings if the caller names the format. Otherwise files are joined, in the
order of their paths, into shards of about `GROUP_BYTES`, because every shard costs a lock, a rename and an fsync. No
file is split.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import numpy.typing as npt
import xxhash

from topkube.data.formats.compression import Compression, find_compression
from topkube.data.remote.listing import Listing, Longs, RemoteObject
from topkube.errors import DatasetError

Format = Literal["auto", "files", "tar", "parquet", "arrow"]
GROUP_BYTES = 8 << 20
UNKNOWN_SIZE = -1
_PLAIN_ENDINGS: dict[str, tuple[str, ...]] = {
    "tar": (".tar",),
    "parquet": (".parquet",),
    "arrow": (".arrow", ".feather"),
}
"""The endings of uncompressed shards, by format."""
_ENDINGS = {
    format_name: tuple(ending + suffix for ending in endings for suffix in ("", ".gz", ".zst"))
    + ((".tgz", ".tzst") if format_name == "tar" else ())
    for format_name, endings in _PLAIN_ENDINGS.items()
}
"""The endings of all shards that can be read, by format."""
_REFUSED = (".tar.bz2", ".tbz2", ".tar.xz", ".txz", ".tar.lz4")
"""The endings of shards whose compression is not supported."""
_DESCRIPTION = re.compile(
    r"(^|/)(\..*|(readme|licen[cs]e)(\.[a-z]+)?|[^/]*\.md|_SUCCESS|_metadata|_common_metadata)$", re.IGNORECASE
)
"""The paths of files that describe a dataset, and of files that other programs write beside it."""
_DECOMPRESSED = "decompressed"
"""The form of a shard's decompressed bytes (see `Shards.compute_key`)."""


@dataclass(frozen=True)
class DataShard:
    """A shard: the bytes of objects `start` to `stop - 1` of the listing, concatenated, or their decompressed bytes."""

    cache_number: int
    """The number of its file in the cache (see `Shards.cache_number_limit`): the number of the shard. For decompressed
    bytes, it is the number of the shard plus the length of `Shards`."""
    key: str
    """The name in the cache."""
    start: int
    stop: int
    size: int
    """The number of bytes; UNKNOWN_SIZE for decompressed bytes. If the decompressed bytes are in a file in memory and
    not in the disk tier, the cache replaces UNKNOWN_SIZE by the size of that file."""


class Shards:
    """All shards of a listing, stored in columns.

    `group_bytes` is the approximate size, in bytes, of a shard that joins files; only the format "files" uses it. With
    the format "auto", the endings of the names determine the format.
    """

    def __init__(self, uri: str, listing: Listing, format: Format = "auto", group_bytes: int = GROUP_BYTES) -> None:
        self.uri, self.listing = uri, listing
        self.format = format if format != "auto" else _detect_format(listing)
        if self.format == "files":
            # The bytes of all files, joined, are cut into groups of `group_bytes`. A file belongs to the group of its
            # last byte. An empty file belongs to the group of the byte before it, or to group 0.
            ends = np.cumsum(listing.sizes)
            groups = np.maximum(ends - 1, 0) // max(1, group_bytes)
            self._starts: Longs = np.concatenate(([0], np.flatnonzero(np.diff(groups)) + 1)).astype(np.int64)
        else:
            self._starts = np.arange(len(listing), dtype=np.int64)
        self._stops: Longs = np.append(self._starts[1:], len(listing))
        """Shard i has the objects from _starts[i] to _stops[i] - 1 of the listing."""
        self.sizes: Longs = np.add.reduceat(listing.sizes, self._starts)
        """The bytes of each shard in the remote: (shards,) int64. For a compressed shard, it is the compressed size."""
        self._has_samples = _find_objects_with_samples(listing, self.format)
        self.has_compressed = self.format != "files" and any(
            find_compression(listing.paths[index]) for index in range(len(listing)) if self.has_samples(index)
        )
        """True if an object of the dataset is a compressed shard with samples."""

    def __len__(self) -> int:
        return self._starts.size

    def __getitem__(self, number: int) -> DataShard:
        start, stop = int(self._starts[number]), int(self._stops[number])
        return DataShard(number, self.compute_key(number), start, stop, int(self.sizes[number]))

    def compute_key(self, number: int, form: str = "") -> str:
        """Return the name of a shard in the cache: 32 hexadecimal digits, a hash of the URI, of the paths, sizes and
        versions of the shard's objects, and of `form`. `form` is empty for the bytes of the remote, and _DECOMPRESSED
        for the decompressed bytes. Decompressed bytes cannot be compared with the checksums of the objects, so these
        checksums are part of their name."""
        start, stop = int(self._starts[number]), int(self._stops[number])
        state = xxhash.xxh3_128(f"{self.uri}\0{form}\0{stop - start}\0".encode())
        listing = self.listing
        for texts in (listing.paths, listing.versions):
            # The ends separate the texts: "ab" and "c" have another hash than "a" and "bc".
            ends = texts.ends[start:stop] - (texts.ends[start - 1] if start else 0)
            state.update(ends.astype("<i8").tobytes())
            state.update(texts.view_bytes(start, stop))
        state.update(listing.sizes[start:stop].astype("<i8").tobytes())
        if form and (checksums := listing.checksums[start:stop]).any():
            state.update(checksums.astype("<u8").tobytes())
        return state.hexdigest()

    def list_keys(self) -> list[str]:
        """Return the keys of all files that the cache may have: of all shards, and of the decompressed bytes of shards
        that are compressed."""
        keys = [self.compute_key(number) for number in range(len(self))]
        if self.has_compressed:
            keys += [
                self.compute_key(number, _DECOMPRESSED) for number in range(len(self)) if self.find_compression(number)
            ]
        return keys

    @property
    def cache_number_limit(self) -> int:
        """The numbers of all files in the cache are below this limit. Number i < len(self) is the file with the bytes
        of shard i. Number len(self) + i is the file with the decompressed bytes of shard i, and is unused if shard i is
        not compressed."""
        return 2 * len(self) if self.has_compressed else len(self)

    def has_samples(self, number: int) -> bool:
        """Return False for a shard that is a file beside the shards of the format, such as README.md."""
        return self._has_samples is None or bool(self._has_samples[number])

    def find_compression(self, number: int) -> Compression:
        """Return the compression of shard `number`; empty if the shard is not compressed, or has no samples."""
        if not self.has_compressed or not self.has_samples(number):
            return ""
        return find_compression(self.listing.paths[int(self._starts[number])])

    def get_samples_shard(self, number: int) -> DataShard:
        """Return the shard from which the samples of shard `number` are read: the shard itself, or its decompressed
        bytes if it is compressed."""
        shard = self[number]
        if not self.find_compression(number):
            return shard
        key = self.compute_key(number, _DECOMPRESSED)
        return replace(shard, cache_number=len(self) + number, key=key, size=UNKNOWN_SIZE)

    def is_decompressed(self, shard: DataShard) -> bool:
        """Return True if this shard has the decompressed bytes of a compressed shard."""
        return shard.cache_number >= len(self)

    def check_compressions(self) -> None:
        """Raise DatasetError if a name has the ending of a shard whose compression is not supported: its samples cannot
        be read."""
        listing = self.listing
        names = listing.paths.blob.tobytes()
        if not any(ending.encode() in names for ending in _REFUSED):
            return  # this search of all names at once is much faster than the loop below
        for index in range(len(listing)):
            if (path := listing.paths[index]).endswith(_REFUSED):
                raise DatasetError(
                    f"{path!r} has a compression that is not supported",
                    cause="only gzip (.tar.gz, .tgz) and Zstandard (.tar.zst, .tzst) are supported",
                    next_step="store plain .tar shards; formats like JPEG and PNG are already compressed",
                )

    def list_objects(self, shard: DataShard) -> list[RemoteObject]:
        """Return the objects whose bytes the shard has, in order."""
        return [self.listing[index] for index in range(shard.start, shard.stop)]

    def count_samples(self) -> Longs:
        """Return the number of samples of each shard: (shards,) int64. It is -1 (`topkube.data.remote.listing.UNKNOWN`)
        if the shard must be read to count its samples."""
        if self.format == "files":
            return self._stops - self._starts
        samples = np.asarray(self.listing.samples)
        return samples if self._has_samples is None else np.where(self._has_samples, samples, 0)


def _detect_format(listing: Listing) -> Format:
    """Return tar, Parquet or Arrow if every name has one of the endings of that format, or is that of a description;
    else files."""
    for format_name, endings in _ENDINGS.items():
        if _consists_of(listing, endings):
            return format_name  # type: ignore[return-value]
    return "files"


def _consists_of(listing: Listing, endings: tuple[str, ...]) -> bool:
    """Return True if names have these endings, and all others are names of descriptions."""
    found = False
    for index in range(len(listing)):
        path = listing.paths[index]
        if path.endswith(endings):
            found = True
        elif not _DESCRIPTION.search(path):
            return False
    return found


def _find_objects_with_samples(listing: Listing, format: str) -> npt.NDArray[np.bool_] | None:
    """Return True for each object with an ending of the format: (objects,). Return None if all objects have samples:
    no object has another ending, or all have, because the dataset has names of its own."""
    if format == "files":
        return None
    endings, paths = _ENDINGS[format], listing.paths
    has_ending = np.fromiter((paths[index].endswith(endings) for index in range(len(paths))), bool, len(paths))
    return None if has_ending.all() or not has_ending.any() else has_ending
