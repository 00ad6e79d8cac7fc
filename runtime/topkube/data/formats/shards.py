"""The division of a dataset into shards. A shard is the unit that is fetched, cached and verified.

A tar or Parquet file is a shard. Small files are grouped by path into shards of about `GROUP_BYTES`, because every
shard costs a lock, a rename and an fsync.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
import xxhash

from topkube.data.remote.listing import Listing, Longs, RemoteObject
from topkube.errors import DatasetError

Format = Literal["auto", "files", "tar", "parquet", "arrow"]
GROUP_BYTES = 8 << 20
_ENDINGS: dict[str, tuple[str, ...]] = {
    "tar": (".tar",),
    "parquet": (".parquet",),
    "arrow": (".arrow", ".feather"),
}
_COMPRESSED = (".tar.gz", ".tgz", ".tar.bz2", ".tar.xz", ".tar.zst")


@dataclass(frozen=True)
class DataShard:
    """A shard: the concatenated bytes of objects `start` to `stop - 1` of the listing."""

    number: int
    key: str
    start: int
    stop: int
    size: int


class Shards:
    """All shards of a listing, stored in columns."""

    def __init__(self, uri: str, listing: Listing, format: Format = "auto", group_bytes: int = GROUP_BYTES) -> None:
        self.uri, self.listing = uri, listing
        self.format = format if format != "auto" else _detect_format(listing)
        if self.format == "files":
            ends = np.cumsum(listing.sizes)
            group = np.maximum(ends - 1, 0) // max(1, group_bytes)
            self._starts: Longs = np.concatenate(([0], np.flatnonzero(np.diff(group)) + 1)).astype(np.int64)
        else:
            self._starts = np.arange(len(listing), dtype=np.int64)
        self._stops: Longs = np.append(self._starts[1:], len(listing))
        self.sizes: Longs = np.add.reduceat(listing.sizes, self._starts)

    def __len__(self) -> int:
        return self._starts.size

    def __getitem__(self, number: int) -> DataShard:
        start, stop = int(self._starts[number]), int(self._stops[number])
        return DataShard(number, self.key(number), start, stop, int(self.sizes[number]))

    def key(self, number: int, fingerprint: str = "") -> str:
        """Return 32 hexadecimal digits that change with the URI, with the paths, sizes and versions of the shard's
        objects, and with the fingerprint of the transform."""
        start, stop = int(self._starts[number]), int(self._stops[number])
        state = xxhash.xxh3_128(f"{self.uri}\0{fingerprint}\0{stop - start}\0".encode())
        listing = self.listing
        for texts in (listing.paths, listing.versions):
            ends = texts.ends[start:stop] - (texts.ends[start - 1] if start else 0)
            state.update(ends.astype("<i8").tobytes())
            state.update(texts.between(start, stop))
        state.update(listing.sizes[start:stop].astype("<i8").tobytes())
        return state.hexdigest()

    def keys(self) -> list[str]:
        return [self.key(number) for number in range(len(self))]

    def objects(self, shard: DataShard) -> list[RemoteObject]:
        return [self.listing[index] for index in range(shard.start, shard.stop)]

    def counts(self) -> Longs:
        """Return the number of samples of each shard; UNKNOWN if its content must be read to count them."""
        if self.format == "files":
            return self._stops - self._starts
        return np.asarray(self.listing.samples)


def _detect_format(listing: Listing) -> Format:
    """Return the format by the names: tar, Parquet or Arrow if all objects have its ending, else plain files."""
    blob_end = listing.paths.ends
    sample = {listing.paths[int(index)] for index in np.linspace(0, blob_end.size - 1, 64).astype(int)}
    if any(path.endswith(_COMPRESSED) for path in sample):
        raise DatasetError(
            f"{next(path for path in sample if path.endswith(_COMPRESSED))!r} is a compressed tar",
            cause="single samples cannot be read from a compressed tar",
            next_step="store plain .tar shards; formats like JPEG and PNG are already compressed",
        )
    for name, endings in _ENDINGS.items():
        if all(path.endswith(endings) for path in sample) and all(
            listing.paths[index].endswith(endings) for index in range(len(listing))
        ):
            return name  # type: ignore[return-value]
    return "files"
