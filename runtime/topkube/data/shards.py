"""How a dataset is cut into shards, the unit that is fetched, cached and checked.

A tar or Parquet file is a shard. Small files are put together, by path, into shards of about `GROUP_BYTES`: one by one
they would cost a lock, a rename and an fsync each.
"""

from __future__ import annotations

import bisect
from dataclasses import dataclass
from typing import Literal

import numpy as np
import xxhash

from topkube.data.listing import UNKNOWN, Listing, Longs, Object
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
class Shard:
    """One shard. Objects `start` to `stop - 1` of the listing, one after the other, are its bytes."""

    number: int
    key: str
    start: int
    stop: int
    size: int


class Shards:
    """All shards of a listing, in columns."""

    def __init__(self, uri: str, listing: Listing, format: Format = "auto", group_bytes: int = GROUP_BYTES) -> None:
        self.uri, self.listing = uri, listing
        self.format = format if format != "auto" else _format(listing)
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

    def __getitem__(self, number: int) -> Shard:
        start, stop = int(self._starts[number]), int(self._stops[number])
        return Shard(number, self.key(number), start, stop, int(self.sizes[number]))

    def key(self, number: int, fingerprint: str = "") -> str:
        """32 hexadecimal digits that change with the URI, the names, sizes and versions of the shard's objects, and the
        transform; never the base name alone."""
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

    def objects(self, shard: Shard) -> list[Object]:
        return [self.listing[index] for index in range(shard.start, shard.stop)]

    def counts(self) -> Longs:
        """Samples of each shard, UNKNOWN where only its content tells."""
        if self.format == "files":
            return self._stops - self._starts
        return np.asarray(self.listing.samples)

    def named(self, path: str) -> int:
        """The number of the shard that holds object `path`. Raises KeyError."""
        listing = self.listing
        index = bisect.bisect_left(range(len(listing)), path, key=lambda at: listing.paths[at])
        if index == len(listing) or listing.paths[index] != path:
            raise KeyError(path)
        return int(np.searchsorted(self._starts, index, "right")) - 1


def _format(listing: Listing) -> Format:
    """By the names: all tar, all Parquet, all Arrow, else plain files."""
    blob_end = listing.paths.ends
    sample = {listing.paths[int(index)] for index in np.linspace(0, blob_end.size - 1, 64).astype(int)}
    if any(path.endswith(_COMPRESSED) for path in sample):
        raise DatasetError(
            f"{next(path for path in sample if path.endswith(_COMPRESSED))!r} is a compressed tar",
            cause="samples inside cannot be read one by one",
            next_step="store plain .tar shards; JPEG, PNG and the like are compressed already",
        )
    for name, endings in _ENDINGS.items():
        if all(path.endswith(endings) for path in sample) and all(
            listing.paths[index].endswith(endings) for index in range(len(listing))
        ):
            return name  # type: ignore[return-value]
    return "files"


def known(counts: Longs) -> bool:
    """Whether the number of samples of every shard is known."""
    return bool((counts != UNKNOWN).all())
